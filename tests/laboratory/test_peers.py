"""Every contender of `ncz perf` and the laboratory on real processes: its result is what it promises."""

import json
import sys

import pytest
from processes import WORKERS
from repository import ROOT

from benchmarks.laboratory.launch import run
from benchmarks.laboratory.peers import CONTENDERS
from ncz_plugins.cli.perf import COLLECTIVES

pytestmark = pytest.mark.slow

# Error of normally distributed values, L2 norm, as a share of all that goes in: the most, and the least of the larger
# sizes. A peer that lost nothing there would not compress as it should.
EXACT = (0, 3e-7)
ERRORS = {
    "plain": EXACT,
    "ncz": (0.05, 0.25),
    "fp16": (1e-4, 2e-3),
    "bf16": (1e-3, 3e-2),
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
LARGE = -4  # runs from here on are of tensors that everyone compresses


def absent(name: str) -> str | None:
    return CONTENDERS[name].missing()


RANKS = 3  # an odd number; what `ncz perf` does with two is in tests/distributed/test_perf.py


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What every rank found."""
    folder = tmp_path_factory.mktemp("peers")
    run(
        [sys.executable, str(WORKERS / "perf_peers.py")],
        RANKS,
        folder / "records",
        horovod=absent("horovod") is None,
        environment={"NCZ_TEST_FOLDER": str(folder), "PYTHONPATH": str(ROOT)},
        timeout=250,
    )
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("name", [name for name in CONTENDERS if name != "nccl"])
def test_every_result_is_as_exact_as_the_peer_can_be(ranks, name):
    if absent(name):
        pytest.skip(absent(name))
    least, most = ERRORS[name]
    for collective in CONTENDERS[name].collectives:
        for rank in ranks:
            errors = [error for error, _ in rank[collective][name]["runs"]]
            assert len(errors) == 12
            assert max(errors) <= most, (collective, errors)
            assert min(errors[LARGE:]) >= least, (collective, errors)


@pytest.mark.parametrize("name", [name for name in CONTENDERS if name not in PER_RANK | {"nccl"}])
def test_results_are_the_same_on_all_ranks(ranks, name):
    if absent(name):
        pytest.skip(absent(name))
    for collective in CONTENDERS[name].collectives - {"reduce_scatter"}:
        digests = {tuple(digest for _, digest in rank[collective][name]["runs"]) for rank in ranks}
        assert len(digests) == 1, collective


def test_power_sgd_is_exact_where_its_rank_suffices(ranks):
    for rank in ranks:
        for terms, errors in rank["low rank"].items():
            assert max(errors) < 1e-4, (terms, errors)


def test_only_sums_and_averages_say_so(ranks):
    for collective in COLLECTIVES:
        ops = {received["op"] for received in ranks[0][collective].values()}
        assert ops <= ({"sum", "avg"} if collective in ("all_reduce", "reduce_scatter") else {"none"})


def test_ours_tells_what_it_did_and_the_others_nothing(ranks):
    for collective in COLLECTIVES:
        received = [rank[collective]["ncz"]["details"] for rank in ranks]
        for details in received:
            assert details["calls"] == 12 and details["compressed_calls"] == 4
            assert details["bypasses"] == {"too small": 8}
        assert sum(details["plain_bytes"] for details in received) > 3 * sum(
            details["wire_bytes"] for details in received
        )
        assert sum(sum(details["coders"].values()) for details in received) > 4
        assert all(
            rank[collective][name]["details"] == {} for rank in ranks for name in rank[collective] if name != "ncz"
        )
