"""Reasons why calls go plain, and the remedy for each. Imports no torch, as some commands need none."""

from __future__ import annotations

from enum import StrEnum


class Bypass(StrEnum):
    """Reason why a call went plain. The value is what counters, records and reports show."""

    ONE_RANK = "one rank"
    ROLE = "role not enabled"
    COLLECTIVE = "not compressed by the backend"  # gathers, broadcasts and others without a sum
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
    MODEL_PARALLEL = "model parallelism"  # DeepSpeed sums gradients between parts of one model, not between replicas
    REDUCED = "already reduced"  # DeepSpeed sends gradients again after their reduction
    JOINED = "a rank has joined"  # a rank has called hvd.join: it is out of data and contributes zeros


LARGER_CALLS = "make calls larger (DDP: bucket_cap_mb; DeepSpeed: zero_optimization.reduce_bucket_size)"
BEST_MIN_BYTES = "`ncz tune` measures from which size on compression pays, for transport.min_bytes"
SMALLER_BOUND = "set a smaller quantizer.value, for all tensors or by a policy for those named here"

# The remedy for each reason, which messages and commands print. A test compares docs/guides/metrics.md with them.
REMEDIES = {
    Bypass.ONE_RANK: "a group of one rank has nothing to send: compression needs 2 or more with the same parameters",
    Bypass.ROLE: "to compress tensors of this role, add the role to the setting roles",
    Bypass.COLLECTIVE: 'the backend "ncz" compresses all_reduce, reduce and reduce_scatter, also coalesced; if roles '
    "has activation also all_to_all, send, recv, and gather, scatter and all_gather with lists where the caller says "
    "that role; all other collectives keep every bit",
    Bypass.POLICY: "a policy with action: skip matches these: `ncz check FILE --model SPEC` shows what policies match",
    Bypass.WARM_UP: "the first steps.warmup steps go plain; `ncz report --from` leaves them out",
    Bypass.DTYPE: "only floats of 16, 32 and 64 bits are compressed; with quantizer.mode: bits, only 16 and 32 bits",
    Bypass.OP: "only sums and averages are compressed",
    Bypass.TOO_SMALL: f"{LARGER_CALLS}; {BEST_MIN_BYTES}",
    Bypass.FAST_LINK: "transport.min_bytes is never, or compression was measured to lose time on this link: leave it, "
    "or set transport.min_bytes to a size to compress anyway",
    Bypass.NON_FINITE: "a value is NaN or infinite: if this continues after the first steps, lower the loss scale or "
    "the learning rate",
    Bypass.CODE_OVERFLOW: "the bound is too fine for these values: raise quantizer.value, use mode rms or rel, or use "
    "kind: lossless",
    Bypass.SPARSE: "sparse gradients are not compressed: use dense ones (sparse=False)",
    Bypass.MODEL_PARALLEL: "only sums between replicas of a model are compressed, and DeepSpeed sums these within one: "
    "tied weights between stages of a pipeline, or AutoEP's gradients between ranks of tensor parallelism",
    Bypass.REDUCED: "for Muon and ZenFlow, DeepSpeed sends gradients again after their reduction, and they keep every "
    "bit: under ZeRO 1 and 2 without offload, Muon sends none",
    Bypass.JOINED: "compression needs all ranks, and one has called hvd.join: give all ranks the same number of steps",
    Bypass.NOT_WORTH: "with this bound the data would hardly shrink: raise quantizer.value, or skip these tensors by a "
    "policy",
}
