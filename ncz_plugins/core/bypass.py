"""Rules that decide whether a call goes plain. `reasons` lists the reasons and their remedies.

Rules are applied twice: when a call is made (`before_call`, then its size, then the policies of its parts), and after
its values have been measured (`scales_or_bypass`). The first reason found counts. Rules use only what all ranks have
in common, so all ranks decide alike.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels.backend import HostBackend
from ..kernels.format import DTYPES, SelectorCosts
from .codec.layout import Layout
from .codec.quantize import Derived, Scales, derive
from .config import Config, Policy, QuantizerConfig
from .config.fields import PIECE_MIB_PER_GBPS, min_bytes_for
from .reasons import Bypass

_COMPRESSED_OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


# ------------------------------------------------------------------ when a call is made


def before_call(
    config: Config, world_size: int, role: str | None, op: dist.ReduceOp | None, dtypes: tuple[torch.dtype, ...]
) -> Bypass | None:
    """First reason found among those that depend neither on the tensor's parameters nor on its size; None if none.

    Args:
        role: "gradient", "parameter" or "activation"; None compresses whatever `config.roles` says.
        op: reduction; None for gathers and broadcasts.
        dtypes: dtypes of all tensors of the call.
    """
    if world_size == 1:
        return Bypass.ONE_RANK
    return by_role(role, config) or by_op(op) or by_dtype(*dtypes)


def by_role(role: str | None, config: Config) -> Bypass | None:
    """ROLE if `config.roles` does not list the role."""
    return Bypass.ROLE if role is not None and role not in config.roles else None


def by_op(op: dist.ReduceOp | None, scale: float = 1.0) -> Bypass | None:
    """OP for anything but a sum or an average: codes can only be added.

    Args:
        scale: factor on the result; must be above 0 to be compressed.
    """
    return Bypass.OP if (op is not None and op not in _COMPRESSED_OPS) or scale <= 0 else None


def by_dtype(*dtypes: torch.dtype) -> Bypass | None:
    """DTYPE unless all tensors have the same dtype, a float of 16, 32 or 64 bits."""
    return Bypass.DTYPE if len(set(dtypes)) > 1 or dtypes[0] not in DTYPES else None


def by_rate(dtype: torch.dtype, config: Config) -> Bypass | None:
    """DTYPE for float64 at a fixed rate, as scales are bfloat16 and lack its range."""
    return Bypass.DTYPE if dtype == torch.float64 and config.quantizer.bits is not None else None


def by_warm_up(step: int, config: Config) -> Bypass | None:
    """WARM_UP in the first `steps.warmup` steps. `step` counts from 0."""
    return Bypass.WARM_UP if step < config.steps.warmup else None


def by_policy(policy: Policy) -> Bypass | None:
    """POLICY if the policy has `action: skip`."""
    return Bypass.POLICY if policy.action == "skip" else None


def least_of_pieces(config: Config, on_gpu: bool, ranks: int) -> int | str:
    """The smallest exchange of pieces that is compressed, in bytes that a rank sends or gets; or "never".

    In host memory each piece costs its messages and calls of kernels, however small it is, and longer if ranks share
    cores. So the smallest size grows with the ranks and with the time that coding takes.
    """
    least = config.min_bytes_in_effect(on_gpu, ranks, around_ring=False)
    link_gbps = config.transport.link_gbps
    if on_gpu or link_gbps is None or config.transport.min_bytes is not None:
        return least
    costs = config.entropy.costs
    slowdown = max(1.0, costs.fixed / SelectorCosts().fixed) if costs else 1.0
    return max(least, min_bytes_for(link_gbps, PIECE_MIB_PER_GBPS * ranks * slowdown))


def by_size(
    nbytes: float, config: Config, on_gpu: bool = False, ranks: int | None = None, around_ring: bool = True
) -> Bypass | None:
    """`below` the smallest size that the configuration compresses.

    Args:
        nbytes: bytes of the whole tensor; infinity: not known yet.
        config: must be resolved.
        ranks, around_ring: see `Config.min_bytes_in_effect`.
    """
    return below(config.min_bytes_in_effect(on_gpu, ranks, around_ring), nbytes)


def below(least: int | str, nbytes: float) -> Bypass | None:
    """TOO_SMALL for less than `least` bytes, whose time is mostly latency; FAST_LINK where `least` is "never"."""
    if least == "never":
        return Bypass.FAST_LINK
    return Bypass.TOO_SMALL if nbytes < max(least, 1) else None


# ------------------------------------------------------------------ after the values have been measured


def scales_or_bypass(
    agreed: Tensor,
    layout: Layout,
    quantizer: QuantizerConfig,
    dtype: torch.dtype,
    addends: int,
    divisor: float = 1,
    backend: HostBackend | None = None,
    result: torch.dtype | None = None,
) -> Scales | Bypass:
    """Quantization steps derived from what the ranks agreed on, or the reason to go plain.

    Args:
        agreed, layout, quantizer, dtype, addends, divisor, backend, result: see `quantize.derive`.
    """
    derived = derive(agreed, layout, quantizer, dtype, addends, divisor, backend, result)
    return by_scales(derived, dtype) or derived.scales


def by_scales(derived: Derived, dtype: torch.dtype) -> Bypass | None:
    """Reason to go plain that follows from the derived quantization steps; None if they make `dtype` smaller."""
    if not derived.finite:
        return Bypass.NON_FINITE
    if derived.scales is None:
        return Bypass.CODE_OVERFLOW
    return None if derived.is_worthwhile(dtype) else Bypass.NOT_WORTH
