"""Real training text that every Python installation already has: the standard library's own source, byte by byte."""

import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
MAX_BYTES = 8 * 2**20
VALIDATION_EVERY = 20  # every twentieth file is held out


def standard_library_files() -> list[Path]:
    """The running interpreter's library modules in a fixed order, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(path for path in root.rglob("*.py") if not EXCLUDED.intersection(path.relative_to(root).parts))


class Corpus:
    """The text as two tensors of bytes: ``train`` and ``validation`` (uint8, one-dimensional, no file in both)."""

    def __init__(self, max_bytes: int = MAX_BYTES):
        parts = {"train": bytearray(), "validation": bytearray()}
        for index, path in enumerate(standard_library_files()):
            text = path.read_bytes()
            if sum(map(len, parts.values())) + len(text) > max_bytes:
                break
            parts["train" if index % VALIDATION_EVERY else "validation"] += text
        self.train = torch.frombuffer(parts["train"], dtype=torch.uint8)
        self.validation = torch.frombuffer(parts["validation"], dtype=torch.uint8)

    def batch(self, batch: int, context: int, *, seed: int, step: int, rank: int):
        """Training sequences at random places: the same for the same (seed, step, rank), different otherwise.

        Returns (tokens, targets), both int64 of shape (batch, context); targets are the tokens one place further on.
        """
        places = np.random.default_rng((seed, step, rank)).integers(len(self.train) - context, size=batch)
        return _sequences(self.train, places, context)

    def validation_batches(self, batch: int, context: int, count: int):
        """Yield ``count`` (tokens, targets) pairs, evenly spread over the held-out files and always the same."""
        places = np.linspace(0, len(self.validation) - context - 1, count * batch).astype(np.int64)
        for some in places.reshape(count, batch):
            yield _sequences(self.validation, some, context)


class Windows(Dataset):
    """A text, uint8 [n], cut into sequences for a DataLoader: "tokens" and "targets" of each are int64, [context]."""

    def __init__(self, text: torch.Tensor, context: int):
        self.text, self.context = text, context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.text[index * self.context :][: self.context + 1].long()
        return {"tokens": window[:-1], "targets": window[1:]}


def _sequences(text: torch.Tensor, places: np.ndarray, context: int):
    windows = torch.stack([text[place : place + context + 1] for place in places.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]
