"""Every contender of `ncz perf` and the laboratory on real processes: its result is what it promises."""

import json
import sys
from functools import cache

import pytest
import torch
import torch.distributed as dist
from on_rank import digest, rank, start, values, world_size
from scenarios import program

from benchmarks.laboratory.launch import run
from benchmarks.laboratory.peers import CONTENDERS
from ncz_plugins import Config
from ncz_plugins.cli.perf import COLLECTIVES
from ncz_plugins.cli.perf.contenders import Context

pytestmark = pytest.mark.slow

# Error of normally distributed values, L2 norm, as a share of all that goes in: the most, and the least of the larger
# sizes. A peer that lost nothing there would not compress as it should.
EXACT = (0, 3e-7)
ERRORS = {
    "plain": EXACT,
    "ncz": (0.05, 0.25),
    "fp16": (1e-4, 2e-3),
    "bf16": (1e-3, 3e-2),
    "fp8": (1e-2, 5e-2),
    "ddp-fp16": (1e-4, 2e-3),
    "ddp-bf16": (1e-3, 3e-2),
    "ddp-powersgd-1": (0.9, 1.1),  # noise is of full rank
    "ddp-powersgd-4": (0.9, 1.1),
    "ddp-int8": (1e-3, 3e-2),
    "ddp-int8-channel": (1e-3, 1e-2),
    "horovod": EXACT,
    "horovod-fp16": (1e-4, 2e-3),
    "hivemind": (1e-3, 5e-2),
    "hivemind-quantile": (1e-3, 5e-2),
    "zstd": EXACT,
    "lz4": EXACT,
}
PER_RANK = {"hivemind", "hivemind-quantile"}  # adds to the exact values of each rank, so that results differ
PARTS = {"reduce_scatter", "scatter", "all_to_all"}  # of which each rank passes a part for each rank
TO_ROOT = {"reduce", "gather"}  # of which rank 0 alone gets a result
DIFFER_BY_RANK = PARTS | TO_ROOT | {"sendrecv"}
LARGE = -2  # runs from here on are of tensors that everyone compresses


def absent(name: str) -> str | None:
    return CONTENDERS[name].missing()


RANKS = 3  # an odd number; what `ncz perf` does with two is in tests/distributed/test_perf.py


SIZES = (1, 2, 7, 1009, 100_003)
IN_PARTS = 1_200_007  # hivemind's segments have several parts


@cache
def held(numel: int, seed: int) -> list[torch.Tensor]:
    """What every rank holds; drawn once for all peers."""
    return [values(r, numel, seed=seed) for r in range(world_size)]


