"""Large tensors are measured in pieces while their first frames travel: that changes no bit and no decision."""

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from ranks import play, same_bits

from ncz_plugins.core.bypass import BypassBackoff
from ncz_plugins.core.call import Call, Request
from ncz_plugins.core.call_run import run
from ncz_plugins.core.codec.layout import Layout, Window
from ncz_plugins.core.codec.quantize import Scales
from ncz_plugins.core.codec.scale_agreement import DeviceAgreement, pieces_of
from ncz_plugins.core.config import Config
from ncz_plugins.core.runtime.device import Host
from ncz_plugins.core.schedules import direct, ring
from ncz_plugins.kernels.format import CHUNK

SCHEDULES = {"ring": ring, "direct": direct}
MODES = {"rms": 0.25, "rel": 0.01, "range": 0.01}
FRAMES = 9  # of a segment: pieces of 2, 2 and 5
COLLECTIVES = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "broadcast")


def config_of(mode: str = "rms", value: float | None = None, **quantizer) -> Config:
    return Config(quantizer={"mode": mode, "value": MODES[mode] if value is None else value, **quantizer})


def values(rank: int, numel: int, dtype=torch.float32) -> torch.Tensor:
    """Each block of a scale of its own."""
    generator = torch.Generator().manual_seed(1000 + rank)
    scales = torch.logspace(-3, 2, 1 + numel // CHUNK).repeat_interleave(CHUNK)[:numel]
    return (torch.randn(numel, generator=generator) * scales).to(dtype)


def call(
    transport, config: Config, collective: str, schedule, tensor: torch.Tensor, **more
) -> tuple[Call, torch.Tensor]:
    """A call on a tensor of which every segment has FRAMES frames but for the last, and where its result will be."""
    rank, n, numel = transport.rank, transport.world_size, tensor.numel()
    flat = Window(tensor)
    if collective == "broadcast":
        layout, measured, output = Layout.of([numel], CHUNK), range(1 if rank == 0 else 0), flat
        more |= {"root": 0, "schedule": lambda *args: schedule.broadcast(*args, root=0)}
    elif collective == "all_reduce":
        layout, measured, output = Layout.split(numel, n, CHUNK, 0), range(n), flat
        more |= {"addends": n, "schedule": schedule.all_reduce}
    elif collective == "reduce_scatter_tensor":
        layout, measured = Layout.of([numel // n] * n, CHUNK), range(n)
        output = Window(tensor[layout.segment(rank)], layout.segment(rank).start)  # in place, as far as that goes
        more |= {"addends": n, "schedule": schedule.reduce_scatter}
    else:
        layout, measured, output = Layout.of([numel // n] * n, CHUNK), range(rank, rank + 1), flat
        flat = Window(tensor[layout.segment(rank)], layout.segment(rank).start)
        more |= {"schedule": schedule.all_gather}
    request = Request(collective, flat.data, output.data, dist.ReduceOp.SUM)
    made = Call(collective, config, layout, flat, output, measured, plain=request.start_plain, **more)
    return made, output.data


def test_pieces_are_whole_frames_and_blocks():
    def pieces(frames: int, link_gbps: float | None = None, is_far: bool = False, **quantizer) -> list[range]:
        config = Config(quantizer=quantizer, transport={"link_gbps": link_gbps})
        return pieces_of(Layout.split(2 * frames * 4 * CHUNK - 5, 2, 4 * CHUNK, 0), config, is_far)

    assert pieces(3) == [range(3)]
    assert pieces(4) == [range(0, 2), range(2, 4)]
    assert pieces(7) == [range(0, 2), range(2, 7)]
    assert pieces(9) == [range(0, 2), range(2, 4), range(4, 9)]
    assert pieces(16) == [range(0, 2), range(2, 4), range(4, 8), range(8, 16)]
    assert pieces(4, block=8 * CHUNK) == [range(0, 2), range(2, 4)]  # blocks of two frames
    for whole in ({"block": 0}, {"block": 3 * CHUNK}, {"mode": "abs"}, {"kind": "lossless"}):
        assert pieces(8, **whole) == [range(8)]
    assert len(pieces(8, link_gbps=1)) == 3 and len(pieces(8, link_gbps=10)) == 1
    assert len(pieces(15)) == 3 and pieces(15, is_far=True) == [range(15)]
    assert pieces(40, is_far=True) == [range(0, 8), range(8, 16), range(16, 40)]


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mode, block", [("rms", CHUNK), ("rms", 2 * CHUNK), ("rel", CHUNK), ("range", CHUNK)])
def test_pieces_change_no_bit(mode, block, schedule, collective):
    config = config_of(mode, block=block, error_feedback=False)
    numel = 3 * FRAMES * CHUNK - 3 * 77
    results = {}
    for in_pieces in (True, False):

        def body(transport, in_pieces=in_pieces):
            tensor = values(transport.rank, numel)
            made, result = call(transport, config, collective, SCHEDULES[schedule], tensor, in_pieces=in_pieces)
            assert len(pieces_of(made.layout, config)) >= 3
            counters = run(made, Host(two_threads=True), transport)
            assert counters.compressed_calls == 1
            return result

        results[in_pieces] = play(3, body)
    assert all(same_bits(both) for both in zip(*results.values()))
    assert collective == "reduce_scatter_tensor" or same_bits(results[True])


@pytest.mark.parametrize("way", ["mesh", "gloo", "rounds"])
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_found_late_leaves_everything_as_it_was(schedule, collective, way):
    """A NaN in the last piece: frames of the first ones have travelled by then. The next call is as if nothing was."""
    world_size, numel = 3, 3 * FRAMES * CHUNK
    config = config_of(error_feedback=False, kind="error_bound")  # at random, each call would differ

    def body(transport):
        tensor = values(transport.rank, numel)
        if transport.rank == 0:
            tensor[numel // world_size - 3] = float("nan")  # in the last frame of the first segment
            tensor[-3] = float("nan")
        kept = tensor.clone()
        made, result = call(transport, config, collective, SCHEDULES[schedule], tensor)
        go_plain = made.plain

        def checked_plain(plain):
            assert same_bits([kept, tensor])
            return go_plain(plain)

        counters = run(replace(made, plain=checked_plain), Host(two_threads=True), transport)
        assert counters.bypasses == {"non-finite": 1} and counters.compressed_calls == 0 and not counters.coders
        frames = counters.wire_bytes - counters.plain_bytes
        assert 0 < frames < 0.6 * counters.plain_bytes
        again = values(transport.rank, numel)
        made, after = call(transport, config, collective, SCHEDULES[schedule], again, number=2)
        assert run(made, Host(two_threads=True), transport).compressed_calls == 1
        return result, after

    def untroubled(transport):
        made, result = call(transport, config, collective, SCHEDULES[schedule], values(transport.rank, numel))
        run(made, Host(), transport)
        return result

    results, after = zip(*play(world_size, body, way))
    assert any(result.isnan().any() for result in results)
    everyone = [values(rank, numel).double() for rank in range(world_size)]
    part = numel // world_size
    for rank, result in enumerate(results):
        exact = {
            "all_reduce": sum(everyone),
            "reduce_scatter_tensor": sum(everyone)[rank * part :][:part],
            "all_gather_into_tensor": torch.cat([each[i * part :][:part] for i, each in enumerate(everyone)]),
            "broadcast": everyone[0],
        }[collective]
        finite = ~result.isnan()
        assert finite.sum() >= result.numel() - 2
        torch.testing.assert_close(result[finite].double(), exact[finite], rtol=1e-4, atol=1e-4)
    assert all(same_bits(both) for both in zip(after, play(world_size, untroubled)))


def test_the_reason_is_that_of_the_whole_tensor():
    """The first piece has too large codes, the last an infinity. All calls of the kind then go plain for a while."""

    def body(transport):
        tensor = values(transport.rank, 2 * FRAMES * CHUNK)
        tensor[:CHUNK] = 1e-9
        tensor[0] = 1.0
        reasons = []
        config, backoff = config_of("rms", 1e-8), BypassBackoff()
        for last in (float("inf"), 1.0, 1.0):
            tensor[-1] = last
            number = len(reasons) + 1
            made, _ = call(transport, config, "all_reduce", ring, tensor.clone(), number=number)
            counters = run(made, Host(), transport, backoff)
            reasons += counters.bypasses
            assert (counters.measure_seconds > 0) == (len(reasons) < 3)
            assert 0 < counters.wire_bytes - counters.plain_bytes < 20_000  # agreements, no frame
        return reasons

    assert play(2, body) == [["non-finite", "code overflow", "code overflow"]] * 2


@pytest.mark.parametrize("block", [CHUNK, 2 * CHUNK])
def test_a_piece_that_is_not_worth_it_does_not_decide_for_the_whole(block):
    """float16 at a fine bound: noise needs nearly all bits, zeros need none."""
    numel = 2 * FRAMES * CHUNK
    config = config_of("range", 2e-5, block=block)

    def body(transport, noisy: range, in_pieces: bool):
        tensor = torch.zeros(2, FRAMES, CHUNK)
        tensor[:, noisy.start : noisy.stop] = values(transport.rank, numel).view(2, FRAMES, CHUNK)[
            :, noisy.start : noisy.stop
        ]
        made, result = call(transport, config, "all_reduce", ring, tensor.view(-1).half(), in_pieces=in_pieces)
        counters = run(made, Host(), transport)
        return result, counters.bypasses

    for noisy, bypasses in ((range(2), {}), (range(3, 7), {}), (range(9), {"not worth it": 1})):
        found = [each for in_pieces in (True, False) for each in play(2, lambda t, p=in_pieces, q=noisy: body(t, q, p))]
        assert [reasons for _, reasons in found] == [bypasses] * 4
        assert same_bits([result for result, _ in found])


class Noting:
    """The kernels, with a list of those used on any elements."""

    def __init__(self, backend, used: list[str]):
        self._backend = backend
        self._used = used

    def __getattr__(self, name: str):
        value = getattr(self._backend, name)
        if name not in ("root_mean_squares", "encode_sums", "decode_frames"):
            return value

        def noted(of, *args):
            if name == "root_mean_squares":
                self._used += ["measure"]
            elif name == "encode_sums":
                self._used += ["reduce" if each.frames else "encode" for each in of if each.x.numel()]
            else:
                self._used += ["decode"] * len(of)
            return value(of, *args)

        return noted


def test_measuring_pieces_is_part_of_the_agreement():
    seconds = 0.01

    def body(transport):
        device = Host()
        measure = device.backend.root_mean_squares

        def slowly(*args):
            time.sleep(seconds)
            return measure(*args)

        device.backend = Noting(device.backend, [])
        device.backend.root_mean_squares = slowly
        made, _ = call(transport, config_of(), "all_reduce", ring, values(transport.rank, 2 * FRAMES * CHUNK))
        return run(made, device, transport)

    for counters in play(2, body):
        assert 6 * seconds <= counters.measure_seconds <= counters.agree_seconds  # three pieces of two segments


def kernels_used(poisoned: bool, schedule=ring, world_size: int = 2) -> list[list[str]]:
    """On each rank, in an all-reduce whose last value may be infinite."""

    def body(transport):
        used: list[str] = []
        device = Host()
        device.backend = Noting(device.backend, used)
        tensor = values(transport.rank, world_size * FRAMES * CHUNK)
        if poisoned:
            tensor[-1] = float("inf")
        made, _ = call(transport, config_of(), "all_reduce", schedule, tensor)
        run(made, device, transport)
        return used

    return play(world_size, body)


def test_the_first_frame_of_a_piece_is_coded_before_the_next_one_is_measured():
    measure = ["measure"] * 2  # of both segments
    for used in kernels_used(poisoned=False):
        assert used[:15] == [*measure, "encode", *measure, *["encode"] * 2, *measure, *["encode"] * 6]
        assert sorted(used[15:]) == ["decode"] * 18 + ["reduce"] * 9


def test_a_frame_for_each_rank_is_coded_before_the_next_piece_is_measured():
    measure = ["measure"] * 3
    for used in kernels_used(poisoned=False, schedule=direct, world_size=3):
        assert used[:27] == [*measure, *["encode"] * 2, *measure, *["encode"] * 4, *measure, *["encode"] * 12]
        assert sorted(used[27:]) == ["decode"] * 27 + ["reduce"] * 9


def test_nothing_is_coded_once_it_is_known_to_be_for_nothing():
    for used in kernels_used(poisoned=True):
        measure = ["measure"] * 2
        assert used == [*measure, "encode", *measure, *["encode"] * 2, *measure, "encode"]


@pytest.mark.parametrize("outcome, reason", [([0, 0, 5], None), ([0, 1, 5], "code overflow")])
def test_on_a_gpu_ranks_agree_once_and_the_host_learns_the_outcome_later(outcome, reason):
    measured, scales = torch.ones(3), Scales(torch.ones(3), torch.ones(3))
    on_device = torch.tensor(outcome)
    agreed = []

    def derive(found):
        assert agreed == [measured] and found is measured
        return scales, on_device

    def judge(found, seen):
        assert found is scales
        return "code overflow" if seen[1] else None

    agreement = DeviceAgreement(measured, agreed.append, derive, judge)
    for frames in (1, 9):
        assert not agreement.complete
        agreement.require(frames)
        assert agreement.scales is scales and agreement.outcome is on_device and agreement.bypass is None
    agreement.learn(outcome)
    assert agreement.complete and agreement.bypass == reason and agreement.outcome is None
