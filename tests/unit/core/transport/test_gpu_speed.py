"""What ranks find out about their GPUs' connections. On a card: tests/distributed/test_devices.py."""

from types import SimpleNamespace

import pytest
import torch
from calls import decided, run_decided
from ranks import play

from ncz_plugins.core.bypass import Bypass
from ncz_plugins.core.call import Call
from ncz_plugins.core.call_description import connecting
from ncz_plugins.core.config import Config
from ncz_plugins.core.errors import MismatchError
from ncz_plugins.core.group import Group
from ncz_plugins.core.on_gpu import measure_gpus
from ncz_plugins.core.run import enter, require_same_call, run_plain
from ncz_plugins.core.runtime.device import Host
from ncz_plugins.core.training.policy import ParameterSlice
from ncz_plugins.core.training.state import Training
from ncz_plugins.core.transport import gpu_speed
from ncz_plugins.core.transport.gpu_speed import measured_on_gpus, use_fastest_groups

HOST = torch.device("cpu")


def all_reduce(numel: int) -> Call:
    tensor = torch.zeros(numel)
    return Call("all_reduce", tensor, tensor, torch.distributed.ReduceOp.SUM, parts=[ParameterSlice(None, numel)])


class Slow:
    """Uncompressed collectives of a rank behind a link, and the time that passes there."""

    rank = 0

    def __init__(self, gbps: float, world_size: int):
        self.world_size, self.plain, self.now = world_size, self, 0.0
        self._per_byte = 2 * (world_size - 1) / world_size * 8e-9 / gbps

    def perf_counter(self):
        return self.now

    def all_reduce(self, tensor, op):
        self.now += tensor.nbytes * self._per_byte
        return SimpleNamespace(wait=lambda: True)


@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize(
    ("gbps", "least", "at_a_fixed_rate"),
    [(0.02, "128 KiB", "128 KiB"), (1, "512 KiB", "128 KiB"), (25, "8 MiB", "4 MiB"), (2400, "1 GiB", "256 MiB")],
)
def test_the_least_size_follows_from_what_uncompressed_calls_carry(
    gbps, least, at_a_fixed_rate, world_size, monkeypatch, capsys
):
    for quantizer, enough in (({}, least), ({"mode": "bits", "value": 4}, at_a_fixed_rate)):
        link = Slow(gbps, world_size)
        monkeypatch.setattr(gpu_speed, "time", link)
        found = measured_on_gpus(Config(quantizer=quantizer), Host(), link, HOST)
        assert found.transport.link_gbps == pytest.approx(gbps, rel=0.01)
        assert link.now < 1 or gbps == 0.02
        assert f"carry {gbps:g} Gbit/s; tensors of {enough} and more" in capsys.readouterr().err


class Striping(Slow):
    """Groups that each carry so much, on a link that carries no more than `link_gbps`."""

    def __init__(self, gbps: float, link_gbps: float, most: int = 4):
        super().__init__(gbps, 2)
        self.groups, self._gbps, self._link_gbps, self._most = 1, gbps, link_gbps, most

    def use_groups(self, count: int) -> int:
        self.groups = min(count, self._most)
        return self.groups

    def all_gather_single(self, output, input):
        self.now += input.nbytes * 8e-9 / min(self.groups * self._gbps, self._link_gbps)
        return SimpleNamespace(wait=lambda: True)


@pytest.mark.parametrize(
    ("gbps", "link_gbps", "most", "connections", "best"),
    [
        (25, 25, 4, "auto", 1),
        (25, 40, 4, "auto", 2),
        (25, 100, 4, "auto", 4),
        (25, 100, 1, "auto", 1),  # a runtime without groups
        (1, 10, 4, "auto", 1),  # so slow that no thread is the limit
        (25, 100, 4, 3, 3),  # as the settings say
    ],
)
@pytest.mark.parametrize("quantizer", [{}, {"mode": "bits", "value": 4}], ids=["at a bound", "at a fixed rate"])
def test_as_many_groups_gather_as_carry_more(gbps, link_gbps, most, connections, best, quantizer, monkeypatch):
    link = Striping(gbps, link_gbps, most)
    link.groups = 1 if connections == "auto" else connections
    monkeypatch.setattr(gpu_speed, "time", link)
    config = Config(quantizer=quantizer, transport={"connections": connections}).resolved(link_gbps=gbps)
    use_fastest_groups(config, Host(), link, HOST)
    assert link.groups == best and link.now < 0.2