@cache
def exact(collective: str, numel: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What this rank should have in the end, of float64, and the norm of what goes into it."""
    if collective in TO_ROOT:
        values, scale = exact({"reduce": "all_reduce", "gather": "all_gather"}[collective], numel, seed)
        return values if rank == 0 else values[:0], scale
    everyone = [one.double() for one in held(numel, seed)]
    if collective == "scatter":
        sent = everyone[0].chunk(world_size)[rank]
        return sent, sent.norm()
    if collective in ("broadcast", "sendrecv"):  # a rank receives from the rank before
        sent = everyone[0 if collective == "broadcast" else rank - 1]
        return sent, sent.norm()
    if collective == "all_gather":
        return torch.cat(everyone), torch.cat(everyone).norm()
    if collective in PARTS:
        everyone = [tensor.chunk(world_size)[rank] for tensor in everyone]
    if collective == "all_to_all":
        return torch.cat(everyone), torch.cat(everyone).norm()
    return sum(everyone), torch.cat(everyone).norm()


def check(name: str, collective: str, context: Context) -> dict:
    """All sizes of one peer; the second run of each has other values, and no new buffers."""
    sizes = [*SIZES, IN_PARTS] if name.startswith("hivemind") else SIZES
    runs = []
    with CONTENDERS[name].open(context) as exchange:
        assert exchange.details() == {} or name == "ncz"
        for size in sizes:
            numel = size * world_size if collective in PARTS else size
            for seed in (1, 2):
                everyone = held(numel, seed)
                tensor = everyone[rank].clone()
                wanted, scale = exact(collective, numel, seed)
                exchange.load(tensor)
                result = exchange.run()
                assert torch.equal(tensor, everyone[rank]), f"{name} changed its input"
                assert (result.dtype, result.shape) == (torch.float32, wanted.shape), name
                found = result.double() * (world_size if exchange.op == "avg" else 1)
                runs.append([float((found - wanted).norm() / scale), digest(result)])
        return {"op": exchange.op, "runs": runs, "details": exchange.details()}


def low_rank(terms: int, context: Context, name: str) -> list[float]:
    """The errors of a peer on matrices of this rank, alike but for factors on all ranks, call after call."""
    u, v = values(0, 130 * terms).view(130, terms), values(1, 130 * terms).view(terms, 130)
    errors = []
    with CONTENDERS[name].open(context) as exchange:
        for call in range(3):
            factors = [values(r, terms, seed=10 + call) for r in range(world_size)]
            everyone = [((u * f) @ v).flatten() for f in factors]
            wanted = sum(matrix.double() for matrix in everyone)
            exchange.load(everyone[rank])
            found = exchange.run().double() * world_size
            errors.append(float((found - wanted).norm() / wanted.norm()))
    return errors


def every_contender() -> dict:
    """One collective after another, sizes that divide by nothing, twice each.

    Returns, for each collective and contender, [relative L2 error, digest of the result] of every run, and what else is
    told.
    """
    start()
    results = {}
    for collective in COLLECTIVES:
        context = Context(Config(), dist.group.WORLD, world_size, rank, collective)
        names = [name for name, peer in CONTENDERS.items() if collective in peer.collectives and peer.missing() is None]
        results[collective] = {name: check(name, collective, context) for name in names}
    context = Context(Config(), None, world_size, rank, "all_reduce")
    results["low rank"] = {terms: low_rank(terms, context, f"ddp-powersgd-{terms}") for terms in (1, 4)}
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What every rank found."""
    folder = tmp_path_factory.mktemp("peers")
    run(
        [sys.executable, *program(every_contender, folder, seconds=250)],
        RANKS,
        folder / "records",
        horovod=absent("horovod") is None,
        timeout=250,
    )
    return [json.loads((folder / f"rank{each}.json").read_text()) for each in range(RANKS)]


@pytest.mark.parametrize("name", [name for name in CONTENDERS if name != "nccl"])
def test_every_result_is_as_exact_as_the_peer_can_be(ranks, name):
    if absent(name):
        pytest.skip(absent(name))
    least, most = ERRORS[name]
    for collective in CONTENDERS[name].collectives:
        # Rank 0 alone gets a result, or keeps its own part as it is.
        for found in ranks[:1] if collective in TO_ROOT else ranks[1:] if collective == "scatter" else ranks:
            errors = [error for error, _ in found[collective][name]["runs"]]
            assert len(errors) in (10, 12)
            assert max(errors) <= most, (collective, errors)
            assert min(errors[LARGE:]) >= least, (collective, errors)


@pytest.mark.parametrize("name", [name for name in CONTENDERS if name not in PER_RANK | {"nccl"}])
def test_results_are_the_same_on_all_ranks(ranks, name):
    if absent(name):
        pytest.skip(absent(name))
    for collective in CONTENDERS[name].collectives - DIFFER_BY_RANK:
        digests = {tuple(digest for _, digest in found[collective][name]["runs"]) for found in ranks}
        assert len(digests) == 1, collective


def test_power_sgd_is_exact_where_its_rank_suffices(ranks):
    for found in ranks:
        for terms, errors in found["low rank"].items():
            assert max(errors) < 1e-4, (terms, errors)


def test_only_sums_and_averages_say_so(ranks):
    for collective in COLLECTIVES:
        ops = {received["op"] for received in ranks[0][collective].values()}
        assert ops <= ({"sum", "avg"} if collective in ("all_reduce", "reduce_scatter", "reduce") else {"none"})


def test_ours_tells_what_it_did_and_the_others_nothing(ranks):
    for collective in COLLECTIVES:
        received = [found[collective]["ncz"]["details"] for found in ranks]
        times = 2 if collective == "sendrecv" else 1  # a send and a recv are two calls
        for details in received:
            assert details["calls"] == 10 * times and details["compressed_calls"] == 2 * times
            assert details["bypasses"] == {"too small": 8 * times}
        assert sum(details["plain_bytes"] for details in received) > 3 * sum(
            details["wire_bytes"] for details in received
        )
        assert sum(sum(details["coders"].values()) for details in received) >= 2  # a frame of each call
        assert all(
            found[collective][name]["details"] == {} for found in ranks for name in found[collective] if name != "ncz"
        )
