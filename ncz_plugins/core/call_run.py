"""One call from beginning to end: compare, agree, code and send, or go plain."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from ..kernels.backend import Backend
from .bypass import Bypass, by_scales, scales_or_bypass
from .call import Call
from .call_description import require_same
from .codec.coded_tensor import Codec, CodedTensor
from .codec.fixed_rate import FixedRateCodec
from .codec.layout import Window
from .codec.quantize import (
    Scales,
    derive_on_gpu,
    derived_on_gpu,
    measure,
    measure_on_gpu,
    measured_bytes,
    most_summable,
    step_rule,
)
from .codec.tensor_codec import Outcome, UpdatingCodec, codec_for, coding_for, noise_for
from .errors import memory_errors
from .runtime.device import Device
from .runtime.statistics import Counters
from .runtime.trace import span
from .training.baseline import Baseline
from .transport.base import CollectiveTransport, Transport, peer_errors, replace_by_largest
from .transport.comparison import RankComparison

_NO_VERSION = -1  # in place of a checksum


def run(call: Call, device: Device, transport: Transport, ranks: Sequence[int] | None = None) -> Counters:
    """Run `call` to its end on this rank.

    Args:
        device: where the tensors of `call` live.
        ranks: the global ranks, for messages; None: those of `transport`.

    Raises MismatchError on every rank if the ranks make different calls, PeerError, FrameError.
    """
    counters = call.counters(transport.world_size)
    plain_bytes = counters.plain_bytes
    started = time.perf_counter()
    ranks = range(transport.world_size) if ranks is None else ranks
    bypass = _run_compressed(call, device, transport, counters, ranks)
    if bypass is None:
        counters.compressed_calls = 1
    else:
        if call.baseline is not None:
            call.baseline.forget()
        with span("plain", call.source.data.nbytes, counters):
            with peer_errors("the plain collective"), memory_errors(call.collective):
                call.plain(transport.plain).wait()
            device.synchronize()
        counters.wire_bytes += plain_bytes
        counters.bypasses[bypass.value] = 1
        counters.bypassed_bytes[bypass.value] = plain_bytes
    counters.seconds = time.perf_counter() - started
    if bypass is None:
        transport.learn(counters.wire_bytes, counters.seconds, counters.wait_seconds)
    return counters


def require_same_call(
    collective: str, numbers: Mapping[str, int], transport: Transport, counters: Counters, ranks: Sequence[int]
) -> None:
    """Wait for what the other ranks are about to do. Raises MismatchError on every rank unless all do the same.

    Args:
        numbers: what this rank is about to do, see call_description.py.
    """
    comparison = RankComparison(numbers, transport.rank, transport.world_size)
    transport.start_comparison(comparison, counters).wait()
    require_same(collective, comparison, ranks)


def _run_compressed(
    call: Call, device: Device, transport: Transport, counters: Counters, ranks: Sequence[int]
) -> Bypass | None:
    """Run `call` to its end; or leave its output as it is and return the reason why it has to go plain."""
    nbytes = call.source.data.nbytes
    with span("agree", nbytes, counters):
        codec = _agree(call, device, transport, counters, ranks)
    if isinstance(codec, Bypass):
        return codec
    try:
        call.schedule(transport, codec, counters)
    except BaseException:
        device.abandon()
        raise
    codec.finish()
    if call.baseline is not None and len(call.measured):
        call.baseline.keep(call.source.data)
        device.synchronize()  # who changes it once the call is over does so on another stream
    if codec.bypass:
        counters.coders.clear()  # of frames that were for nothing
    elif call.feedback:
        with span("encode", nbytes, counters):
            call.feedback.keep(codec.remainder(call.measured), call.config.quantizer.bits is None)
            device.synchronize()  # who saves it with a checkpoint reads it on another stream
    return codec.bypass


def _agree(
    call: Call, device: Device, transport: Transport, counters: Counters, ranks: Sequence[int]
) -> Codec | Bypass:
    """The codec that all ranks use, or the reason why they all go plain."""
    comparison = RankComparison(call.described, transport.rank, transport.world_size)

    # Few measurements travel with the comparison, which saves a round trip. Otherwise ranks compare first: if they pass
    # different sizes, their measurements have different lengths.
    if _fits_comparison(call, device, transport):
        source, measured = _measured(call, call.source, device, counters)
        transport.start_comparison(comparison, counters, measured).wait()
        require_same(call.collective, comparison, ranks)
        return _quantizing_codec(call, source, measured, device, transport, counters)
    same_call = transport.start_comparison(comparison, counters)

    # A call that needs no quantization steps.
    if call.config.quantizer.bits is not None:
        same_call.wait()
        require_same(call.collective, comparison, ranks)
        return replace(fixed_rate_codec(call, device.backend, transport, counters), synchronize=device.synchronize)
    if call.baseline is not None:
        versions = _versions(call, call.baseline, device.backend)
        same_call.wait()
        require_same(call.collective, comparison, ranks)
        return _updating_codec(call, call.baseline, versions, device, transport, counters)

    # The comparison travels while this rank measures, unless its node adds up first: that must not begin before it is
    # sure that all ranks make the same call.
    source = call.source
    if call.within_node is None:
        source, measured = _measured(call, source, device, counters)
    same_call.wait()
    require_same(call.collective, comparison, ranks)
    if call.within_node is not None:
        source = call.within_node(transport, counters)
        device.synchronize()  # within the time-out: measuring waits without a limit
        source, measured = _measured(call, source, device, counters)
    if call.config.quantizer.kind == "lossless":
        return _codec(call, source, None, device, transport, counters)

    # The ranks agree on the largest of what each has measured.
    if device.in_batches:
        with peer_errors("agreeing on quantization steps"):
            replace_by_largest(transport, measured, counters)
    else:
        transport.start_max(measured, counters).wait()
    return _quantizing_codec(call, source, measured, device, transport, counters)


def _fits_comparison(call: Call, device: Device, transport: Transport) -> bool:
    """Whether what this rank measures travels in the message that compares the ranks' calls."""
    quantizer = call.config.quantizer
    if call.within_node is not None or call.baseline is not None or device.in_batches:
        return False
    if quantizer.kind == "lossless" or quantizer.bits is not None:
        return False
    nbytes = measured_bytes(call.layout, quantizer, call.source.data.dtype)
    return 0 < nbytes <= transport.most_with_comparison


