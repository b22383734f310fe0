"""Gathers and broadcasts that send changes: the bits of a plain call, whatever happened in between."""

import pytest
import torch
from ranks import play

from ncz_plugins.core.bypass import Bypass
from ncz_plugins.core.call import Call
from ncz_plugins.core.config import Config
from ncz_plugins.core.errors import MismatchError
from ncz_plugins.core.group import Group
from ncz_plugins.core.run import decide, enter, run, run_plain
from ncz_plugins.core.runtime.device import Host
from ncz_plugins.core.training.baseline import Baseline
from ncz_plugins.core.training.policy import ParameterSlice
from ncz_plugins.core.training.state import Training
from ncz_plugins.core.transport.topology import Nodes

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Rank:
    """One rank with its own part of weights, which all ranks gather again and again."""

    def __init__(self, transport, dtype=torch.bfloat16, numel=5000, nodes=None, schedule="auto", **sections):
        self.transport = transport
        travel = {"min_bytes": 0, "schedule": schedule, "frame_bytes": "16KiB"}
        config = Config.load({"roles": ["parameter"], "transport": travel} | sections).resolved()
        self.ranks = range(transport.world_size)
        self.collectives = Group(Training(config), config, self.ranks, transport.rank, nodes)
        generator = torch.Generator().manual_seed(7)
        start = torch.randn(transport.world_size, numel, generator=generator, dtype=torch.float64)
        self.exact = (0.02 * start).to(dtype)  # what all ranks must have
        self.weights = self.exact.clone()  # what this rank has
        self.baseline = Baseline()
        self._generator = generator

    @property
    def own(self) -> torch.Tensor:
        return self.weights[self.transport.rank]

    @property
    def total(self):
        return self.collectives.training.stats.total

    def step(self, scale: float = 1e-3) -> None:
        """Move all weights a little; this rank moves its own part only."""
        noise = torch.randn(self.exact.shape, generator=self._generator, dtype=torch.float64)
        self.exact = (self.exact.double() + scale * noise).to(self.exact.dtype)
        self.own.copy_(self.exact[self.transport.rank])

    def gather(self, apart: bool = False, baseline: Baseline | None = None) -> int:
        """Returns the bytes that this rank sent."""
        before = self.total.wire_bytes
        given = self.own.clone() if apart else self.own
        parts = [ParameterSlice(None, self.weights.numel())]
        self.run(Call("all_gather_single", given, self.weights, role="parameter", parts=parts,
                         baseline=baseline or self.baseline))  # fmt: skip
        return self.total.wire_bytes - before

    def broadcast(self, tensor: torch.Tensor, root: int) -> int:
        before = self.total.wire_bytes
        parts = [ParameterSlice(None, tensor.numel())]
        self.run(Call("broadcast", tensor, tensor, root=root, role="parameter", parts=parts, baseline=self.baseline))
        return self.total.wire_bytes - before

    def run(self, call: Call) -> None:
        decide(self.collectives, call)
        enter(self.collectives, call)
        run_it = run_plain if call.bypass else run
        run_it(self.collectives, call, Host(), self.transport)

    @property
    def is_exact(self) -> bool:
        return torch.equal(self.weights.view(torch.uint8), self.exact.view(torch.uint8))


