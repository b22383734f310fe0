"""A recording of a real all-reduce shows what was coded and sent, and that it went on at the same time."""

import torch.distributed as dist
from on_rank import digest, rank, values
from scenarios import ranks

from ncz_plugins import Communicator
from ncz_plugins.core.runtime.device import has_spare_core
from ncz_plugins.core.runtime.trace import recording

NUMEL = 2_000_000


def of(events: list[dict], name: str, row: str = "") -> list[dict]:
    """Spans of one kind in the rows whose name begins so, in the order of time."""
    rows = {event["tid"] for event in events if event["ph"] == "M" and event["args"]["name"].startswith(row)}
    found = [event for event in events if event["ph"] == "X" and event["name"] == name and event["tid"] in rows]
    return sorted(found, key=lambda event: event["ts"])


def overlap(some: list[dict], others: list[dict]) -> bool:
    return any(a["ts"] < b["ts"] + b["dur"] and b["ts"] < a["ts"] + a["dur"] for a in some for b in others)


@ranks(2)
def test_coding_and_transfers_overlap(group):
    transport = {"min_bytes": 0, "frame_bytes": 262144, "hierarchy": "off"}
    with Communicator({"quantizer": {"kind": "error_bound"}, "transport": transport}, group) as communicator:
        tensor, unrecorded = values(rank, NUMEL), values(rank, NUMEL)
        communicator.all_reduce(unrecorded)
        dist.barrier(group)
        with recording() as events:
            communicator.all_reduce(tensor)
    assert digest(tensor) == digest(unrecorded)
    sent, received = of(events, "frame", "sending to rank"), of(events, "frame", "receiving from rank")
    encoded, decoded = of(events, "encode"), of(events, "decode")
    agreed, *_ = of(events, "agree")
    [measured] = of(events, "measure")
    # Two ranks send each other all that they have.
    assert len(sent) == len(received) == len(encoded) == len(decoded) >= 4
    assert sum(event["args"]["bytes"] for event in encoded) == 4 * NUMEL
    assert all(agreed["ts"] + agreed["dur"] <= event["ts"] for event in encoded)
    assert measured["ts"] + measured["dur"] <= encoded[0]["ts"]
    for one, two in zip(sent, sent[1:]):
        assert one["ts"] + one["dur"] <= two["ts"] + 1  # microseconds
    assert overlap(encoded, received)
    rows = [{event["tid"] for event in spans} for spans in (sent, received, encoded, decoded)]
    assert len(set.union(*rows)) == (4 if has_spare_core() else 3)
