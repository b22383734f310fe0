"""A call that goes plain because of its values: nothing is lost, and the next call is as if nothing had happened."""

import pytest
import torch
import torch.distributed as dist
from calls import planned, run_planned
from ranks import play, same_bits

from ncz_plugins.core.call import Call
from ncz_plugins.core.codec.layout import Layout, Window
from ncz_plugins.core.config import Config
from ncz_plugins.core.runtime.device import Host
from ncz_plugins.core.runtime.trace import recording
from ncz_plugins.core.schedules import direct, ring
from ncz_plugins.kernels.format import CHUNK

SCHEDULES = {"ring": ring, "direct": direct}
MODES = {"rms": 0.25, "rel": 0.01, "range": 0.01}
FRAMES = 3  # of a segment
COLLECTIVES = ("all_reduce", "reduce_scatter_single", "all_gather_single", "broadcast")


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
    elif collective == "reduce_scatter_single":
        layout, measured = Layout.of([numel // n] * n, CHUNK), range(n)
        output = Window(tensor[layout.segment(rank)], layout.segment(rank).start)  # in place, as far as that goes
        more |= {"addends": n, "schedule": schedule.reduce_scatter}
    else:
        layout, measured, output = Layout.of([numel // n] * n, CHUNK), range(rank, rank + 1), flat
        flat = Window(tensor[layout.segment(rank)], layout.segment(rank).start)
        more |= {"schedule": schedule.all_gather}
    request = Call(collective, flat.data, output.data, dist.ReduceOp.SUM)
    made = planned(collective, config, layout, flat, output, measured, plain=request.start_plain, **more)
    return made, output.data


@pytest.mark.parametrize("way", ["mesh", "sparse", "gloo", "rounds"])
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_call_with_a_nan_goes_plain_and_leaves_everything_as_it_was(schedule, collective, way):
    """The NaN is in the last frame."""
    world_size, numel = 3, 3 * FRAMES * CHUNK
    config = config_of(error_feedback=False, kind="error_bound")  # at random, each call would differ

    def body(transport):
        tensor = values(transport.rank, numel)
        if transport.rank == 0:
            tensor[numel // world_size - 3] = float("nan")  # in the last frame of the first segment
            tensor[-3] = float("nan")
        kept = tensor.clone()
        made, result = call(transport, config, collective, SCHEDULES[schedule], tensor)
        go_plain = made.plain.start

        def checked_plain(plain):
            assert same_bits([kept, tensor])
            return go_plain(plain)

        made.plain.start = checked_plain
        counters = run_planned(made, Host(two_threads=True), transport)
        assert counters.bypasses == {"non-finite": 1} and counters.compressed_calls == 0 and not counters.coders
        agreements = counters.wire_bytes - counters.plain_bytes
        assert 0 < agreements < 0.1 * counters.plain_bytes  # what ranks compare and agree on, no frame
        again = values(transport.rank, numel)
        made, after = call(transport, config, collective, SCHEDULES[schedule], again, number=2)
        assert run_planned(made, Host(two_threads=True), transport).compressed_calls == 1
        return result, after

    def untroubled(transport):
        made, result = call(transport, config, collective, SCHEDULES[schedule], values(transport.rank, numel))
        run_planned(made, Host(), transport)
        return result

    results, after = zip(*play(world_size, body, way))
    assert any(result.isnan().any() for result in results)
    everyone = [values(rank, numel).double() for rank in range(world_size)]
    part = numel // world_size
    for rank, result in enumerate(results):
        exact = {
            "all_reduce": sum(everyone),
            "reduce_scatter_single": sum(everyone)[rank * part :][:part],
            "all_gather_single": torch.cat([each[i * part :][:part] for i, each in enumerate(everyone)]),
            "broadcast": everyone[0],
        }[collective]
        finite = ~result.isnan()
        assert finite.sum() >= result.numel() - 2
        torch.testing.assert_close(result[finite].double(), exact[finite], rtol=1e-4, atol=1e-4)
    assert all(same_bits(both) for both in zip(after, play(world_size, untroubled)))


def test_a_part_that_is_not_worth_it_does_not_decide_for_the_whole():
    """float16 at a fine bound: noise needs nearly all bits, zeros need none."""
    numel = 2 * FRAMES * CHUNK
    config = config_of("range", 2e-5, block=CHUNK)

    def body(transport, noisy: range):
        tensor = torch.zeros(2, FRAMES, CHUNK)
        tensor[:, : len(noisy)] = values(transport.rank, numel).view(2, FRAMES, CHUNK)[:, : len(noisy)]
        made, _ = call(transport, config, "all_reduce", ring, tensor.view(-1).half())
        return run_planned(made, Host(), transport).bypasses

    for noisy, bypasses in ((range(1), {}), (range(FRAMES), {"not worth it": 1})):
        assert play(2, lambda transport, noisy=noisy: body(transport, noisy)) == [bypasses] * 2


@pytest.mark.parametrize("way", ["mesh", "gloo"])
def test_a_recording_shows_each_frame_where_it_was_sent_and_where_it_came(way):
    def body(transport):
        made, _ = call(transport, config_of(), "all_reduce", ring, values(transport.rank, 2 * FRAMES * CHUNK))
        run_planned(made, Host(), transport)

    with recording() as events:
        play(2, body, way)
    rows = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    frames = [event for event in events if event["name"] == "frame"]
    for rank in range(2):
        for row in (f"sending to rank {rank}", f"receiving from rank {rank}"):
            shown = [event for event in frames if rows[event["tid"]] == row]
            assert len(shown) == 2 * FRAMES and all(event["args"]["bytes"] > 0 for event in shown)
            for one, two in zip(shown, shown[1:]):
                assert one["ts"] + one["dur"] <= two["ts"] + 1e-3  # microseconds: one after the other
