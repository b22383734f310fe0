"""What `ncz perf` sends: real gradients, a smooth field, noise, or a file, different on every rank.

A source yields pieces, which stand end to end until a tensor is full. A piece follows from (rank, index) alone, so that
the same rank gets the same values again, and a small tensor is the beginning of a large one.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from itertools import count as count_from
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from ...core.errors import UnsupportedError
from ...kernels.cache import private_folder, write_private
from ..codec.array_file import read_array

# (rank, index) -> a piece, 1-D, float32; bfloat16 of weights
Source = Callable[[int, int], Tensor]

_NOISE_PIECE = 1 << 20
_FIELD_SIDE = 128


def values(source: Source, rank: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The first `count` values of `rank`, [count]."""
    filled, out = 0, torch.empty(count, dtype=dtype, device="cpu")
    for index in count_from():
        if filled == count:
            return out
        piece = source(rank, index)[: count - filled]
        out[filled : filled + piece.numel()] = piece
        filled += piece.numel()


def from_file(file: str) -> Source:
    """The floats of an .npy file, from another place in it for every rank and piece. Raises UnsupportedError."""
    if os.path.exists(file) and not os.path.isfile(file):
        raise UnsupportedError(f"--data {file}: every rank reads it, so it must be a plain file")
    array = torch.from_numpy(read_array(file)).reshape(-1).float()
    if not array.numel():
        raise UnsupportedError(f"--data {file}: holds no values")
    return lambda rank, index: array.roll(-_seed("file", rank, index) % array.numel())


def noise(rank: int, index: int) -> Tensor:
    """White, Gaussian, of variance 1."""
    return torch.randn(_NOISE_PIECE, generator=_generator("noise", rank, index), dtype=torch.float32, device="cpu")


def field(rank: int, index: int) -> Tensor:
    """A periodic field in three dimensions whose energy at wave number k falls as k^(-5/3), of variance 1."""
    side = _FIELD_SIDE
    white = torch.randn(side, side, side, generator=_generator("field", rank, index), dtype=torch.float32, device="cpu")
    full = torch.fft.fftfreq(side, 1 / side, dtype=torch.float32, device="cpu")
    half = torch.fft.rfftfreq(side, 1 / side, dtype=torch.float32, device="cpu")
    squared = full[:, None, None] ** 2 + full[:, None] ** 2 + half**2
    # The energy is that of a shell, whose area grows with k^2: an amplitude of k^(-5/6 - 1).
    amplitude = squared.clamp(min=1) ** (-11 / 12) * (squared > 0)
    smooth = torch.fft.irfftn(torch.fft.rfftn(white) * amplitude, s=white.shape)
    return (smooth / smooth.std()).reshape(-1)


# ------------------------------------------------------------------ gradients

_CONTEXT, _BATCH, _STEPS = 128, 12, 100
_VERSION = 1  # of the weights below; to be raised when the training changes


class GPT(nn.Module):
    """A byte-level GPT-2 with the sizes of the one in the examples, of torch's own layers."""

    def __init__(self, layers: int = 4, heads: int = 6, width: int = 192):
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(_CONTEXT, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss in nats per byte; both int64, [batch, _CONTEXT]."""
        mask = nn.Transformer.generate_square_subsequent_mask(_CONTEXT)
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits = self.norm(x) @ self.tokens.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def gradient(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """All gradients end to end, the last parameter's first: in the order in which they are ready to be sent."""
        self.zero_grad()
        with _one_thread():
            self(tokens, targets).backward()
        return torch.cat([p.grad.flatten() for p in reversed(list(self.parameters()))])


class Gradients:
    """A source of gradients at the given weights, as `trained` returns them."""

    def __init__(self, weights: Tensor):
        self._model = GPT()
        nn.utils.vector_to_parameters(weights, self._model.parameters())
        self._text = _text()

    def __call__(self, rank: int, index: int) -> Tensor:
        return self._model.gradient(*_batch(self._text, "gradient", rank, index))


def parameter_count() -> int:
    """How many weights `trained` returns."""
    return sum(p.numel() for p in GPT().parameters())


def weights(version: Tensor) -> Source:
    """A source of the given weights, from another place for every rank and piece, in bfloat16."""
    rounded = version.bfloat16()
    return lambda rank, index: rounded.roll(-_seed("weights", rank, index) % rounded.numel())


def trained(more: int = 0) -> Tensor:
    """The weights after training, float32, 1-D: kept from an earlier run, or made now, which takes most of a minute.

    Args:
        more: steps beyond those of other data.
    """
    steps = _STEPS + more
    try:
        file = private_folder("perf") / f"gpt-v{_VERSION}{f'-{more}' if more else ''}.npy"
    except OSError:  # where nothing can be kept, they are made again
        return train(steps)
    with contextlib.suppress(UnsupportedError):  # not there, or damaged
        kept = read_array(file)
        if kept.shape == (parameter_count(),) and kept.dtype == np.float32 and np.isfinite(kept).all():
            return torch.from_numpy(kept)
    weights = train(steps)
    stream = io.BytesIO()
    np.save(stream, weights.numpy())
    with contextlib.suppress(OSError):
        write_private(file, stream.getvalue())
    return weights


def train(steps: int) -> Tensor:
    """The weights after so many steps, float32, 1-D."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    text = _text()
    for step in range(steps):
        model.gradient(*_batch(text, "training", step))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def _batch(text: Tensor, *which: object) -> tuple[Tensor, Tensor]:
    """Tokens and targets, one byte further on, both int64, [_BATCH, _CONTEXT]."""
    places = torch.randint(
        text.numel() - _CONTEXT, (_BATCH,), generator=_generator(*which), dtype=torch.int64, device="cpu"
    )
    windows = torch.stack([text[place : place + _CONTEXT + 1] for place in places.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]


def _text() -> Tensor:
    """English and code that comes with every Python, uint8, 1-D."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UnsupportedError(
            "--data gradient: this Python lacks pydoc_data, the text to train on; take --data field, noise or FILE.npy"
        ) from None
    return torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """One thread for torch: sums then have one order, whoever makes the gradients."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ------------------------------------------------------------------ random numbers


def _generator(*which: object) -> torch.Generator:
    return torch.Generator().manual_seed(_seed(*which))


def _seed(*which: object) -> int:
    """The same for the same arguments, in every process, and well spread."""
    return crc32(repr(which).encode())
