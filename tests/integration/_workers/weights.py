"""Trains each DeepSpeed configuration of a JSON file twice, side by side: with its weights sent as changes, and plain.

Gradients are compressed alike, rounded by the same random numbers, so that both runs must have the same weights after
every step.

usage: weights.py CASES.json FOLDER
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from common import finish, loss_of, parameters_sha256, save, start

import ncz_plugins.deepspeed  # noqa: F401

KEY = "communication_compression"
STEPS = 7
CHANGED, SAVED = 3, 5  # the steps before which rank 0 changes weights, and a checkpoint is saved
MOVED = 2  # the step before which weights move to other memory
cases, folder = [argument for argument in sys.argv[1:] if not argument.startswith("-")]


def step(engine, number: int) -> str:
    engine.backward(loss_of(engine, number))
    engine.step()
    return parameters_sha256(engine)


def change(engine) -> None:
    """A weight that rank 1 updates, which every rank would get from it in the next gather."""
    if dist.get_rank() == 0 and engine.zero_optimization_stage() < 3:
        with torch.no_grad():
            list(engine.module.parameters())[-1].view(-1)[-1] += 1


def move(engine) -> None:
    """As between the phases of reinforcement learning."""
    # DeepSpeed's optimizer for bf16 can't do it, and that of ZeRO 3 only on GPUs.
    if engine.zero_optimization_stage() < 3 and hasattr(engine.optimizer, "offload_states"):
        engine.offload_states()
        engine.reload_states()


def compare(name: str, config: dict) -> dict:
    ours = start(config)
    plain = start(config | {KEY: config[KEY] | {"roles": ["gradient"]}})
    compression = ours.communication_compression
    found = {"plain": [], "ours": [], "sent whole": [], "gathered": []}
    for number in range(STEPS):
        if number == SAVED:
            ours.save_checkpoint(f"{folder}/{name}")
        if number == MOVED:
            move(ours)
        before = compression.stats.total.wire_bytes_by_role.get("parameter", 0)
        found["ours"].append(step(ours, number))
        found["plain"].append(step(plain, number))
        found["sent whole"].append(compression.stats.steps[-1].sent_whole)
        found["gathered"].append(compression.stats.total.wire_bytes_by_role["parameter"] - before)
        if number == CHANGED - 1:  # in both runs, before their next gather
            change(ours)
            change(plain)
    ours.load_checkpoint(f"{folder}/{name}")
    found["resumed"] = [step(ours, number) for number in range(SAVED, STEPS)]
    found["sent whole after loading"] = [each.sent_whole for each in list(compression.stats.steps)[STEPS:]]
    found["stats"] = compression.stats.total.to_dict()
    found["copies"] = sum(each.nbytes for each in compression._baselines.values())
    found["weights"] = sum(p.numel() * p.element_size() for p in ours.module.parameters())
    for engine in (ours, plain):
        engine.destroy()
    return found


results = {}
for name, config in json.loads(Path(cases).read_text()).items():
    results[name] = compare(name, config)
    if dist.get_rank() == 0:
        print(f"done: {name}", flush=True)
save(results)
finish()