@pytest.mark.parametrize("apart", [False, True], ids=["in place", "apart"])
@pytest.mark.parametrize("schedule", ["ring", "direct"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gathers_are_exact_and_small(dtype, schedule, apart):
    def body(transport):
        rank = Rank(transport, dtype, schedule=schedule)
        sent = []
        for _ in range(4):
            rank.step()
            sent.append(rank.gather(apart))
            assert rank.is_exact
        return sent, rank.total.sent_whole

    for sent, whole in play(3, body):
        assert whole == {"first call": 1}
        if dtype in (torch.bfloat16, torch.float16):
            assert max(sent[1:]) < 0.75 * sent[0]


@pytest.mark.parametrize("numel", [0, 1, 2, 127, 4099])
def test_any_size(numel):
    def body(transport):
        rank = Rank(transport, numel=numel)
        for _ in range(3):
            rank.step()
            rank.gather()
            assert rank.is_exact

    play(2, body, reuse=True)


def test_weights_that_do_not_move_cost_next_to_nothing():
    def body(transport):
        rank = Rank(transport, numel=100_000)
        rank.gather()
        return rank.gather()

    assert max(play(2, body)) < 4000


def test_bits_that_are_no_numbers_survive():
    def body(transport):
        rank = Rank(transport)
        rank.gather()
        nan = float("nan")
        for version, payload in (([nan, -float("inf"), -0.0, 0.0], 0x7FFF), ([1.0, nan, 0.0, -0.0], -1)):
            rank.exact[:, :4] = torch.tensor(version).to(rank.exact.dtype)
            rank.exact.view(torch.int16)[:, 4] = payload  # NaN that carry something
            rank.own.copy_(rank.exact[transport.rank])
            rank.gather()
            assert rank.is_exact

    play(2, body)


@pytest.mark.parametrize("who", ["a receiver", "the owner, behind the last gather", "all alike"])
def test_weights_that_somebody_changed_are_sent_whole_and_counted(who):
    def body(transport):
        rank = Rank(transport)
        rank.step()
        rank.gather()
        if who == "a receiver" and transport.rank == 0:
            rank.weights[1, 77] += 1
        if who == "all alike":
            rank.weights.mul_(2)  # of the other ranks' parts too
            rank.exact.mul_(2)
        if who == "the owner, behind the last gather" and transport.rank == 1:
            rank.baseline.forget()
        rank.step()
        rank.gather()
        assert rank.is_exact
        first = dict(rank.total.sent_whole)
        rank.step()
        rank.gather()
        assert rank.is_exact
        return first, rank.total.sent_whole

    reason = "first call" if "owner" in who else "changed in between"
    for first, later in play(2, body):
        assert first == later
        assert first == {"first call": 1} | {reason: 2 if reason == "first call" else 1}


def test_only_the_part_that_differs_is_sent_whole():
    def body(transport):
        rank = Rank(transport, numel=50_000)
        rank.step()
        rank.gather()
        if transport.rank == 0:
            rank.weights[1, 0] += 1  # of rank 1
        rank.step()
        return rank.gather()

    by_rank = play(3, body)
    assert by_rank[1] > 1.5 * max(by_rank[0], by_rank[2])


@pytest.mark.parametrize("world_size", [2, 3])
def test_broadcasts(world_size):
    def body(transport):
        rank, sent = Rank(transport), []
        tensor = torch.zeros(20_000, dtype=torch.bfloat16)
        generator = torch.Generator().manual_seed(3)
        exact = 0.02 * torch.randn(20_000, generator=generator)
        for _ in range(3):
            exact += 1e-4 * torch.randn(20_000, generator=generator)
            if transport.rank == 1:
                tensor.copy_(exact)
            sent.append(rank.broadcast(tensor, root=1))
            assert torch.equal(tensor, exact.bfloat16())
        assert (rank.baseline.nbytes > 0) == (transport.rank == 1)
        return sent

    sent = play(world_size, body)[1]
    assert max(sent[1:]) < 0.6 * sent[0]


def test_ranks_in_nodes():
    nodes = [Nodes([[0, 1], [2, 3]], node, local) for node in (0, 1) for local in (0, 1)]

    def body(transport):
        rank = Rank(transport, nodes=nodes[transport.rank])
        for _ in range(3):
            rank.step()
            rank.gather()
            assert rank.is_exact
        return rank.total.sent_whole

    assert play(4, body) == [{"first call": 1}] * 4


def test_a_plain_gather_in_between_makes_the_next_one_whole():
    def body(transport):
        rank = Rank(transport, steps={"warmup": 1})
        rank.step()
        rank.gather()
        assert rank.total.bypasses == {Bypass.WARM_UP.value: 1}
        rank.collectives.training.step = 1
        for _ in range(2):
            rank.step()
            rank.gather()
            assert rank.is_exact
        return rank.total.sent_whole

    assert play(2, body) == [{"first call": 1}] * 2


def test_ranks_must_agree_on_whether_there_is_a_baseline():
    def body(transport):
        rank = Rank(transport)
        request = Call(
            "all_gather_single",
            rank.own,
            rank.weights,
            role="parameter",
            parts=[ParameterSlice(None, rank.weights.numel())],
            baseline=rank.baseline if transport.rank else None,
        )
        with pytest.raises(MismatchError, match="as changes from a baseline on rank 1, compressed on rank 0"):
            rank.run(request)

    play(2, body)


def test_a_baseline_of_another_tensor_counts_as_none():
    baseline = Baseline()
    baseline.keep(torch.ones(4))
    assert baseline.nbytes == 16
    assert baseline.sent(torch.zeros(4)).tolist() == [1] * 4
    assert baseline.sent(torch.zeros(5)) is None
    assert baseline.sent(torch.zeros(4, dtype=torch.bfloat16)) is None
    baseline.keep(torch.zeros(5))
    assert baseline.sent(torch.zeros(4)) is None and baseline.nbytes == 20


def test_bytes_are_counted_by_role():
    def body(transport):
        rank = Rank(transport)
        rank.gather()
        return rank.total

    for total in play(2, body):
        assert total.plain_bytes_by_role == {"parameter": total.plain_bytes} and total.plain_bytes
        assert total.wire_bytes_by_role == {"parameter": total.wire_bytes}
