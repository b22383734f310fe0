"""Whole collectives with the CUDA kernels, executed by the emulator: the bits of the CPU's, and errors in time."""

import pytest
import torch
from emulator import EmulatedLauncher
from ranks import play

from ncz_plugins.core.call import Call
from ncz_plugins.core.codec.layout import Layout, Window
from ncz_plugins.core.collective import run
from ncz_plugins.core.config import Config
from ncz_plugins.core.errors import FrameError
from ncz_plugins.core.runtime.device import Host
from ncz_plugins.core.schedules import direct, ring
from ncz_plugins.kernels.cuda import CudaBackend
from ncz_plugins.kernels.format import CHUNK

SCHEDULES = {"ring": ring, "direct": direct}
NUMEL = 3 * CHUNK + 17


class EmulatedGpu(Host):
    """Host memory as that of a GPU, whose kernels the emulator executes."""

    def __init__(self, seed: int):
        super().__init__()
        self.backend = CudaBackend(EmulatedLauncher(seed=seed))


def all_reduce(schedule: str, world_size: int, config: Config, device_of, damage=None) -> list[torch.Tensor]:
    def body(transport):
        tensor = torch.randn(NUMEL, generator=torch.Generator().manual_seed(transport.rank))
        device = device_of(transport.rank)
        if damage and transport.rank == 0:
            damage(device)
        call = Call(
            "all_reduce",
            config,
            Layout.split(NUMEL, world_size, CHUNK, 0),
            source=Window(tensor),
            output=Window(tensor),
            measured=range(world_size),
            schedule=SCHEDULES[schedule].all_reduce,
            plain=lambda _: pytest.fail("the call went plain"),
            addends=world_size,
        )
        run(call, device, transport)
        return tensor

    return play(world_size, body, in_rounds=True)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "settings",
    [
        {"entropy": {"coder": "fixed", "predictor": "none"}},
        {"entropy": {"coder": "auto"}},
        {"entropy": {"coder": "huffman", "checksum": True}},
        {"entropy": {"coder": "rans"}, "quantizer": {"mode": "rms", "value": 1.0}},
        {"entropy": {"coder": "raw", "predictor": "delta"}},
        {"quantizer": {"kind": "stochastic", "mode": "abs", "value": 0.02, "seed": 3}, "entropy": {"coder": "fixed"}},
    ],
    ids=["fixed", "auto", "huffman with checksum", "rans", "raw", "stochastic"],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_bits_are_those_of_the_cpu(schedule, settings, world_size):
    config = Config(**{"quantizer": {"mode": "rms", "value": 0.1}} | settings)
    on_cpu = all_reduce(schedule, world_size, config, lambda rank: Host())
    on_gpu = all_reduce(schedule, world_size, config, EmulatedGpu)
    for tensor in (*on_cpu, *on_gpu):
        assert torch.equal(tensor.view(torch.int32), on_cpu[0].view(torch.int32))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("byte", [0, 8, 30])
def test_damage_shows_when_the_call_ends(schedule, byte):
    def damage(device):
        encode = device.backend.encode

        def damaging(x, inverse_steps, coding, frame, noise=None):
            size = encode(x, inverse_steps, coding, frame, noise)
            frame[byte] ^= 0x55
            return size

        device.backend.encode = damaging

    config = Config(entropy={"coder": "fixed"})
    with pytest.raises(FrameError, match="a frame is damaged"):
        all_reduce(schedule, 2, config, EmulatedGpu, damage)
