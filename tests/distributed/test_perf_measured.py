"""What `ncz perf` measures, on every rank: all collectives, the exact answers, and ranks with different jobs."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from on_rank import raises, rank, world_size
from scenarios import on_ranks, ranks

from ncz_plugins.cli.perf import COLLECTIVES, Job, data, verify
from ncz_plugins.cli.perf.contenders import CONTENDERS, Context
from ncz_plugins.cli.perf.measure import Measurement
from ncz_plugins.cli.perf.rank import take_part
from ncz_plugins.core.config import Config, QuantizerConfig
from ncz_plugins.core.errors import NczError

SIZES = [1000, 300_000]
JOB = Job("all_reduce", SIZES, ["plain", "ncz", "fp16"], "noise", Config().model_dump(mode="json"), 2, False, 60.0)


def measured(job: Job, versions: list) -> list[dict]:
    """The records of a job, which rank 0 gets."""
    received = []
    Measurement(job, versions, received.append).run()
    return [each["result"] for each in received if "result" in each]


@ranks(3)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_collective_is_right(group, collective):
    records = measured(replace(JOB, collective=collective), [data.noise])
    assert {r["peer"] for r in records} == set(JOB.peers) and len(records) == len(SIZES) * len(JOB.peers)
    for r in records:
        assert r["op"] == ("sum" if collective in ("all_reduce", "reduce_scatter", "reduce") else "none")
        has_no_parts = collective in ("all_reduce", "reduce", "broadcast", "sendrecv")
        assert r["count"] == r["size"] // 4 // (1 if has_no_parts else 3)
        if r["size"] < 10_000 or r["peer"] != "ncz":
            assert r["error"] < 1e-3
        else:
            assert r["ratio"] > 3 and 0 < r["of_bound"] <= 1


@ranks(3)
@pytest.mark.parametrize("collective", sorted(CONTENDERS["fp8"].collectives))
def test_eight_bit_floats_keep_four_digits_in_binary_and_a_quarter_of_the_bytes(group, collective):
    context = Context(Config(), None, world_size, rank, collective)
    for numel in (3 * 1000, 3 * 1024):
        values = data.values(data.noise, rank, numel)
        with CONTENDERS["fp8"].open(context) as exchange:
            exchange.load(values)
            found = exchange.run().clone()
        exact = verify.exact(collective, values, QuantizerConfig()).values
        assert found.dtype == torch.float32 and found.shape == exact.shape
        assert ((found - exact).abs() <= exact.abs() / 16 + 1e-4).all() and not torch.equal(found.double(), exact)


@ranks(3)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_values_and_bounds_are_what_they_should_be(group, collective):
    """By an arithmetic of its own."""
    part, block = 10_000, 4096
    held = [data.values(data.noise, each, part * world_size).double() for each in range(world_size)]
    if collective in ("all_gather", "gather"):
        held = [x[:part] for x in held]
    own, nothing = slice(rank * part, (rank + 1) * part), torch.empty(0, dtype=torch.float64)
    values = {
        "all_reduce": sum(held),
        "reduce_scatter": sum(held)[own],
        "reduce": nothing if rank else sum(held),
        "all_gather": torch.cat(held),
        "gather": nothing if rank else torch.cat(held),
        "broadcast": held[0],
        "scatter": held[0][own],
        "all_to_all": torch.cat([x[own] for x in held]),
        "sendrecv": held[rank - 1],
    }[collective]

    def bounds(x, pieces) -> torch.Tensor:
        return torch.stack([b.square().mean().sqrt() for piece in x.chunk(pieces) for b in piece.split(block)]) / 8

    if not len(values):
        allowed = nothing
    elif collective in ("all_reduce", "reduce"):
        allowed = torch.stack([bounds(x, 1) for x in held]).amax(0) * world_size
    elif collective == "reduce_scatter":
        allowed = torch.stack([bounds(x, world_size) for x in held]).amax(0).chunk(world_size)[rank] * world_size
    else:
        allowed = bounds(values, 1 if collective in ("broadcast", "scatter", "sendrecv") else world_size)
    answer = verify.exact(collective, held[rank].float(), QuantizerConfig(mode="rms", value=0.125, block=block))
    assert torch.allclose(answer.values, values) and torch.allclose(torch.from_numpy(answer.allowed), allowed)


@ranks(3)
def test_weights_are_sent_exactly_as_changes(group):
    """Two versions of weights take turns."""
    config = Config(roles=("parameter",)).model_dump(mode="json")
    job = replace(JOB, collective="all_gather", peers=["plain", "ncz"], data="weights", config=config, sizes=[1 << 20])
    records = measured(job, [data.weights(data.train(steps)) for steps in (0, 1)])
    if rank == 0:
        plain, ours = records
        assert plain["type"] == ours["type"] == "bfloat16" and ours["max_error"] == 0
        assert ours["ratio"] > 1.5 and ours["bypasses"] == {}


@ranks(3)
def test_a_result_outside_the_bound_is_an_error_on_every_rank(group):
    """Though it is wrong on one rank only."""
    ours = CONTENDERS["ncz"]

    class Wrong(type(ours.open(Context(Config(), None, world_size, rank, "all_reduce")))):
        def run(self):
            return super().run() + (100.0 if dist.get_rank() == 1 else 0.0)

    CONTENDERS["ncz"] = replace(ours, start=Wrong)
    try:
        raises(NczError, lambda: measured(JOB, [data.noise]), "ncz: all_reduce of", "times its bound")
    finally:
        CONTENDERS["ncz"] = ours


def take_part_with_other_rounds_on_rank_1() -> str:
    try:
        take_part(replace(JOB, repeat=3 if rank == 1 else 2), print)
    except NczError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_ranks_with_different_options_are_refused(tmp_path):
    for found in on_ranks(2, take_part_with_other_rounds_on_rank_1, tmp_path):
        assert found.startswith("MismatchError: rank 1 was started with other options")
