"""Data that `ncz perf` sends: real gradients, a smooth field, noise, weights or a file, different on each rank.

A source makes pieces, which are concatenated until a tensor is full. A piece depends on (rank, index) only. So a rank
gets the same values in every run, and a small tensor is the beginning of a large one.
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

# (rank, index of the piece) -> piece, 1-D, float32; bfloat16 for weights
Source = Callable[[int, int], Tensor]

_NOISE_PIECE_VALUES = 1 << 20
_FIELD_SIDE_VALUES = 128


def values(source: Source, rank: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """First `count` values of `rank`, [count]."""
    filled, out = 0, torch.empty(count, dtype=dtype, device="cpu")
    for index in count_from():
        if filled == count:
            return out
        piece = source(rank, index)[: count - filled]
        out[filled : filled + piece.numel()] = piece
        filled += piece.numel()


def from_file(file: str) -> Source:
    """Source of the floats of an .npy file, from another position for each rank and piece. Raises UnsupportedError."""
    if os.path.exists(file) and not os.path.isfile(file):
        raise UnsupportedError(f"--data {file}: every rank reads it, so it must be a plain file")
    array = torch.from_numpy(read_array(file)).reshape(-1).float()
    if not array.numel():
        raise UnsupportedError(f"--data {file}: holds no values")
    return lambda rank, index: array.roll(-_seed("file", rank, index) % array.numel())


def noise(rank: int, index: int) -> Tensor:
    """Source of white Gaussian noise of variance 1."""
    return torch.randn(
        _NOISE_PIECE_VALUES, generator=_generator("noise", rank, index), dtype=torch.float32, device="cpu"
    )


def field(rank: int, index: int) -> Tensor:
    """Source of periodic three-dimensional fields of variance 1, whose energy at wave number k falls as k^(-5/3)."""
    side = _FIELD_SIDE_VALUES
    white = torch.randn(side, side, side, generator=_generator("field", rank, index), dtype=torch.float32, device="cpu")
    full = torch.fft.fftfreq(side, 1 / side, dtype=torch.float32, device="cpu")
    half = torch.fft.rfftfreq(side, 1 / side, dtype=torch.float32, device="cpu")
    squared = full[:, None, None] ** 2 + full[:, None] ** 2 + half**2
    # Energy counts a whole shell, whose area grows with k^2. So the amplitude falls as k^(-5/6 - 1).
    amplitude = squared.clamp(min=1) ** (-11 / 12) * (squared > 0)
    smooth = torch.fft.irfftn(torch.fft.rfftn(white) * amplitude, s=white.shape)
    return (smooth / smooth.std()).reshape(-1)


# ------------------------------------------------------------------ gradients

_CONTEXT, _BATCH, _STEPS = 128, 12, 100
_VERSION = 1  # of the cached weights; increase it when the training changes


class GPT(nn.Module):
    """Byte-level GPT-2 of torch's layers, with the sizes of the GPT in the examples."""

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
        """Mean loss in nats per byte. Both arguments are int64, [batch, _CONTEXT]."""
        mask = nn.Transformer.generate_square_subsequent_mask(_CONTEXT)
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits = self.norm(x) @ self.tokens.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def gradient(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """All gradients, concatenated in the order in which they become ready: that of the last parameter first."""
        self.zero_grad()
        with _one_thread():
            self(tokens, targets).backward()
        return torch.cat([p.grad.flatten() for p in reversed(list(self.parameters()))])


class Gradients:
    """Source of gradients at given weights, which `trained` returned."""

    def __init__(self, weights: Tensor):
        self._model = GPT()
        nn.utils.vector_to_parameters(weights, self._model.parameters())
        self._text = _text()

    def __call__(self, rank: int, index: int) -> Tensor:
        return self._model.gradient(*_batch(self._text, "gradient", rank, index))


class Activations:
    """Source of hidden states at given weights, token after token: what enters the MLP of each layer."""

    def __init__(self, weights: Tensor):
        self._model = GPT()
        nn.utils.vector_to_parameters(weights, self._model.parameters())
        self._text = _text()
        self._seen: list[Tensor] = []
        for block in self._model.blocks:
            block.norm2.register_forward_hook(lambda _module, _inputs, output: self._seen.append(output))

    @torch.no_grad()
    def __call__(self, rank: int, index: int) -> Tensor:
        self._seen.clear()
        with _one_thread():
            self._model(*_batch(self._text, "activation", rank, index))
        return torch.cat([states.flatten() for states in self._seen])


def parameter_count() -> int:
    """Number of weights that `trained` returns."""
    return sum(p.numel() for p in GPT().parameters())


def weights(version: Tensor) -> Source:
    """Source of the given weights in bfloat16, from another position for each rank and piece."""
    rounded = version.bfloat16()
    return lambda rank, index: rounded.roll(-_seed("weights", rank, index) % rounded.numel())


def trained(more: int = 0) -> Tensor:
    """Weights after training, float32, 1-D: cached by an earlier run, or trained now in most of a minute.

    Args:
        more: number of further training steps.
    """
    steps = _STEPS + more
    try:
        file = private_folder("perf") / f"gpt-v{_VERSION}{f'-{more}' if more else ''}.npy"
    except OSError:  # no folder for a cache
        return train(steps)
    with contextlib.suppress(UnsupportedError):  # missing or damaged
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
    """Weights after `steps` training steps, float32, 1-D."""
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
    """Tokens, and targets one byte later, both int64, [_BATCH, _CONTEXT]."""
    places = torch.randint(
        text.numel() - _CONTEXT, (_BATCH,), generator=_generator(*which), dtype=torch.int64, device="cpu"
    )
    windows = torch.stack([text[place : place + _CONTEXT + 1] for place in places.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]


def _text() -> Tensor:
    """Text to train on, uint8, 1-D: English and code that come with Python."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UnsupportedError(
            "--data gradient: this Python lacks pydoc_data, the text to train on; use --data field, noise or FILE.npy"
        ) from None
    return torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Context manager that limits torch to one thread, so that sums have the same order on every rank."""
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
    """Seed that depends on the arguments only, and is the same in every process."""
    return crc32(repr(which).encode())
