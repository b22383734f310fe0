"""What `auto` comes to, measured at the opening or read from a file; leaves what each rank got, and what went wrong.

tuning.py HIERARCHY: see transport.hierarchy.
"""

import contextlib
import io
import os
import sys
import warnings
from pathlib import Path

import torch
from common import digest, finish, start, values

from ncz_plugins import Communicator, Config, NczError
from ncz_plugins.core.config import CoderCosts
from ncz_plugins.core.tuning.tuning_file import SpeedComparison, Trial, Tuning

OPEN = {"frame_bytes": "auto", "min_bytes": "auto"}
ELEMENTS = 1 << 20

rank, world_size = start()
hierarchy = int(sys.argv[1]) if len(sys.argv) > 1 else "off"
folder = Path(os.environ["NCZ_TEST_RESULT"]).parent
everyone = [values(r, ELEMENTS) for r in range(world_size)]
exact = sum(each.double() for each in everyone)
result = {}


def error_of(config: dict) -> list[str]:
    try:
        Communicator(config).close()
    except NczError as error:
        return [type(error).__name__, str(error)]
    return []


def file(name: str, **values) -> Path:
    """A tuning file of this rank's own."""
    path = folder / f"{name}{rank}.json"
    found = {
        "format": 1,
        "world_size": world_size,
        "schedule": "direct",
        "frame_bytes": 128 << 10,
        "min_bytes": 1 << 20,
        "link_gbps": 0.5,
        "costs": CoderCosts(raw=1, fixed=2, huffman=3, rans=4, rans_rest=5),
        "latency_seconds": 1e-4,
        "trials": [Trial(schedule="direct", frame_bytes=128 << 10, nbytes=1 << 20, seconds=0.5)],
        "comparisons": [SpeedComparison(nbytes=1 << 24, plain_seconds=2, compressed_seconds=1)],
        "quantizer": Config().quantizer.describe(),
        "kernels": "avx2",
        "version": "0",
    }
    Tuning(**found | values).write(path)
    return path


def with_file(path: Path) -> dict:
    return {"transport": {"tuning": str(path), "hierarchy": hierarchy, **OPEN}}


# Measured at the opening: alike on all ranks, said by one, and not counted as anybody's calls.
quantizer = {"mode": "abs", "value": 0.01}
printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    communicator = Communicator({"quantizer": quantizer, "transport": {"hierarchy": hierarchy, **OPEN}})
with communicator:
    result["opened"] = communicator.config.canonical()
    result["printed"] = printed.getvalue()
    result["calls"] = communicator.stats.total.calls
    tensor = everyone[rank].clone()
    communicator.all_reduce(tensor)
    assert (tensor - exact).abs().max() <= world_size * 0.01 + 1e-5
    result["sum"] = digest(tensor)
    result["counted"] = communicator.stats.total.calls

# What is named is kept, also where the rest is measured.
with contextlib.redirect_stdout(io.StringIO()):
    named = {"schedule": "ring", "frame_bytes": "64KiB", "min_bytes": "auto", "link_gbps": 3, "hierarchy": hierarchy}
    with Communicator({"transport": named}) as communicator:
        transport = communicator.config.transport
        result["named"] = [transport.schedule, transport.frame_bytes, transport.link_gbps]
        assert transport.min_bytes != "auto"

# From a file.
with Communicator(with_file(file("same"))) as communicator:
    transport = communicator.config.transport
    result["from file"] = [transport.schedule, transport.frame_bytes, transport.min_bytes, transport.link_gbps]
    result["costs"] = communicator.config.entropy.costs.model_dump()
    communicator.all_reduce(everyone[rank][: ELEMENTS // 8].clone())
    result["below"] = communicator.stats.total.bypasses

# A link that is too fast.
with Communicator(with_file(file("never", min_bytes="never"))) as communicator:
    tensor = everyone[rank].clone()
    communicator.all_reduce(tensor)
    assert torch.equal(tensor, sum(everyone))  # in the order of ranks
    result["never"] = communicator.stats.total.bypasses

# Of other ranks.
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with Communicator(with_file(file("others", world_size=world_size + 1))) as communicator:
        result["others"] = [communicator.config.transport.schedule, communicator.config.transport.frame_bytes]
result["warned"] = [str(each.message) for each in caught if issubclass(each.category, RuntimeWarning)]

# What can't be is an error on every rank.
result["differing"] = error_of(with_file(file("differing", min_bytes=(1 + rank) << 20)))
result["missing everywhere"] = error_of(with_file(folder / "nowhere.json"))
mine = folder / "nowhere.json" if rank == 1 else file("present")
result["missing on rank 1"] = error_of(with_file(mine))
damaged = file("damaged")
damaged.write_text(damaged.read_text()[:-20])
result["damaged"] = error_of(with_file(damaged))

finish(result)
