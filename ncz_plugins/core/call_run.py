"""One call from beginning to end: compare, agree, code and send, or go plain."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from ..kernels.backend import Backend, GpuBackend
from .bypass import Bypass, by_scales, scales_or_bypass
from .call import Call
from .call_description import require_same
from .codec.coded_tensor import Codec, CodedTensor
from .codec.fixed_rate import FixedRateCodec
from .codec.layout import Layout, Window
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
from .codec.scale_agreement import DeviceAgreement, PiecewiseAgreement, ScaleAgreement, pieces_of
from .codec.tensor_codec import UpdatingCodec, codec_for, coding_for, noise_for
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
    # One message says what the call is and what was measured, if that is little. Else whether all ranks make the same
    # call is asked first, as the length of what was measured depends on it. The answer travels while they measure.
    comparison = RankComparison(call.described, transport.rank, transport.world_size)
    source, scales, values = call.source, None, None
    if _says_both(call, device, transport):
        source, scales = _measured(call, source, device, transport, counters)
        values = scales.hand_over_first()
    same_call = transport.start_comparison(comparison, counters, values)
    if call.config.quantizer.bits is not None:
        same_call.wait()
        require_same(call.collective, comparison, ranks)
        return replace(fixed_rate_codec(call, device.backend, transport, counters), synchronize=device.synchronize)
    if call.baseline is not None:
        versions = _versions(call, call.baseline, device.backend)
        same_call.wait()
        require_same(call.collective, comparison, ranks)
        return _updating_codec(call, call.baseline, versions, device, transport, counters)
    if call.within_node is None and scales is None:
        source, scales = _measured(call, source, device, transport, counters)
    same_call.wait()
    require_same(call.collective, comparison, ranks)
    if call.within_node is not None:
        source = call.within_node(transport, counters)
        device.synchronize()  # within the time-out: measuring waits without a limit
        source, scales = _measured(call, source, device, transport, counters)
    if scales is not None:
        scales.require(1)
        if scales.bypass:
            return scales.bypass
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
    )


def _says_both(call: Call, device: Device, transport: Transport) -> bool:
    """Whether what ranks must agree on first travels in the message that compares their calls."""
    quantizer = call.config.quantizer
    return (
        call.within_node is None
        and call.baseline is None
        and quantizer.kind != "lossless"
        and quantizer.bits is None
        and not device.in_batches
        and 0
        < measured_bytes(call.layout, _pieces(call, transport)[0], quantizer, call.source.data.dtype)
        <= transport.most_with_comparison
    )


def _pieces(call: Call, transport: Transport) -> list[range]:
    """In which the tensor of a call is measured, as frames of every segment."""
    if not (call.in_pieces and transport.overlaps):
        return [range(call.layout.frames)]
    return pieces_of(call.layout, call.config, transport.is_far)


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


def _measured(
    call: Call, source: Window, device: Device, transport: Transport, counters: Counters
) -> tuple[Window, ScaleAgreement | None]:
    """What is quantized, and its scales, which the ranks are still to agree on; None where none are needed."""
    if call.feedback:
        with span("measure", source.data.nbytes, counters):
            source = call.feedback.added_to(source)
    layout, quantizer = call.layout, call.config.quantizer
    if quantizer.kind == "lossless":
        return source, None

    dtype = source.data.dtype
    most = most_summable(quantizer, dtype, call.addends, call.divisor)
    if device.in_batches:
        return source, _on_gpu(call, source, most, device.backend, transport, counters)

    def measured(frames: range) -> Tensor:
        with span("measure", source.data.nbytes * len(frames) // layout.frames, counters):
            return measure(device.backend, source, layout, call.measured, quantizer, frames, most)

    def agree(measured: Tensor) -> Callable[[], None]:
        return transport.start_max(measured, counters).wait

    def derived(agreed: Tensor, layout: Layout) -> Scales | Bypass:
        return scales_or_bypass(agreed, layout, quantizer, dtype, call.addends, call.divisor, device.backend)

    pieces = _pieces(call, transport)
    return source, PiecewiseAgreement(layout, pieces, quantizer.block_in_effect, measured, agree, derived)


def _on_gpu(
    call: Call, source: Window, most: float, backend: GpuBackend, transport: Transport, counters: Counters
) -> DeviceAgreement:
    """The agreement on scales of a call whose tensors are on a GPU. The host waits for nothing."""
    layout, quantizer, dtype = call.layout, call.config.quantizer, source.data.dtype
    rule = step_rule(quantizer, dtype, call.addends, call.divisor)

    def agree(measured: Tensor) -> None:
        with peer_errors("agreeing on quantization steps"):
            replace_by_largest(transport, measured, counters)

    def derived(agreed: Tensor) -> tuple[Scales, Tensor]:
        return derive_on_gpu(backend, agreed, layout, quantizer, rule)

    def judge(scales: Scales, outcome: list[int]) -> Bypass | None:
        return by_scales(derived_on_gpu(scales, outcome, layout), dtype)

    with span("measure", source.data.nbytes, counters):
        measured = measure_on_gpu(backend, source, layout, call.measured, quantizer, most)
    return DeviceAgreement(measured, agree, derived, judge)
