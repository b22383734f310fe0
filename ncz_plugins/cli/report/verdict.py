"""Verdict on a run: what limited it, in words. docs/guides/metrics.md states the rules.

All numbers are rank 0's. Each sentence shows the numbers that it is based on.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ...core.config import QuantizerConfig
from ...core.errors import ConfigError
from ...core.reasons import BEST_MIN_BYTES, LARGER_CALLS, REMEDIES, SMALLER_BOUND, Bypass
from .. import loss
from ..output import bit_rate, counted, duration, rounded, size
from .read import Header, Settings
from .summary import LATE, Summary

LITTLE_OF_STEP = 0.1  # collectives below this share of a step do not limit it
MOST = 0.5  # what takes this share of the time limits it
LATENCY = 0.25  # share of agreeing in small calls from which latency limits
SMALL_CALL_BYTES = 1 << 20  # about one frame: in smaller calls, coding and sending don't overlap
MANY_CALLS = 10  # compressed calls per step
TINY_CALL_BYTES = 4 << 10  # in smaller calls, the size of headers matters
BUSY_LINK = 0.6  # share of the link's speed from which the link limits; it also pauses for coding
UNTIMED = 0.1  # share of bytes that went plain at once from which the verdict says so
SLOW_STEPS = 0.25  # share of time in slow steps from which the verdict says so
LOW_RATIO = 4.0  # a lower ratio comes from a fine bound
_ABOUT = 1.25  # factor by which errors of single buckets differ from those of all gradients together


class Conclusion(NamedTuple):
    """One conclusion from the numbers.

    Attributes:
        about: "time", "ratio", "loss" or "guard".
        limit: what limited it: a keyword for programs.
        words: the conclusion in sentences.
    """

    about: str
    limit: str
    words: str


def verdict(summary: Summary, header: Header | None) -> list[Conclusion]:
    """Conclusions on time and ratio, then on loss and guard if there is anything to say about them."""
    config = header.config if header else Settings()
    of_loss = [_of_loss(summary, config)] if summary.compressed_calls else []
    of_guard = [_of_guard(summary, config)] if summary.guard else []
    # Never advise a coarser bound if the bound is too coarse already.
    is_coarse = any(each.limit in ("harmful", "outside", "alarms") for each in (*of_loss, *of_guard))
    return [_of_time(summary, header, is_coarse), _of_ratio(summary, config, is_coarse), *of_loss, *of_guard]


# ------------------------------------------------------------------ time


def _of_time(summary: Summary, header: Header | None, is_coarse: bool) -> Conclusion:
    """What limited the time of a step."""
    times = summary.times
    if not summary.calls:
        return Conclusion("time", "unknown", "Unknown: no collective was counted in these steps.")
    if not times.steps:
        return Conclusion(
            "time", "unknown", "Unknown: only first steps after a start are here, and these are not timed."
        )
    if not summary.wire_bytes:
        return Conclusion("time", "elsewhere", "Something else: nothing was sent, so compression can't gain anything.")

    # Do collectives matter at all, and is their time known?
    untimed = summary.untimed
    if untimed >= MOST:
        limit = "unknown"
        words = (
            f"Unknown: {untimed:.0%} of the bytes went plain at once, and the time of such calls is not measured. "
            f"The other collectives took {times.share:.0%} of a step."
        )
    elif times.share < LITTLE_OF_STEP:
        limit = "elsewhere"
        words = (
            f"Something else: the collectives counted here took {times.share:.1%} of a step "
            f"({duration(times.collectives)} of {duration(times.step)}), and compression can't gain more than that. "
            "The rest is computation, and traffic that is not counted here, such as the weights that ZeRO gathers."
        )
    else:
        limit, words = _of_collectives(summary, header, is_coarse)
        words = f"{words} Collectives took {times.share:.0%} of a step ({duration(times.collectives)})."

    # What the conclusion leaves out: calls without a known time, and slow steps.
    if UNTIMED < untimed < MOST:
        words += f" What went plain at once, {untimed:.0%} of the bytes, is not in these times."
    if times.slow_share > SLOW_STEPS:
        words += (
            f" All this is about the median step; {times.slow_share:.0%} of the time went into {times.slow_steps:,} "
            f"of {counted(times.steps, 'step')}, which took more than twice as long (the slowest: step "
            f"{times.slowest}, {duration(times.slowest_seconds)})"
        )
        if times.slow_verified:
            steps = f"{times.slow_verified:,} of these" if times.slow_steps > 1 else "that step"
            words += f". In {steps} the guard verified a call, which is sent plain for that"
        words += "."
    return Conclusion("time", limit, words)


def _of_collectives(summary: Summary, header: Header | None, is_coarse: bool) -> tuple[str, str]:
    """Keyword and words for what limited the collectives."""
    times = summary.times
    link_gbps = header.link_gbps if header else None
    used = times.megabits_per_second / 1e3 / link_gbps if link_gbps else 0.0
    rate = f"rank 0 sent {bit_rate(1e6 * times.megabits_per_second)} in collectives"
    if times.plain >= MOST:
        reason = next((reason for reason in summary.bypasses if reason in LATE), "an unknown reason")
        return "plain", (
            f"Calls that went plain after all: {times.plain:.0%} of the time in collectives, most of them because of: "
            f"{reason}."
        )
    if times.inside_nodes >= MOST:
        return "inside nodes", (
            f"The ranks of a node among themselves: {times.inside_nodes:.0%} of the time in collectives. With "
            "transport.hierarchy: off all ranks compress instead."
        )
    if times.agreeing >= LATENCY and summary.call_bytes < SMALL_CALL_BYTES:
        return "latency", (
            f"Latency: {times.agreeing:.0%} of the time in collectives was agreeing, in which hardly anything is sent. "
            f"{_small_calls(summary)}"
        )
    if times.agreeing >= MOST:
        return "late ranks", (
            f"Ranks that came late: {times.agreeing:.0%} of the time in collectives was agreeing, in which hardly "
            f"anything is sent but all ranks must be there, and calls are large ({size(summary.call_bytes)}). Other "
            "ranks compute longer than rank 0, or their machines are busy; compression can't help that."
        )
    if used >= BUSY_LINK:
        return "link", (
            f"The link: {rate}, {used:.0%} of the {link_gbps:g} Gbit/s that the link is taken to have. "
            f"{_send_less(summary, is_coarse)}"
        )
    if times.waiting >= MOST:
        return "link", (
            f"The link, or ranks that code more slowly: {times.waiting:.0%} of the time in collectives rank 0 had "
            f"nothing to code and waited for frames; {rate}. {_send_less(summary, is_coarse)}"
        )
    if times.coding >= MOST:
        cheaper = "" if _quickest_coder(summary) else " or a cheaper coder (entropy.coder: fixed)"
        return "coding", (
            f"Coding: measuring took {times.measuring:.0%}, encoding {times.encoding:.0%} and decoding "
            f"{times.decoding:.0%} of the time in collectives (they may overlap). Less to send or a faster link can't "
            f"gain more than the {times.waiting:.0%} of waiting for frames; more cores per rank{cheaper} can. On a "
            f"fast link plain calls may be faster: {BEST_MIN_BYTES}."
        )
    if times.rest - times.decoding >= MOST:
        return "busy machine", (
            f"CPU cores: {times.rest:.0%} of the time in collectives rank 0 neither coded nor waited for other ranks, "
            f"of which waiting for decoding explains {times.decoding:.0%} at most. Something else had the cores: more "
            "ranks or threads than there are cores, data loading, other programs."
        )
    parts = (
        (times.agreeing, "agreeing"),
        (times.waiting, "waiting for frames"),
        (times.coding, "coding"),
        (times.plain, "plain calls"),
        (times.inside_nodes, "inside nodes"),
    )
    listed = ", ".join(f"{name} {part:.0%}" for part, name in sorted(parts, reverse=True) if part >= 0.005)
    return "mixed", f"Nothing alone: of the time in collectives {listed}; {rate}."


def _small_calls(summary: Summary) -> str:
    """Sentences on size and number of calls, with the remedy."""
    calls = summary.compressed_calls / summary.steps
    many = " and many" if calls >= MANY_CALLS else ""
    words = f"Calls are small{many}: {size(summary.call_bytes)} each, {rounded(calls)} a step."
    if calls < 2:  # a single call can't be joined with others
        return f"{words} Fewer steps, each with more batches whose gradients are accumulated, make fewer calls."
    return f"{words} {_sentence(LARGER_CALLS)}; {BEST_MIN_BYTES}."


def _sentence(remedy: str) -> str:
    return remedy[0].upper() + remedy[1:]


def _quickest_coder(summary: Summary) -> str | None:
    """The coder that wrote most frames if it is one of the two quickest; else None."""
    coder = max(summary.coders, key=summary.coders.get) if summary.coders else None
    return coder if coder in ("raw", "fixed") else None


def _send_less(summary: Summary, is_coarse: bool) -> str:
    """Sentences on how to send fewer bytes."""
    words = "What helps is a faster link" + ("." if is_coarse else ", or a larger bound.")
    if coder := _quickest_coder(summary):
        words += (
            f" Most frames were written by the coder {coder}, which is quick and compresses least: entropy.coder: auto "
            "takes others if transport.link_gbps says how slow the link is."
        )
    return words


# ------------------------------------------------------------------ ratio


def _of_ratio(summary: Summary, config: Settings, is_coarse: bool) -> Conclusion:
    """What limited the ratio: plain calls, small calls, or the quantizer."""
    if not summary.wire_bytes:
        why = f" {_remedy(Bypass.ONE_RANK.value)}" if Bypass.ONE_RANK.value in summary.bypasses else ""
        return Conclusion("ratio", "nothing", f"Nothing was sent.{why}")
    bypassed, compressed = summary.bypassed_bytes / summary.wire_bytes, summary.compressed_ratio
    shrank = f"what was compressed shrank {compressed:.2f} times" if compressed else "nothing was compressed"
    if summary.bypasses and (bypassed >= MOST or compressed is None):
        reason, most = next(iter(summary.bypasses.items()))
        return Conclusion(
            "ratio",
            f"plain: {reason}",
            f"Calls that went plain: {bypassed:.0%} of the bytes sent, most of them because of: {reason} "
            f"({counted(most.calls, 'call')}, {size(most.bytes / summary.steps)} a step); {shrank}. {_remedy(reason)}",
        )
    if compressed is None or compressed >= LOW_RATIO:
        return Conclusion("ratio", "none", f"Nothing in particular: {shrank}.")
    if summary.call_bytes < TINY_CALL_BYTES:
        return Conclusion(
            "ratio",
            "small calls",
            f"Calls are so small ({size(summary.call_bytes)} each, plain) that the headers of their frames count: "
            f"{shrank}. {_sentence(LARGER_CALLS)}; {BEST_MIN_BYTES}.",
        )
    quantizer = config.quantizer
    if quantizer.get("kind") == "lossless":
        return Conclusion("ratio", "lossless", f"quantizer.kind: lossless keeps every bit: {shrank}.")
    if quantizer.get("mode") == "bits":
        fixed = f"quantizer.mode: bits sends {quantizer.get('value')} bits per value whatever the data"
        return Conclusion("ratio", "bits", f"{fixed}: {shrank}. Mode rms sends as few as the data need.")
    now = "".join(f", {name} {quantizer[name]}" for name in ("mode", "value") if name in quantizer)
    words = f"The bound{now}: {shrank}, to about {32 / compressed:.1f} bits of every 32."
    if not is_coarse:
        words += " Each doubling of quantizer.value saves about one of them; `guard` tells what that does to gradients."
    return Conclusion("ratio", "bound", words)


def _remedy(reason: str) -> str:
    """The remedy for a reason, as a sentence; empty for a reason that this version does not know."""
    known = reason in {each.value for each in Bypass}
    return f"{_sentence(REMEDIES[Bypass(reason)])}." if known else ""


# ------------------------------------------------------------------ loss


def _of_loss(summary: Summary, config: Settings) -> Conclusion:
    """Known effect of the bound on the loss, and whether the guard found larger errors than measured there."""
    try:
        quantizer = QuantizerConfig(**config.quantizer).times(summary.bounds[1])
    except ConfigError:
        return Conclusion("loss", "unknown", "Unknown: another version of ncz_plugins wrote these settings.")
    limit = loss.worst_class(quantizer)
    words = f"{quantizer.describe()}: {loss.describe(quantizer)}."
    error, harmless = None, loss.largest_harmless_error(quantizer)
    if summary.guard:
        error = math.inf if summary.guard.relative_error is None else summary.guard.relative_error
    if error is not None and harmless is not None and error > _ABOUT * harmless:
        limit = "harmful" if limit == "harmful" else "outside"
        words += (
            f" The guard's largest relative error, {_figure(summary.guard.relative_error)}, is outside of what was "
            f"shown to be harmless under AdamW, {harmless:.2g}: compare with a plain run, or lower quantizer.value."
        )
    return Conclusion("loss", limit, words)


# ------------------------------------------------------------------ the guard


def _of_guard(summary: Summary, config: Settings) -> Conclusion:
    """Alarms of the guard, and the worst findings."""
    guard, thresholds = summary.guard, config.guard
    worst = (
        f"the largest relative error was {_figure(guard.relative_error)} (step {guard.error_step}, "
        f"{guard.error_name or 'a tensor without a name'}), the lowest cosine {_figure(guard.cosine)} (step "
        f"{guard.cosine_step}, {guard.cosine_name or 'a tensor without a name'})"
    )
    verified = counted(guard.verified, "verified call")
    if not guard.alarms:
        return Conclusion("guard", "none", f"No alarm in {verified}: {worst}.")
    if thresholds.max_relative_error is not None:
        worst += f"; allowed: a relative error of at most {thresholds.max_relative_error:g}"
    feedback = "" if config.quantizer.get("error_feedback") is True else ", or quantizer.error_feedback: true"
    return Conclusion(
        "guard",
        "alarms",
        f"{counted(guard.alarms, 'alarm')} in {verified}: {worst}. {_sentence(SMALLER_BOUND)}{feedback}.",
    )


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"
