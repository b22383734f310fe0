"""Why a call goes plain. Every rule that finds a reason is here; `reasons` has the reasons and their remedies.

A call is looked at twice: when it is asked for (`before_call`, then its size, then what its parts are), and once its
values are measured (`scales_or_bypass`). The first reason counts. No rule looks at anything in which ranks could
differ, so all ranks decide alike.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels.backend import HostBackend
from ..kernels.format import DTYPES
from .codec.layout import Layout
from .codec.quantize import Derived, Scales, derive
from .config import Config, Policy, QuantizerConfig
from .reasons import Bypass

_COMPRESSED_OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


# ------------------------------------------------------------------ when a call is asked for


def before_call(
    config: Config, world_size: int, role: str | None, op: dist.ReduceOp | None, dtypes: tuple[torch.dtype, ...]
) -> Bypass | None:
    """The reason that does not depend on which parameters a tensor holds, nor on its size.

    Args:
        role: what the tensor is; None where compression is wanted whatever it is.
        op: of a sum; None for gathers and broadcasts.
        dtypes: of all tensors of the call.
    """
    if world_size == 1:
        return Bypass.ONE_RANK
    return by_role(role, config) or by_op(op) or by_dtype(*dtypes)


def by_role(role: str | None, config: Config) -> Bypass | None:
    """Roles that the configuration does not enable go plain."""
    return Bypass.ROLE if role is not None and role not in config.roles else None


def by_op(op: dist.ReduceOp | None, scale: float = 1.0) -> Bypass | None:
    """Only sums and averages can be formed of codes.

    Args:
        scale: what the result is multiplied by.
    """
    return Bypass.OP if (op is not None and op not in _COMPRESSED_OPS) or scale <= 0 else None


def by_dtype(*dtypes: torch.dtype) -> Bypass | None:
    """Only floats of 16 bits and more are quantized, and all tensors of a call must have the same dtype."""
    return Bypass.DTYPE if len(set(dtypes)) > 1 or dtypes[0] not in DTYPES else None


def by_rate(dtype: torch.dtype, config: Config) -> Bypass | None:
    """A fixed rate does not serve float64, whose range its scales do not have."""
    return Bypass.DTYPE if config.quantizer.bits is not None and dtype == torch.float64 else None


def by_warm_up(step: int, config: Config) -> Bypass | None:
    """The first steps of a training go plain, if the configuration says so. `step` is counted from 0."""
    return Bypass.WARM_UP if step < config.steps.warmup else None


def by_policy(policy: Policy) -> Bypass | None:
    """A policy may leave its parameters uncompressed."""
    return Bypass.POLICY if policy.action == "skip" else None


def by_size(nbytes: int, config: Config, on_gpu: bool = False, ranks: int | None = None) -> Bypass | None:
    """Small tensors go plain, as latency is what they cost. `config` is a resolved one.

    Args:
        ranks: how many there are; None: more than two, or nobody knows.
    """
    least = config.min_bytes_in_effect(on_gpu, ranks)
    if least == "never":
        return Bypass.FAST_LINK
    return Bypass.TOO_SMALL if nbytes < max(least, 1) else None


# ------------------------------------------------------------------ once the values are measured


def scales_or_bypass(
    agreed: Tensor,
    layout: Layout,
    quantizer: QuantizerConfig,
    dtype: torch.dtype,
    addends: int,
    divisor: float = 1,
    backend: HostBackend | None = None,
) -> Scales | Bypass:
    """The quantization steps that follow from what the ranks agreed on, or the reason to go plain.

    Args:
        agreed, layout, quantizer, dtype, addends, divisor, backend: see `quantize.derive`.
    """
    derived = derive(agreed, layout, quantizer, dtype, addends, divisor, backend)
    return by_scales(derived, dtype) or derived.scales


def by_scales(derived: Derived, dtype: torch.dtype) -> Bypass | None:
    """There may be no quantization steps, or none that make values of `dtype` noticeably smaller."""
    if not derived.finite:
        return Bypass.NON_FINITE
    if derived.scales is None:
        return Bypass.CODE_OVERFLOW
    return None if derived.is_worthwhile(dtype) else Bypass.NOT_WORTH