def _measured(call: Call, source: Window, device: Device, counters: Counters) -> tuple[Window, Tensor | None]:
    """The values to quantize, and what this rank measured of them; None where no quantization steps are needed."""
    layout, quantizer = call.layout, call.config.quantizer
    with span("measure", source.data.nbytes, counters):
        if call.feedback:
            source = call.feedback.added_to(source)
        if quantizer.kind == "lossless":
            return source, None
        most = most_summable(quantizer, source.data.dtype, call.addends, call.divisor)
        measure_here = measure_on_gpu if device.in_batches else measure
        return source, measure_here(device.backend, source, layout, call.measured, quantizer, most=most)


def _quantizing_codec(
    call: Call, source: Window, agreed: Tensor, device: Device, transport: Transport, counters: Counters
) -> Codec | Bypass:
    """The codec for the quantization steps that follow from what the ranks agreed on, or the reason to go plain.

    On a GPU the host does not wait for the steps, and learns the reason later: see `Outcome`.
    """
    layout, quantizer, dtype = call.layout, call.config.quantizer, source.data.dtype
    if not device.in_batches:
        found = scales_or_bypass(agreed, layout, quantizer, dtype, call.addends, call.divisor, device.backend)
        return found if isinstance(found, Bypass) else _codec(call, source, found, device, transport, counters)
    rule = step_rule(quantizer, dtype, call.addends, call.divisor)
    scales, on_device = derive_on_gpu(device.backend, agreed, layout, quantizer, rule)
    outcome = Outcome(on_device, lambda seen: by_scales(derived_on_gpu(scales, seen, layout), dtype))
    return _codec(call, source, scales, device, transport, counters, outcome)


def _codec(
    call: Call,
    source: Window,
    scales: Scales | None,
    device: Device,
    transport: Transport,
    counters: Counters,
    outcome: Outcome | None = None,
) -> Codec:
    """The codec of a call, with its random numbers and what is known of the link."""
    return codec_for(
        call.config,
        device,
        CodedTensor(call.layout, source, call.output),
        scales,
        counters=counters,
        link_gbps=transport.link_gbps,
        carried_gbps=transport.carried_gbps,
        noise=noise_for(call.config, call.number, call.addend, call.addends),
        divisor=call.divisor,
        kind=call.kind,
        outcome=outcome,
    )


def _versions(call: Call, baseline: Baseline, backend: Backend) -> dict[str, int]:
    """What tells whether ranks hold the same version of each segment: a checksum, or _NO_VERSION."""
    versions = {}
    for segment in range(len(call.layout.lengths)):
        elements = call.layout.segment(segment)
        version = baseline.sent(call.source[elements]) if segment in call.measured else call.output[elements]
        versions[str(segment)] = _NO_VERSION if version is None else backend.digest(version)
    return versions


def _updating_codec(
    call: Call,
    baseline: Baseline,
    versions: dict[str, int],
    device: Device,
    transport: Transport,
    counters: Counters,
) -> UpdatingCodec:
    """The codec of a call that sends changes. What ranks hold different versions of, it sends as it is."""
    comparison = RankComparison(versions, transport.rank, transport.world_size)
    transport.start_max(comparison.tensor, counters).wait()
    differing = comparison.differing()
    for ends in differing.values():
        reason = "first call" if ends.lowest == _NO_VERSION else "changed in between"
        counters.sent_whole[reason] = 1
    sent = baseline.sent(call.source.data)
    return UpdatingCodec(
        device,
        CodedTensor(call.layout, call.source, call.output),
        coding_for(call.config, device.backend, transport.link_gbps, transport.carried_gbps),
        call.config.entropy.checksum,
        counters,
        base=call.source if sent is None else replace(call.source, data=sent),
        own=call.measured,
        whole=frozenset(map(int, differing)),
    )


def fixed_rate_codec(
    call: Call, backend: Backend, transport: CollectiveTransport, counters: Counters
) -> FixedRateCodec:
    """The codec of a call that needs no agreement. Waits for no GPU."""
    source = call.source if call.within_node is None else call.within_node(transport, counters)
    if call.feedback:
        source = call.feedback.added_to(source)
    noise = noise_for(call.config, call.number, call.addend, call.addends)
    tensor = CodedTensor(call.layout, source, call.output)
    return FixedRateCodec(backend, tensor, call.config.quantizer.bits, counters, noise, call.divisor)
