"""What a call has to give, computed on every rank from the seeds of all, and how far off it may be.

It shares no code with ncz_plugins: bounds follow from docs/reference/how-it-works.md. All is computed in windows of
about a million elements, as the largest tensors would not fit into the memory in float64 several times.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from drawing import FLOATS, Call
from torch import Tensor

_POOL = 1 << 21  # random numbers of each kind, of which pieces are taken
_PIECE = 1 << 20  # elements that lie in the pool as they lie in the tensor
_CHUNK = 4096
# What replaces settings of the quantizer for a role, unless a policy for the role has a quantizer of its own.
_OF_ROLES = {
    "parameter": {"kind": "lossless"},
    "activation": {"kind": "error_bound", "mode": "rms", "value": 0.1, "block": 128, "error_feedback": False},
}


# ------------------------------------------------------------------ values


def values(call: Call, rank: int, start: int, stop: int) -> Tensor:
    """Elements of what the rank `rank` of the group puts in."""
    dtype = getattr(torch, call.dtype)
    out = torch.empty(stop - start, dtype=dtype)
    for piece in range(start // _PIECE, -(-stop // _PIECE)):
        first, last = max(start, piece * _PIECE), min(stop, (piece + 1) * _PIECE)
        generator = np.random.default_rng([call.seed, rank, piece])
        at = int(generator.integers(_POOL - _PIECE)) + first - piece * _PIECE
        found = _pools()[call.data][at : at + last - first]
        if call.data == "enormous":
            found = found * torch.finfo(dtype).max
        elif call.dtype in FLOATS:
            found = found * call.scale
        elif call.dtype == "uint8":
            found = found.abs()
        out[first - start : last - start] = found
    for poisoned, element, value in call.poison:
        if poisoned == rank and start <= element < stop:
            out[element - start] = value
    return out


@functools.cache
def _pools() -> dict[str, Tensor]:
    """float64, [_POOL], by the kind of data; magnitudes of about one."""
    generator = np.random.default_rng(0)
    normal = generator.standard_normal(_POOL)
    found = {
        "normal": normal,
        "heavy": normal**3,
        "sparse": normal * (generator.random(_POOL) < 0.05),
        "smooth": np.sin(np.arange(_POOL) / 999) + 1e-3 * normal,
        "mixed": normal * np.repeat(10 ** generator.uniform(-4, 0, _POOL // _CHUNK), _CHUNK),
        "whole": generator.choice([-2.0, -1.0, 1.0, 2.0], _POOL),  # sums and products of few are exact
        "zero": np.zeros(_POOL),
        "constant": np.ones(_POOL),
        "enormous": np.where(generator.random(_POOL) < 0.999, normal / 1e3, np.sign(normal) * 0.6),
    }
    return {kind: torch.from_numpy(numbers) for kind, numbers in found.items()}


# ------------------------------------------------------------------ what compression may do


def treated(call: Call, config: dict, ranks: int, step: int) -> tuple[dict, str | None]:
    """The quantizer that a call gets in a step, and the reason, if there is one, why it must go plain.

    The reason is what the statistics call it, and holds whatever the values are.
    """
    general, reason = config["quantizer"], None
    quantizer = general if general["kind"] == "lossless" else general | _OF_ROLES.get(call.role, {})
    elements = call.elements(ranks)
    for policy in config["policies"]:
        patterns = policy.get("name", "*")
        fits = (
            any(
                fnmatch.fnmatchcase(call.name, each) for each in ([patterns] if isinstance(patterns, str) else patterns)
            ),
            policy.get("min_elements", 0) <= elements <= policy.get("max_elements", elements),
            policy.get("dtype", call.dtype) == call.dtype,
            policy.get("role", call.role) == call.role,
        )
        if all(fits):
            changes = policy.get("quantizer", {})
            is_for_role = call.role not in _OF_ROLES or (changes and policy.get("role") == call.role)
            if is_for_role or changes.get("kind") == "lossless":
                quantizer = general | changes
            reason = "policy" if policy.get("action") == "skip" else None
            break
    times = [each["times"] for each in config["steps"]["bounds"] if step >= each["step"]]
    quantizer = quantizer | {"value": quantizer["value"] * (times or [1])[-1]}
    if step < config["steps"]["warmup"]:
        reason = "warm-up"
    size, least = elements * getattr(torch, call.dtype).itemsize, config["transport"]["min_bytes"]
    if least == "never":
        reason = "link too fast"
    elif size < max(least, 1):
        reason = "too small"
    if call.dtype not in FLOATS:
        reason = "dtype"
    if call.op not in ("SUM", "AVG", None):
        reason = "reduce op"
    if call.role is not None and call.role not in config["roles"]:
        reason = "role not enabled"
    return quantizer, "one rank" if ranks == 1 else reason


def feeds_back(call: Call, quantizer: dict) -> bool:
    """Whether what the call loses is added to the next one of its name."""
    return call.op in ("SUM", "AVG") and quantizer["error_feedback"] and quantizer["kind"] != "lossless"


class Done(NamedTuple):
    """A call that was made: by which quantizer, whether it went compressed, and its result, flat."""

    call: Call
    quantizer: dict
    compressed: bool
    result: Tensor


def check(calls: list[Done], config: dict, ranks: int, rank: int) -> float | None:
    """Raise AssertionError unless the last of `calls` has given what the rank `rank` of the group should have.

    Args:
        calls: with error feedback all that were made under one name, in order; else one.

    Returns: the largest error as a share of what is allowed; None where the result had to be exact, or a plain sum.
    """
    last = calls[-1]
    if not last.compressed or last.quantizer["kind"] == "lossless":
        for start, stop in _windows(last.call, ranks, rank, 0):
            _check_plain(last, config, ranks, start, stop, _part(last, rank, start, stop))
        return None
    calls = [done for done in calls if done.compressed]
    wholes = [_whole(done, ranks) for done in calls]
    windows = _windows(last.call, ranks, rank, _block(last.quantizer))
    return max((_check_bound(calls, wholes, config, ranks, rank, *each) for each in windows), default=0.0)


# ------------------------------------------------------------------ within the bound


@dataclass
class _Seen:
    """What is in a block, [ranks], of those that put something into it."""

    high: np.ndarray
    low: np.ndarray
    squares: np.ndarray
    count: int

    @classmethod
    def of(cls, inputs: np.ndarray) -> _Seen:
        return cls(inputs.max(1), inputs.min(1), (inputs * inputs).sum(1), inputs.shape[1])

    def joined(self, other: _Seen) -> _Seen:
        high, low = np.maximum(self.high, other.high), np.minimum(self.low, other.low)
        return _Seen(high, low, self.squares + other.squares, self.count + other.count)

    def unit(self, mode: str):
        """What the bound is relative to."""
        if mode == "rms":
            return np.sqrt(self.squares / self.count).max()
        if mode == "rel":
            return np.maximum(self.high, -self.low).max()
        return self.high.max() - self.low.min()


# By how much more the unit of a block is at most, where something is added to each of its values: times that.
_ADDED = {"abs": 0, "rms": 1, "rel": 1, "range": 2}


def _check_bound(calls: list[Done], wholes: list, config: dict, ranks: int, rank: int, start: int, stop: int) -> float:
    """The largest error of the last call in a window, as a share of what is allowed; AssertionError above one.

    An average counts as the sum that it comes from.
    """
    call = calls[-1].call
    addends, divisor = ranks if call.op else 1, ranks if call.op == "AVG" else 1
    final = torch.finfo(getattr(torch, call.dtype))
    work = final if call.dtype == "float64" else torch.finfo(torch.float32)
    subnormal = final.smallest_normal * final.eps
    own = lost = rounded = 0.0  # the bound of what one rank loses, what all have lost, and what arithmetic adds to it
    for done, whole in zip(calls, wholes):
        inputs, before = _inputs(done.call, ranks, start, stop), own
        exact, total = inputs.sum(0), np.abs(inputs).sum(0)
        unit = _units(inputs, done.quantizer, whole)
        # With error feedback, what the call before has lost belongs to the values.
        values = unit + _ADDED[done.quantizer["mode"]] * before
        # Bounds below four times the smallest normal number, times n in an average, are not told apart.
        own = np.maximum(done.quantizer["value"] * values, 4 * work.tiny * divisor)
        own = own * (1 + 1e-11)  # what computing the reference itself may be off
        if not np.abs(inputs).sum(1).all():  # a rank that has zeros keeps what it has
            own = np.maximum(own, before)
        rounding = np.zeros_like(total)
        if done.quantizer["mode"] == "range":  # a block of one value is exact but for the rounding of the result
            rounding += np.where(unit == 0, 4 * work.eps * total, 0)
        if call.op and final.bits == 16:
            rounding += final.eps / 2 * (np.abs(exact) + addends * (own + before)) + divisor * subnormal
        if call.op and isinstance(config["transport"]["hierarchy"], int):  # plain sums inside the nodes
            rounding += ranks * (final.eps * total + subnormal)
        if len(calls) > 1:
            rounding += 4 * work.eps * (total + addends * (own + before))
        rounded = rounded + rounding
        error = _wide(call, _part(done, rank, start, stop)) * divisor - exact
        lost = lost + error
    allowed = addends * (own + before) + rounding
    worst = _share(error, allowed, call, start)
    if len(calls) > 1:  # what the calls lost does not add up: it is what the last one has lost
        worst = max(worst, _share(lost, addends * own + rounded, call, start))
    return worst


def _share(error: np.ndarray, allowed: np.ndarray, call: Call, start: int) -> float:
    share = np.divide(np.abs(error), allowed, out=np.zeros_like(error), where=error != 0)
    if not (share <= 1).all():
        at = int(np.argmax(np.where(np.isnan(share), np.inf, share)))
        allowed = np.broadcast_to(allowed, error.shape)
        raise AssertionError(f"element {start + at} is {error[at]!r} off; allowed: {allowed[at]!r}")
    return float(share.max(initial=0))


def _block(quantizer: dict) -> int:
    return 0 if quantizer["mode"] == "abs" else quantizer["block"]


def _whole(done: Done, ranks: int) -> _Seen | None:
    """What is in a whole tensor that is one block."""
    if done.quantizer["mode"] == "abs" or done.quantizer["block"]:
        return None
    windows = _windows(done.call, ranks, None, 0)
    return functools.reduce(_Seen.joined, (_Seen.of(_inputs(done.call, ranks, *each)) for each in windows))


def _units(inputs: np.ndarray, quantizer: dict, whole: _Seen | None) -> np.ndarray:
    """What the bound of each element of a window is relative to."""
    units = np.ones(inputs.shape[1], inputs.dtype)
    if quantizer["mode"] != "abs":
        width = quantizer["block"] or len(units)
        for at in range(0, len(units), width):
            seen = whole or _Seen.of(inputs[:, at : at + width])
            units[at : at + width] = seen.unit(quantizer["mode"])
    return units


# ------------------------------------------------------------------ plain, and without loss


def _check_plain(done: Done, config: dict, ranks: int, start: int, stop: int, got: Tensor) -> None:
    """A window of what went plain or without loss: exact where there is but one answer, else a sum of floats."""
    call = done.call
    parts = _raw_inputs(call, ranks, start, stop)
    if call.op is None:
        return _same(parts[0], got, start)
    if call.op in ("MAX", "MIN", "PRODUCT") or call.dtype not in FLOATS:
        fold = {"MAX": torch.maximum, "MIN": torch.minimum, "PRODUCT": torch.mul, "SUM": torch.add}[call.op]
        return _same(functools.reduce(fold, parts), got, start)
    divisor = ranks if call.op == "AVG" else 1
    in_nodes = isinstance(config["transport"]["hierarchy"], int)
    if done.compressed and config["transport"]["schedule"] == "direct" and not in_nodes:
        # In the order of ranks, half types in float32 and rounded once.
        dtype = torch.promote_types(got.dtype, torch.float32)
        total = functools.reduce(torch.add, [part.to(dtype) for part in parts]).to(got.dtype)
        return _same(total / divisor if divisor > 1 else total, got, start)
    inputs, final = _inputs(call, ranks, start, stop), torch.finfo(got.dtype)
    with np.errstate(invalid="ignore"):
        exact, total = inputs.sum(0), np.abs(inputs).sum(0)
    allowed = np.zeros_like(total) if call.data == "whole" else ranks * final.eps * total
    if divisor > 1 or call.data != "whole":
        allowed = allowed / divisor + final.eps * np.abs(exact / divisor) + 2 * final.smallest_normal * final.eps
    found = _wide(call, got)
    with np.errstate(invalid="ignore"):
        right = np.abs(found - exact / divisor) <= allowed
    right |= (found == exact) | (np.isnan(found) & np.isnan(exact))  # infinities, which no division changes
    # Any order of adding is right, so that what comes near the largest number may become infinite, or not.
    right |= np.isfinite(exact) & (total * (1 + ranks * final.eps) >= final.max)
    if not right.all():
        at = int(np.argmin(right))
        raise AssertionError(f"element {start + at}: {found[at]!r} in place of {exact[at] / divisor!r}")
    return None


def _same(wanted: Tensor, got: Tensor, start: int) -> None:
    """The same values; NaN wherever there is one."""
    wrong = ~((wanted == got) | (wanted.isnan() & got.isnan()) if got.is_floating_point() else wanted == got)
    if wrong.any():
        at = int(wrong.nonzero()[0])
        raise AssertionError(f"element {start + at}: {got[at].item()!r} in place of {wanted[at].item()!r}")


# ------------------------------------------------------------------ windows


def _windows(call: Call, ranks: int, rank: int | None, block: int) -> Iterator[tuple[int, int]]:
    """Ranges of the whole tensor's elements that begin with a block and end before the next part: of those that the
    rank `rank` gets as a result, or of all."""
    parts = range(ranks) if call.has_parts else range(1)
    if call.collective == "reduce_scatter" and rank is not None:
        parts = range(rank, rank + 1)
    width = _PIECE // block * block if block else _PIECE
    for part in parts:
        for start in range(0, call.length, width):
            yield part * call.length + start, part * call.length + min(start + width, call.length)


def _part(done: Done, rank: int, start: int, stop: int) -> Tensor:
    """A window of the result."""
    before = rank * done.call.length if done.call.collective == "reduce_scatter" else 0
    return done.result[start - before : stop - before]


def _raw_inputs(call: Call, ranks: int, start: int, stop: int) -> list[Tensor]:
    """What is put into a window by those who put something in."""
    if call.collective == "broadcast":
        return [values(call, call.root, start, stop)]
    if call.collective == "all_gather":
        owner, start = divmod(start, call.length)
        return [values(call, owner, start, stop - owner * call.length)]
    return [values(call, rank, start, stop) for rank in range(ranks)]


def _inputs(call: Call, ranks: int, start: int, stop: int) -> np.ndarray:
    """As above, [ranks, elements], so wide that sums are exact, or nearly."""
    return np.stack([_wide(call, part) for part in _raw_inputs(call, ranks, start, stop)])


def _wide(call: Call, part: Tensor) -> np.ndarray:
    return part.double().numpy().astype(np.longdouble if call.dtype == "float64" else np.float64)
