"""What ranks send under Horovod and hivemind, counted by the kernel: figures of docs/guides/coming-from.md.

    sudo .venv/bin/python -m benchmarks.coming_from [--json FILE]

Each run has a network namespace of its own, for which it needs root: nothing else sends through that loopback.

- Horovod: two ranks of examples/train_horovod.py, started by horovodrun, plain, with fp16 and with NCZ. Horovod's ranks
  talk to each other every millisecond, so a slow step sends more: the step with the fewest bytes counts.
- hivemind: two peers average a tensor of as many values as that GPT has parameters, once for each compression.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from importlib import metadata
from pathlib import Path

import torch

from ncz_plugins.cli import machine
from ncz_plugins.core.whole_files import write_whole
from ncz_plugins.version import __version__

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "guides" / "coming-from.md"
PEER = "--peer"  # the argument that the program of hivemind's peers is started with
PARTIES = 2
STEPS = 8
VALUES = 1_853_568  # parameters of the GPT
HOROVOD = ("none", "fp16", "ncz")
HIVEMIND = ("NoCompression", "Float16Compression", "Uniform8BitQuantization")


def alone(command: list[str]) -> str:
    """What a command prints on a network that nothing else uses. Raises CalledProcessError."""
    words = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=600)
    return done.stdout


# ------------------------------------------------------------------ Horovod


def under_horovod(compression: str) -> dict:
    """Train the example, and give what a rank sends for a step, and the loss on text that was held out."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        launcher = [str(Path(sys.executable).with_name("horovodrun")), "--gloo", "-np", str(PARTIES), sys.executable]
        options = ["--compression", compression, "--steps", str(STEPS), "--log-file", str(log)]
        alone([*launcher, "examples/train_horovod.py", *options])
        *steps, end = map(json.loads, log.read_text().splitlines())
    # The loopback carries what both ranks send.
    sent = min(step["interface_bytes"] for step in steps) / PARTIES
    return {"compression": compression, "bytes": sent, "validation_loss": end["validation_loss"]}


# ------------------------------------------------------------------ hivemind


def under_hivemind(compression: str) -> dict:
    """Average by two peers in a process of their own, which is left when they are done."""
    return json.loads(alone([sys.executable, "-m", "benchmarks.coming_from", PEER, compression]).splitlines()[-1])


def average(compression: str) -> dict:
    """What each peer sends for a value, and how far from the mean its values are then, as a share of it in L2."""
    warnings.simplefilter("ignore", FutureWarning)  # it uses torch.jit.script
    import hivemind

    sys.path.insert(0, str(ROOT / "examples"))
    from network import sent_bytes

    held = [torch.randn(VALUES, generator=torch.Generator().manual_seed(seed)) for seed in range(PARTIES)]
    first = hivemind.DHT(start=True)
    second = hivemind.DHT(start=True, initial_peers=first.get_visible_maddrs())
    codec = getattr(hivemind.compression, compression)
    peers = [
        hivemind.DecentralizedAverager(
            [values], dht, start=True, prefix="mean", target_group_size=PARTIES, compression=codec()
        )
        for values, dht in zip(held, (first, second))
    ]
    before = sent_bytes("lo")
    # Both look for their group at once.
    for control in [peer.step(wait=False) for peer in peers]:
        control.result(timeout=120)
    sent = sent_bytes("lo") - before
    mean, errors = sum(held) / PARTIES, []
    for peer in peers:
        with peer.get_tensors() as (found,):
            errors.append(float((found - mean).norm() / mean.norm()))
    return {"compression": compression, "bytes_per_value": sent / PARTIES / VALUES, "error": max(errors)}


# ------------------------------------------------------------------ the page


def of_horovod(found: dict) -> tuple[str, str]:
    """Two sentences of the page, which tests compare with it."""
    plain, fp16, ncz = (f"{each['bytes'] / 1e6:.2f} MB" for each in found["horovod"])
    losses = [f"{each['validation_loss']:.4f}" for each in found["horovod"]]
    return (
        f"For one step of a GPT of {VALUES / 1e6:.1f} M parameters each of two ranks sent {plain} plain, {fp16} with "
        f"fp16 and {ncz} with `NCZ`",
        f"After {STEPS} steps the held-out loss was {losses[0]} plain, {losses[1]} with fp16 and {losses[2]} with "
        "`NCZ`",
    )


def of_hivemind(found: dict) -> tuple[str, str]:
    """Two sentences of the page."""
    plain, fp16, eight = (f"{each['bytes_per_value']:.2f} bytes" for each in found["hivemind"])
    versions = found["versions"]
    return (
        f"hivemind {versions['hivemind']} averaged {VALUES / 1e6:.1f} M values on two peers, which sent {plain} for "
        f"each value plain, and {fp16} by `Float16Compression`",
        f"With NumPy {versions['numpy']} `Uniform8BitQuantization` sends {eight} and averages nothing",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="a file for the results")
    parser.add_argument(PEER, choices=HIVEMIND, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        print(json.dumps(average(arguments.peer)), flush=True)
        return 0
    packages = {name: metadata.version(name) for name in ("horovod", "hivemind", "numpy")}
    found = {
        "command": "python -m benchmarks.coming_from --json FILE",
        "versions": {"ncz_plugins": __version__, "torch": torch.__version__, **packages},
        "cpu": machine.cpu(),
        "horovod": [under_horovod(each) for each in HOROVOD],
        "hivemind": [under_hivemind(each) for each in HIVEMIND],
    }
    print(*of_horovod(found), *of_hivemind(found), sep="\n")
    if arguments.json:
        write_whole(arguments.json, json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
