"""Lets torchtitan, which knows accelerators only, take the CPU. Its other modules must be imported after this one."""

from types import SimpleNamespace

import torch
from torchtitan.tools import utils

utils.device_type = "cpu"
utils.device_module = SimpleNamespace(
    set_device=torch.cpu.set_device,
    device_count=torch.cpu.device_count,
    synchronize=torch.cpu.synchronize,
    current_device=lambda: 0,
    get_device_name=lambda device: "CPU",
    get_device_properties=lambda device: SimpleNamespace(total_memory=1 << 30),
    memory_stats=lambda device: {},
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
)
