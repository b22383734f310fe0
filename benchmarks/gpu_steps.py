"""Measures training steps of DeepSpeed with two ranks that share one GPU: plain, and with ours.

    python benchmarks/gpu_steps.py [--kinds plain default] [--steps 10] [--rounds 1] [--json FILE]

examples/train_deepspeed.py trains a GPT of 99 M parameters in float32 with ZeRO 2, buckets of 25 M elements and
overlap_comm. As in gpu_ranks.py, traffic goes through sockets, and times mean something under CUDA MPS only. The kinds
take turns; seconds are medians over all steps but the first three of each run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from gpu_ranks import run_ranks
from rich.console import Console
from rich.table import Table

from ncz_plugins.core.whole_files import write_whole

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
RANKS, WARMUP = 2, 3
ZERO = {"stage": 2, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": 25_000_000}
KINDS = {
    "plain": None,
    "default": {},
    "bits": {"quantizer": {"mode": "bits", "value": 4}},
    "weights too": {"roles": ["gradient", "parameter"]},
}
SECONDS = 120  # of one run


def train(kind: str, arguments: argparse.Namespace, folder: Path) -> list[dict]:
    """The records of one run, the last of which is that of its end."""
    config = json.loads((EXAMPLES / "deepspeed_plain.json").read_text())
    config |= {"train_micro_batch_size_per_gpu": arguments.batch, "zero_optimization": ZERO}
    if KINDS[kind] is not None:
        config["communication_compression"] = KINDS[kind]
    file, log = folder / "config.json", folder / "log.jsonl"
    file.write_text(json.dumps(config))
    command = [sys.executable, str(EXAMPLES / "train_deepspeed.py"), "--deepspeed_config", str(file)]
    sizes = [f"--{name}={getattr(arguments, name)}" for name in ("steps", "layers", "width", "heads")]
    environment = {"DS_ACCELERATOR": arguments.device}
    codes = run_ranks([*command, *sizes, "--log-file", str(log)], RANKS, SECONDS, environment)
    if any(codes):
        sys.exit(f"{kind}: ranks ended with {codes}")
    return [json.loads(line) for line in log.read_text().splitlines()]


def row_of(kind: str, records: list[list[dict]], plain: float | None) -> dict:
    """What is reported of a kind.

    Args:
        records: of each of its runs.
        plain: seconds of a plain step; None: this kind's.
    """
    seconds = [record["seconds"] for *steps, _ in records for record in steps[WARMUP:]]
    median, (*_, last, end) = statistics.median(seconds), records[-1]
    row = {"kind": kind, "seconds": median, "steps": len(seconds), "speed_up": (plain or median) / median}
    row |= {"training_loss": last["loss"], "ratio": end.get("compression", {}).get("ratio")}
    return row | {name: end[name] for name in ("validation_loss", "replicas_identical")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="plain must be the first")
    parser.add_argument("--steps", type=int, default=10, help=f"of each run, the first {WARMUP} not counted")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8, help="sequences of 128 bytes per rank and step")
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--device", default="cuda", help="cpu: try the program where there is no GPU, over gloo")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    records: dict[str, list[list[dict]]] = {kind: [] for kind in arguments.kinds}
    rows: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in arguments.rounds * arguments.kinds:
            records[kind].append(train(kind, arguments, Path(folder)))
            plain = rows[arguments.kinds[0]]["seconds"] if kind != arguments.kinds[0] else None
            rows[kind] = row_of(kind, records[kind], plain)
            if arguments.json:  # what there is, if the rest is cut off
                write_whole(arguments.json, json.dumps(list(rows.values()), indent=1))
    table = Table(title="DeepSpeed, ZeRO 2 with overlap_comm, 2 ranks on one GPU")
    for heading in ("", "ms", "speed-up", "loss", "held out", "same on all", "ratio"):
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows.values():
        losses = [f"{row[name]:.4f}" for name in ("training_loss", "validation_loss")]
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        times = f"{1e3 * row['seconds']:.1f}", f"{row['speed_up']:.2f}"
        table.add_row(row["kind"], *times, *losses, str(row["replicas_identical"]), ratio)
    Console().print(table)
    if not all(row["replicas_identical"] for row in rows.values()):
        sys.exit("replicas differ")


if __name__ == "__main__":
    main()
