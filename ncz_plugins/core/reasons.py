"""Reasons why calls go plain, and the remedy for each. Imports no torch, as some commands need none."""

from __future__ import annotations

from enum import Enum


class Bypass(str, Enum):
    """Reason why a call went plain. The value is what counters, records and reports show."""

    ONE_RANK = "one rank"
    ROLE = "role not enabled"
    POLICY = "policy"
    WARM_UP = "warm-up"
    DTYPE = "dtype"
    OP = "reduce op"
    TOO_SMALL = "too small"
    FAST_LINK = "link too fast"  # min_bytes is never: compression would lose time at any size
    NON_FINITE = "non-finite"  # a value is NaN or infinite, or the result could become so
    CODE_OVERFLOW = "code overflow"  # the codes would need more than 32 bits
    NOT_WORTH = "not worth it"
    SPARSE = "sparse"
    JOINED = "a rank has joined"  # a rank has called hvd.join: it is out of data and contributes zeros


LARGER_CALLS = "make calls larger (DDP: bucket_cap_mb; DeepSpeed: zero_optimization.reduce_bucket_size)"
BEST_MIN_BYTES = "`ncz tune` measures from which size on compression pays, for transport.min_bytes"
SMALLER_BOUND = "set a smaller quantizer.value, for all tensors or by a policy for those named here"

# The remedy for each reason. Messages, commands and the documentation all print these, so none contradicts another.
REMEDIES = {
    Bypass.ONE_RANK: "a group of one rank has nothing to send: more ranks must hold the same parameters",
    Bypass.ROLE: "tensors of this role are compressed if the setting roles lists it",
    Bypass.POLICY: "a policy with action: skip chose these: `ncz check FILE --model SPEC` shows what policies match",
    Bypass.WARM_UP: "the first steps.warmup steps go plain; `ncz report --from` leaves them out",
    Bypass.DTYPE: "floats of 16, 32 and 64 bits are compressed, with quantizer.mode: bits none of 64",
    Bypass.OP: "only sums and averages are compressed",
    Bypass.TOO_SMALL: f"{LARGER_CALLS}; {BEST_MIN_BYTES}",
    Bypass.FAST_LINK: "transport.min_bytes is never, or compression was measured to lose time on this link: nothing to "
    "do; a size as transport.min_bytes compresses all the same",
    Bypass.NON_FINITE: "a value is NaN or infinite: if that goes on after the first steps, lower the loss scale or the "
    "learning rate",
    Bypass.CODE_OVERFLOW: "the bound is too fine for these values: raise quantizer.value, use mode rms or rel, or use "
    "kind: lossless",
    Bypass.SPARSE: "a sparse gradient is reduced as it is: use dense ones (sparse=False) to compress it",
    Bypass.JOINED: "compression needs all ranks, and one has called hvd.join: give every rank the same number of steps",
    Bypass.NOT_WORTH: "with this bound the data would hardly shrink: raise quantizer.value, or skip such tensors by a "
    "policy",
}