@pytest.mark.parametrize(("schedule", "ranks", "tried"), [("auto", 4, 1), ("ring", 4, 0), ("auto", 16, 0)])
def test_groups_are_tried_where_frames_are_gathered(schedule, ranks, tried, monkeypatch):
    config = Config(transport={"schedule": schedule}).resolved()
    times = []
    monkeypatch.setattr("ncz_plugins.core.on_gpu.measured_on_gpus", lambda *_: config.resolved(link_gbps=25))
    monkeypatch.setattr("ncz_plugins.core.on_gpu.require_same_call", lambda *_: None)
    monkeypatch.setattr("ncz_plugins.core.on_gpu.use_fastest_groups", lambda *_: times.append(1))
    ours = Group(Training(config), config, range(ranks), 0).for_gpus()
    measure_gpus(ours, "all_reduce", config, HOST, None, None)
    assert len(times) == tried


def test_ranks_find_the_same():
    def body(transport):
        return measured_on_gpus(Config(), Host(), transport, HOST).transport.link_gbps

    found = play(3, body)
    assert found[0] > 0 and found == [found[0]] * 3


def test_a_rank_that_makes_another_call_is_told():
    """Nobody waits in a collective that the others don't make."""
    config = Config().resolved()

    def body(transport):
        ours = Group(Training(config), config, range(2), transport.rank)
        if transport.rank == 0:
            with pytest.raises(MismatchError, match="being measured .* on rank 0, compressed on rank 1"):
                measure_gpus(ours, "all_reduce", Config(), HOST, Host(), transport)
        else:
            request = all_reduce(1 << 16)
            with pytest.raises(MismatchError, match="being measured"):
                run_decided(ours, request, Host(), transport)

    play(2, body)


def test_a_rank_that_does_not_connect_its_gpu_is_told():
    """NCCL would wait for it without a limit."""
    config = Config().resolved()

    def body(transport):
        ours = Group(Training(config), config, range(2), transport.rank)
        with pytest.raises(MismatchError, match="transfer connecting GPUs .* on rank 0, plain .* on rank 1"):
            if transport.rank == 0:
                require_same_call("all_reduce", connecting(ours.calls), transport, ours.ranks)
            else:
                call = decided(ours, all_reduce(1 << 16))
                call.bypass = Bypass.TOO_SMALL
                enter(ours, call)
                run_plain(ours, call, Host(), transport)

    play(2, body)


def test_tensors_on_gpus_have_a_least_size_of_their_own(monkeypatch):
    config = Config().resolved()
    ours = Group(Training(config), config, range(2), 0)
    fast = config.resolved(link_gbps=100)
    monkeypatch.setattr("ncz_plugins.core.on_gpu.measured_on_gpus", lambda *_: fast)
    monkeypatch.setattr("ncz_plugins.core.on_gpu.use_fastest_groups", lambda *_: None)
    monkeypatch.setattr("ncz_plugins.core.on_gpu.require_same_call", lambda *_: None)
    gpus = ours.for_gpus()
    measure_gpus(gpus, "all_reduce", config, HOST, None, None)
    assert decided(ours, all_reduce(1 << 20)).bypass is None
    assert decided(gpus, all_reduce(1 << 20)).bypass is Bypass.TOO_SMALL


def test_what_was_decided_for_a_cpu_is_decided_anew_for_gpus():
    """At 10 Gbit/s a CPU takes 16 MiB, and a GPU 4 MiB."""
    config = Config().resolved(link_gbps=10)
    ours = Group(Training(config), config, range(2), 0)
    assert decided(ours, all_reduce(2 << 20)).bypass is Bypass.TOO_SMALL
    assert decided(ours.for_gpus(), all_reduce(2 << 20)).bypass is None
