"""Advice where Muon trains matrices: its loss suffers most from rounding (docs/results/convergence.md)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from ..config import Config, QuantizerConfig
from ..messages import say
from .policy import ParameterSlice, Policies

PRESET = "ncclz:muon"
DDP_PRESET = "ncclz:muon-ddp"  # where calls have whole matrices
_FINE = Config.load(PRESET).quantizer
_ROTATED = 0.08  # the largest bound that was harmless where matrices are rotated, also with 64 sequences
_HARMLESS_BITS = 7  # the fewest bits of a fixed rate that were harmless
Gradient = tuple[ParameterSlice, torch.dtype]
_UNKNOWN: list[Gradient] = [(ParameterSlice(None, 1 << 30, shape=(1 << 15, 1 << 15)), torch.float32)]


def is_muon(optimizer: object) -> bool:
    """Whether an optimizer is Muon, of torch, DeepSpeed or another author: by the names of its classes."""
    return any("muon" in each.__name__.lower() for each in type(optimizer).__mro__)


def warn(optimizer: object, config: Config, matrices: Sequence[Gradient], preset: str = PRESET) -> None:
    """Print what `advice` has to say of an optimizer and the matrices that it trains. For one rank, once."""
    if is_muon(optimizer) and matrices and (line := advice(config, type(optimizer).__name__, matrices, preset)):
        say(f"ncz_plugins: warning: {line}", sys.stderr)


def advice(
    config: Config, optimizer: str = "Muon", matrices: Sequence[Gradient] = _UNKNOWN, preset: str = PRESET
) -> str | None:
    """Text against settings that are known to cost Muon more than 0.15 % of the training loss; None if these don't.

    Args:
        optimizer: its name.
        matrices: the gradients of the parameters that it trains.
        preset: the remedy; PRESET where `config` rotates already, as that one serves matrices of any name.
    """
    if "gradient" not in config.roles or config.transport.min_bytes == "never":
        return None
    policies = Policies(config)
    for part, dtype in matrices:
        found = policies.treatment(part, dtype, "gradient", config.steps.warmup)
        if found.bypass is None and _is_visible(found.quantizer):
            return (
                f"{optimizer} trains {part.name or 'matrices'}, and gradients are compressed by "
                f"{found.quantizer.describe()}. Muon suffers most from rounding: the default adds 0.9 % to the "
                "training loss of a GPT of 0.64 M parameters, 3.2 % at 11 M (docs/results/convergence.md). Configure "
                f'"{PRESET if config.rotates else preset}", or give {part.name or "matrices"} its quantizer for '
                "matrices by a policy"
            )
    return None


def _is_visible(quantizer: QuantizerConfig) -> bool:
    """Whether a quantizer is coarser than the preset's, in a mode that was measured."""
    if quantizer.bits is not None:
        return quantizer.bits < _HARMLESS_BITS and not quantizer.feeds_back
    if quantizer.kind == "lossless" or quantizer.mode != "rms":
        return False
    return quantizer.value > (_ROTATED if quantizer.rotates else _FINE.value)
