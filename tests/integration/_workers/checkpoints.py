"""Trains with error feedback, saves checkpoints on the way, and goes on from those of another run.

usage: checkpoints.py save|resume|grow CASES.json FOLDER
"""

import contextlib
import hashlib
import io
import json
import sys
from pathlib import Path

import torch
from common import finish, loss_of, parameters_sha256, save, start

import ncz_plugins.deepspeed  # noqa: F401

KEY = "communication_compression"
STEPS = 6
SAVED = (1, 4)  # after so many steps
job, cases, folder = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
CASES = json.loads(Path(cases).read_text())


def train(engine, first: int, name: str | None = None) -> None:
    """The steps from `first` on, counted from 0; saves checkpoints if it is told under what name."""
    for step in range(first, STEPS):
        if name is not None and step in SAVED:
            engine.save_checkpoint(f"{folder}/{name}", tag=None if step == SAVED[-1] else f"after {step}")
        engine.backward(loss_of(engine, step))
        engine.step()


def outcome(engine) -> dict:
    """What two runs must have in common."""
    training = engine.communication_compression.training
    digest = hashlib.sha256()
    for name, residual in sorted(training.residuals.by_name.items()):
        digest.update(name.encode())
        digest.update(residual.contiguous().view(torch.uint8).numpy())
    return {
        "parameters": parameters_sha256(engine),
        "residuals": {"names": sorted(training.residuals.by_name), "sha256": digest.hexdigest()},
        "step": training.step,
        # What the schedule and the warm-up came to, not what it took.
        "last steps": [(s.calls, s.compressed_calls, s.wire_bytes, s.bypasses) for s in engine_steps(engine)],
    }


def engine_steps(engine) -> list:
    return list(engine.communication_compression.stats.steps)[-(STEPS - SAVED[-1]) :]


def load(engine, *args, **kwargs) -> str:
    """Load a checkpoint, and return what the plugin printed or raised."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            path, _ = engine.load_checkpoint(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    assert path is not None
    return "".join(line for line in printed.getvalue().splitlines(True) if line.startswith("ncz_plugins"))


def known(engine) -> dict:
    training = engine.communication_compression.training
    return {"step": training.step, "residuals": len(training.residuals.by_name)}


def saving() -> dict:
    results = {}
    for name, config in CASES.items():
        engine = start(config)
        train(engine, 0, name)
        results[name] = outcome(engine) if engine.communication_compression else None
        engine.destroy()
    return results


def resuming() -> dict:
    results = {}
    for name in ("stage 2", "stage 3"):
        for step, tag in ((SAVED[0], f"after {SAVED[0]}"), (SAVED[1], None)):
            engine = start(CASES[name])
            said = load(engine, f"{folder}/{name}", tag)
            loaded = known(engine)
            train(engine, step)
            results[f"{name}, {step}"] = {"said": said, "loaded": loaded, **outcome(engine)}
            engine.destroy()
    for tag in ("universal", "universal with our files"):
        engine = start({**CASES["stage 2"], "checkpoint": {"load_universal": True}})
        results[tag] = {"said": load(engine, f"{folder}/stage 2", tag), **known(engine)}
        engine.destroy()
    for name, options in (
        ("without optimizer", {"load_optimizer_states": False}),
        ("module only", {"load_module_only": True}),
    ):
        engine = start(CASES["stage 2"])
        results[name] = {"said": load(engine, f"{folder}/stage 2", **options), **known(engine)}
        engine.destroy()
    engine = start(CASES["stage 0"])
    results["another run's"] = {"said": load(engine, f"{folder}/never compressed", "after 1"), **known(engine)}
    engine.destroy()
    for name in ("never compressed", "damaged", "incomplete"):
        engine = start(CASES["stage 0"])
        results[name] = {"said": load(engine, f"{folder}/{name}"), **known(engine)}
        engine.destroy()
    return results


def growing() -> dict:
    engine = start(CASES["stage 0"])
    result = {"said": load(engine, f"{folder}/stage 0"), "loaded": known(engine)}
    train(engine, SAVED[-1])
    return result | outcome(engine)


save({"save": saving, "resume": resuming, "grow": growing}[job]())
finish()
