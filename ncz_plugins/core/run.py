"""The way of a call, whichever door it came by, in five steps.

1. Decide, without asking another rank: plain or compressed, and with which settings (`decide`). `enter` then gives the
   call its place in the order of calls, and says how a compressed one is carried out.
2. Compare and agree: one exchange says what each rank is about to do and what it measured. Ranks that differ are told
   by name. All ranks derive the same quantization steps, or the same reason to go plain.
3. Exchange: the schedule moves frames, and codes some while others travel.
4. Dequantize into the caller's memory, check, and keep what error feedback and baselines keep.
5. Count.

Steps 2 to 5 are `run`, on the thread that runs the calls of a group one after another. `queue` is the same for calls at
a fixed rate on a GPU, for which no host waits. `run_plain` is the way of a plain call: compare, the uncompressed
collective, count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels.backend import Backend
from .bypass import Bypass, before_call, below, by_rate, by_scales, by_size, scales_or_bypass
from .call import Call, plain_wire_bytes
from .call_comparison import memory_of_pieces, most_at_once, require_same_call, tell_pieces
from .call_description import numbered, require_plain, require_same, signature_described
from .call_queue import CallQueue
from .codec.coded_tensor import Codec, CodedTensor, ExchangingCodec
from .codec.fixed_rate import FixedRateCodec, FixedRatePieces
from .codec.from_config import codec_for, coding_for, noise_for
from .codec.gpu_codec import BATCH_ELEMENTS, Outcome
from .codec.gpu_pieces import GpuPiecesCodec
from .codec.layout import Window
from .codec.pieces import PiecesCodec
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
from .codec.tensor_codec import LosslessCodec
from .config import Config
from .config.fields import Role
from .errors import UnsupportedError, memory_errors
from .group import Group
from .planning import plan
from .runtime.device import HOST, Device, require_kernels
from .runtime.recorded import NEVER, RecordedCall
from .runtime.trace import span
from .schedules.exchange import exchange_heads
from .schedules.padded import padded_bytes
from .training.rotation import require_whole
from .transport.base import CollectiveTransport, Transport, peer_errors
from .transport.comparison import RankComparison

_MOST_SIGNATURES = 1000  # decisions kept in memory
_ROLES = (*get_args(Role), None)
_NO_VERSION = -1  # stands for a version that this rank does not have


# ------------------------------------------------------------------ 1. decide


class _Decision(NamedTuple):
    """What all calls of one signature have in common. To find it out takes longer than small calls travel.

    Attributes:
        config: their settings, before policies.
        bypass: why they go plain; None: it depends on their parts.
        described: what ranks compare of each of them, see `signature_described`.
    """

    config: Config
    bypass: Bypass | None
    described: Mapping[str, int]


def decide(group: Group, call: Call) -> None:
    """Set `call.config`, `call.bypass` and `call.described`. Asks no other rank, and all ranks decide alike.

    Raises UnsupportedError for tensors that can't be served, where a call's parts are treated differently, where GPUs
    lack the coder, and where error feedback would not know a parameter by name; ValueError for an unknown role.
    """
    require_kernels(call.input.device)
    call.copy_strided()
    call.config, call.bypass, call.described = _decision(group, call)
    if call.bypass:
        return

    # Policies and warm-up look at the parameters that the tensor consists of.
    alike = group.training.grouped(call.parts, call.input.dtype, call.role, group.key)
    if len(alike) > 1:
        raise UnsupportedError(
            f"parts of one tensor are treated differently, by {' and '.join(how.because for how, _ in alike)}: "
            "pass them in calls of their own, see Training.grouped"
        )
    treatment, _ = alike[0]
    if call.baseline is not None:
        treatment = treatment.without_loss()
    call.config, call.checksum, call.least_of_pieces = group.settings_with(treatment.quantizer)
    call.bypass = treatment.bypass or by_rate(call.input.dtype, call.config)
    if call.bypass:
        return

    # At a fixed rate there is no coder.
    quantizer = call.config.quantizer
    is_coded_on_gpu = group.on_gpu and quantizer.bits is None
    if is_coded_on_gpu and call.config.entropy.coder == "rans":
        raise UnsupportedError("entropy.coder: rans is for CPU tensors alone: set auto or huffman for CUDA tensors")
    if is_coded_on_gpu and group.config.transport.schedule == "halving" and call.pieces is None:
        raise UnsupportedError(
            f"{call.collective}: transport.schedule: halving moves tensors in host memory only, and this one is on a "
            "GPU; set transport.schedule to auto, direct or ring"
        )

    if call.op is None:
        return
    if quantizer.feeds_back and all(part.name is None for part in call.fed_back_parts):
        raise UnsupportedError(
            "quantizer.error_feedback is on and needs a name for each tensor, by which residuals are kept: pass "
            "name=, names= or parts=, or set quantizer.error_feedback to false"
        )
    if quantizer.rotates:
        require_whole(call.collective, call.parts, call.input.dtype)


def _decision(group: Group, call: Call) -> _Decision:
    """The decision for all calls like this one. Raises UnsupportedError for dtypes that can't be served."""
    key = call.signature
    found = group.decisions.get(key)
    if found is not None:
        return found
    if call.role not in _ROLES:
        known = ", ".join(map(repr, _ROLES[:-1]))
        raise ValueError(f"{call.collective}: role must be one of {known}, or None, got {call.role!r}")
    config = group.config
    bypass = before_call(config, group.world_size, call.role, call.op, (call.input.dtype, call.output.dtype))
    if bypass:
        require_plain(call)
    else:  # ranks that exchange pieces know of the largest later
        nbytes = call.larger.nbytes if call.has_equal_sizes else math.inf
        # Gloo broadcasts along a tree, and sends pieces straight to their ranks. Its other collectives are rings.
        around_ring = call.collective != "broadcast" and call.pieces is None
        bypass = by_size(nbytes, config, group.on_gpu, group.world_size, around_ring)
    if len(group.decisions) >= _MOST_SIGNATURES:
        group.decisions.clear()
    found = group.decisions[key] = _Decision(config, bypass, signature_described(call))
    return found


def enter(group: Group, call: Call) -> None:
    """Give a decided call its place in the order of calls, and a compressed one its plan.

    All ranks must enter the same calls in the same order.
    """
    state, order = group.state, group.order
    exact = call.bypass is not None or call.config.quantizer.kind == "lossless"
    if exact:  # so that weights that are sent exactly leave the random numbers of gradients as they are
        order.exact_calls += 1
    else:
        state.calls += 1
    call.described = numbered(
        call.described,
        call,
        state.calls + order.exact_calls,
        call.bypass,
        call.checksum if call.bypass is None else 0,
        order.uncompared,
        group.training.compared_step,
    )
    call.number = state.calls
    if call.bypass is None and (call.has_equal_sizes or group.on_gpu):  # for others see `_exchanging_codec`
        call.plan = plan(group, call)


# ------------------------------------------------------------------ 2 to 5: a compressed call


def run(group: Group, call: Call, device: Device, transport: Transport) -> None:
    """Run a compressed call to its end on this rank.

    Args:
        device: where the tensors of `call` live.

    Raises MismatchError on every rank if the ranks make different calls, PeerError, FrameError.
    """
    started = time.perf_counter()
    counters = call.counters = call.new_counters(transport.world_size)
    try:
        with call.pieces_in_place():
            if device.in_batches and call.pieces is None:  # pieces have other lengths on each rank, and no forecast
                call.forecast = transport.forecasts.of(_forecast_key(call))
                call.recorded = _recorded(call, device, transport)
            contribution = call.plan.source.data.clone() if call.is_verified else None
            if call.rotates:  # what is added up is not yet what the caller asked for
                call.plan = replace(call.plan, output=call.plan.rotation.memory(call.plan.source))

            # 2. Compare calls, and agree on quantization steps.
            with span("agree", call.input.nbytes, counters):
                codec = _agree(group, call, device, transport)

            # 3. and 4. Exchange frames, and dequantize.
            bypass = codec if isinstance(codec, Bypass) else _exchange(call, codec, device, transport)

            # The values are such that compression can't serve: the uncompressed collective, on all ranks alike.
            if bypass is not None:
                _go_plain(call, bypass, device, transport)

            # 5. Count. The transport learns what the link carries; the guard verifies a sum if it is due.
            counters.seconds = time.perf_counter() - started
            if bypass is None:
                counters.compressed_calls = 1
                transport.learn(counters.wire_bytes, counters.seconds, counters.wait_seconds)
            group.count(counters, call.role)
            if contribution is not None and bypass is None:
                _verify(group, call, contribution, device, transport)
    except BaseException:  # jobs may still write to memory that the caller gives to something else
        device.abandon(call.memory)
        raise
    if call.joined:
        device.synchronize()  # with the copies back to the caller's tensors


def _exchange(call: Call, codec: Codec, device: Device, transport: Transport) -> Bypass | None:
    """Move the frames of a call, and dequantize.

    Returns None, or the reason why the call must go plain; then the output is as it was.
    """
    counters, feedback = call.counters, call.plan.feedback
    call.plan.schedule(transport, codec, counters)
    codec.finish()
    if call.baseline is not None and len(call.plan.measured):
        call.baseline.keep(call.plan.source.data)
        device.synchronize()  # the caller changes it on another stream
    if codec.bypass:
        counters.coders.clear()  # frames that were for nothing
    elif feedback:
        with span("encode", call.input.nbytes, counters):
            lost = codec.remainder(call.plan.measured)
            if call.plan.rotation:
                call.plan.rotation.back(lost.data, lost.data)
            feedback.keep(lost, call.config.quantizer.bits is None)
            device.synchronize()  # a checkpoint reads it on another stream
    if call.plan.rotation and not codec.bypass:
        _turn_back(call, device, transport)
    return codec.bypass


def _turn_back(call: Call, device: Device, transport: Transport) -> None:
    """Put the sum of matrices into the caller's memory, and give all ranks the bases that are due after it."""
    rotation, total, counters = call.plan.rotation, call.plan.output.data, call.counters
    with span("decode", call.input.nbytes, counters):
        rotation.back(total, total)
        call.output.detach().view(-1).copy_(total)
        rotation.follow(total)
        message = rotation.new_bases(total.device)
    if message is not None:
        with span("wait", message.nbytes, counters), peer_errors("new bases of matrices"):
            transport.plain.all_reduce(message).wait()
        counters.wire_bytes += plain_wire_bytes(call.collective, message.nbytes, transport.world_size)
        rotation.take(message)
    device.synchronize()


def _go_plain(call: Call, bypass: Bypass, device: Device, transport: Transport) -> None:
    """Run the uncompressed collective for a call that was to be compressed, unless its pieces have arrived already."""
    counters = call.counters
    sent = counters.plain_bytes
    if not call.has_arrived:
        sent = call.new_counters(transport.world_size).plain_bytes  # not only to other nodes
        with span("plain", call.input.nbytes, counters):
            with peer_errors("the plain collective"), memory_errors(call.collective):
                _move_plain(call, transport)
            device.synchronize()
        counters.wire_bytes += sent
    reason = bypass.value
    counters.bypasses[reason], counters.bypassed_bytes[reason] = 1, sent


def _verify(group: Group, call: Call, contribution: Tensor, device: Device, transport: Transport) -> None:
    """Let the guard compare the result with the uncompressed sum of the ranks' contributions."""
    exact = contribution.to(torch.promote_types(contribution.dtype, torch.float32))
    with peer_errors("the uncompressed sum that verifies a compressed one"):
        transport.plain.all_reduce(exact, dist.ReduceOp.SUM).wait()
    device.synchronize()
    exact /= call.plan.divisor
    result, whole = call.output.detach().view(-1), call.collective == "all_reduce"
    if not whole:  # this rank's part, which a call through nodes has elsewhere in its layout
        exact = exact[group.rank * result.numel() :][: result.numel()]
    group.state.guard.verify(call.plan.verify_as or None, result, exact, whole, transport)


def queue(group: Group, call: Call, backend: Backend, transport: CollectiveTransport) -> None:
    """Queue a call at a fixed rate on the current stream of a GPU, and count it. No host waits, here or elsewhere.

    Nothing is compared either: the next call that is compared tells whether ranks differed.
    """
    started = time.perf_counter()
    counters = call.counters = call.new_counters(transport.world_size)
    with call.pieces_in_place():
        codec = _fixed_rate_codec(call, backend, transport)
        call.plan.schedule(transport, codec, counters)
        if call.plan.feedback:
            call.plan.feedback.keep(codec.remainder(call.plan.measured), call.config.quantizer.bits is None)
    counters.compressed_calls = 1
    counters.seconds = time.perf_counter() - started
    group.count(counters, call.role)


# ------------------------------------------------------------------ 2. compare and agree


def tell(calls: CallQueue, group: Group, collective: str, numbers: Mapping[str, int]) -> None:
    """Compare numbers with the other ranks after all earlier calls, without waiting for them here."""

    def compare(device: Device, transport: Transport) -> None:
        require_same_call(collective, numbers, transport, group.ranks)

    calls.submit(collective, HOST, compare)


def _agree(group: Group, call: Call, device: Device, transport: Transport) -> Codec | Bypass:
    """The codec that all ranks use, or the reason why they all go plain."""
    if call.pieces is not None:
        return _exchanging_codec(group, call, device, transport)
    made, quantizer, ranks = call.plan, call.config.quantizer, group.ranks
    source, measured = made.source, None
    has_steps = quantizer.kind != "lossless" and quantizer.bits is None
    measures_at_once = has_steps and made.within_node is None

    # Few measurements travel with the comparison, which saves a round trip. More of them wait for it: if ranks pass
    # different sizes, their measurements have different lengths. This rank measures while the comparison travels.
    most = transport.most_with_comparison
    nbytes = measured_bytes(made.layout, quantizer, call.input.dtype) if measures_at_once and most else 0
    together = 0 < nbytes <= most
    if together:
        source, measured = _measured(call, source, device)
    described = call.described
    if made.rotation:
        described = {**described, "bases of matrices": made.rotation.checksum()}
    comparison = RankComparison(described, transport.rank, transport.world_size)
    same_call = transport.start_comparison(comparison, call.counters, measured)
    if measures_at_once and not together:
        source, measured = _measured(call, source, device)
    same_call.wait()
    require_same(call.collective, comparison, ranks)

    # From here on all ranks make the same call. Those that send changes, or at a fixed rate, agree on no steps.
    if call.baseline is not None:
        return _updating_codec(call, device, transport)
    if quantizer.bits is not None:
        return replace(_fixed_rate_codec(call, device.backend, transport), synchronize=device.synchronize)

    # The ranks of a node add up before they measure.
    if made.within_node is not None:
        source = made.within_node(transport, call.counters)
        device.synchronize()  # within the time-out: measuring waits without a limit
        if has_steps:
            source, measured = _measured(call, source, device)
    if not has_steps:
        return _codec(call, source, None, device, transport)

    # Quantization steps follow from the largest of what the ranks have measured.
    if not together:
        transport.agree_on_largest(measured, call.counters, call.recorded)
    return _quantizing_codec(call, source, measured, device, transport)


def _exchanging_codec(group: Group, call: Call, device: Device, transport: Transport) -> Codec | Bypass:
    """The codec of ranks that exchange pieces, or the reason why they all go plain. They agree on sizes alone."""
    # Where sizes differ, the rank that sends or gets most decides for all. A rank knows its own pieces first, and takes
    # all to be as large as its largest. If that is small, its pieces travel at once, and nothing is planned before.
    least, most, codec = 0, -1, None
    if not call.has_equal_sizes:
        least = call.least_of_pieces
        most = min((least - 1) // transport.world_size, most_at_once(transport.world_size))
    if call.largest_piece > most:
        codec = _codec_of_pieces(group, call, device, transport)
    told = tell_pieces(call, transport, group.ranks, most, codec)
    if not call.has_equal_sizes and (bypass := below(least, told.most)):
        return bypass
    codec = codec or _codec_of_pieces(group, call, device, transport)
    if isinstance(codec, PiecesCodec) and codec.quantizes and not told.measured:
        exchange_heads(transport, codec, call.counters)
    return codec


def _codec_of_pieces(group: Group, call: Call, device: Device, transport: Transport) -> ExchangingCodec:
    """The codec of ranks that exchange pieces, if they compress them."""
    if call.plan is None:
        call.plan = plan(group, call)
    made, config = call.plan, call.config
    if config.quantizer.bits is not None:
        return replace(_fixed_rate_codec(call, device.backend, transport), synchronize=device.synchronize)
    tensors = CodedTensor(made.layout, made.source), CodedTensor(made.pieces, output=made.output)
    noise = noise_for(config, made.number, transport.rank, transport.world_size)
    given = transport.rank, config, device, *tensors, call.counters, transport.link_gbps, transport.carried_gbps, noise
    if device.in_batches:
        return GpuPiecesCodec(*given)
    return PiecesCodec(*given)


def _measured(call: Call, source: Window, device: Device) -> tuple[Window, Tensor]:
    """The values to quantize, with what error feedback adds, and what this rank measured of them."""
    with span("measure", source.data.nbytes, call.counters):
        if call.plan.feedback:
            source = call.plan.feedback.added_to(source)
        if call.plan.rotation:
            source = call.plan.rotation.into(source)
        if not device.in_batches:
            return source, measure(*_to_measure(call, source, device))
        return source, call.recorded.queue("measure", lambda: measure_on_gpu(*_to_measure(call, source, device)))


def _to_measure(call: Call, source: Window, device: Device) -> tuple:
    """Arguments of `measure` and `measure_on_gpu`."""
    made, quantizer = call.plan, call.config.quantizer
    most = most_summable(quantizer, made.output.data.dtype, made.addends, made.divisor)
    return device.backend, source, made.layout, made.measured, quantizer, most


def _recorded(call: Call, device: Device, transport: Transport) -> RecordedCall:
    """The launches of a call on a GPU that were recorded, or are to be: see runtime/recorded.py.

    Only calls of which the host knows all sizes beforehand, and that are small enough for the host's time to matter.
    """
    made, lengths = call.plan, call.forecast.sizes
    if device.recorded is None or lengths is None or made.layout.numel > BATCH_ELEMENTS:
        return NEVER
    if made.within_node or made.feedback or made.rotation:
        return NEVER
    report = device.backend.report(made.source.data.device)  # where kernels of this thread report damage
    addresses = made.source.data.data_ptr(), made.output.data.data_ptr(), report.data_ptr()
    key = call.collective, call.input.dtype, call.output.dtype, made.layout, made.divisor, addresses
    given = list(map(padded_bytes, lengths)), call.config, transport.link_gbps, transport.carried_gbps
    return device.recorded.of(key, given, call.counters)


def _quantizing_codec(
    call: Call, source: Window, agreed: Tensor, device: Device, transport: Transport
) -> Codec | Bypass:
    """The codec for the quantization steps that follow from what the ranks agreed on, or the reason to go plain.

    On a GPU the host does not wait for the steps, and learns the reason later: see `Outcome`.
    """
    made, quantizer, dtype = call.plan, call.config.quantizer, source.data.dtype
    if call.feeds_back:  # also on a rank that codes nothing: all must choose alike
        dtype = torch.promote_types(dtype, torch.float32)
    # Error feedback adds to 16-bit values in float32, and results have 16 bits.
    rule, final = (quantizer, dtype, made.addends, made.divisor), made.output.data.dtype
    if not device.in_batches:
        found = scales_or_bypass(agreed, made.layout, *rule, device.backend, final)
        return found if isinstance(found, Bypass) else _codec(call, source, found, device, transport)
    given = device.backend, agreed, made.layout, quantizer
    scales, on_device = call.recorded.queue("derive", lambda: derive_on_gpu(*given, step_rule(*rule, final)))
    outcome = Outcome(on_device, lambda seen: by_scales(derived_on_gpu(scales, seen, made.layout.steps), dtype))
    return _codec(call, source, scales, device, transport, outcome)


def _codec(
    call: Call,
    source: Window,
    scales: Scales | None,
    device: Device,
    transport: Transport,
    outcome: Outcome | None = None,
) -> Codec:
    """The codec of a call, with its random numbers and what is known of the link."""
    made = call.plan
    return codec_for(
        call.config,
        device,
        CodedTensor(made.layout, source, made.output),
        scales,
        counters=call.counters,
        link_gbps=transport.link_gbps,
        carried_gbps=transport.carried_gbps,
        noise=noise_for(call.config, made.number, made.addend, made.addends),
        divisor=made.divisor,
        forecast=call.forecast,
        outcome=outcome,
        recorded=call.recorded,
    )


def _forecast_key(call: Call) -> Hashable:
    """What calls must have in common for their frames to be expected to have the same lengths."""
    made, quantizer = call.plan, call.config.quantizer
    bound = quantizer.kind_in_effect, quantizer.mode, quantizer.value
    return call.collective, made.layout.lengths, call.input.dtype, call.root, made.divisor, bound


def _fixed_rate_codec(call: Call, backend: Backend, transport: CollectiveTransport) -> FixedRateCodec | FixedRatePieces:
    """The codec of a call that needs no agreement. Waits for no GPU."""
    made = call.plan
    if made.pieces is not None:
        return FixedRatePieces(
            backend,
            CodedTensor(made.layout, made.source),
            CodedTensor(made.pieces, output=made.output),
            transport.rank,
            call.config.quantizer.bits,
            call.counters,
            noise_for(call.config, made.number, transport.rank, transport.world_size),
        )
    source = made.source if made.within_node is None else made.within_node(transport, call.counters)
    if made.feedback:
        source = made.feedback.added_to(source)
    noise = noise_for(call.config, made.number, made.addend, made.addends)
    tensor = CodedTensor(made.layout, source, made.output)
    return FixedRateCodec(backend, tensor, call.config.quantizer.bits, call.counters, noise, made.divisor)


def _versions(call: Call, backend: Backend) -> dict[str, int]:
    """The version of each segment that this rank holds: a checksum, or _NO_VERSION."""
    made, versions = call.plan, {}
    for segment in range(len(made.layout.lengths)):
        elements = made.layout.segment(segment)
        is_own = segment in made.measured
        version = call.baseline.sent(made.source[elements]) if is_own else made.output[elements]
        versions[str(segment)] = _NO_VERSION if version is None else backend.digest(version)
    return versions


def _updating_codec(call: Call, device: Device, transport: Transport) -> LosslessCodec:
    """The codec of a call that sends changes. Segments of which ranks hold different versions are sent whole."""
    made = call.plan
    comparison = RankComparison(_versions(call, device.backend), transport.rank, transport.world_size)
    transport.start_max(comparison.tensor, call.counters).wait()
    differing = comparison.differing()
    for ends in differing.values():
        reason = "first call" if ends.lowest == _NO_VERSION else "changed in between"
        call.counters.sent_whole[reason] = 1
    sent = call.baseline.sent(made.source.data)
    return LosslessCodec(
        device,
        CodedTensor(made.layout, made.source, made.output),
        coding_for(call.config, device.backend, transport.link_gbps, transport.carried_gbps),
        call.config.entropy.checksum,
        call.counters,
        base=made.source if sent is None else replace(made.source, data=sent),
        own=made.measured,
        whole=frozenset(map(int, differing)),
    )


# ------------------------------------------------------------------ the way of a plain call


def run_plain(group: Group, call: Call, device: Device, transport: Transport) -> None:
    """Run a plain call to its end on this rank, and count it.

    Raises MismatchError on every rank if the ranks make different calls, and PeerError.
    """
    with call.pieces_in_place():
        small = transport.small
        decisive = call.input if call.pieces is None else call.larger
        if small is not None and small.serve(call.collective, decisive, call.op):
            # What is compared travels in the same messages as the values.
            comparison = RankComparison(call.described, transport.rank, transport.world_size)
            given = (call.collective, call.input, call.output, call.op, call.root)
            check = partial(require_same, call.collective, comparison, group.ranks)
            under_way = small.start(*given, comparison, check)
            count_plain(group, call)  # while the values travel
            under_way.wait()
        else:
            if call.pieces is None:
                require_same_call(call.collective, call.described, transport, group.ranks)
            else:  # gloo would end the process of a rank that gets more than it expects
                tell_pieces(call, transport, group.ranks, most_at_once(transport.world_size))
            with peer_errors(f"the plain {call.collective}"):
                _move_plain(call, transport)
            device.synchronize()
            count_plain(group, call)
    if call.joined:
        device.synchronize()


def _move_plain(call: Call, transport: Transport) -> None:
    """Run the uncompressed collective to its end. Ranks have compared their calls, and pieces may have arrived then."""
    if call.pieces is None or transport.exchanges is None:
        call.start_plain(transport.plain if call.plain is None else call.plain).wait()
        return
    if not call.has_arrived:
        transport.exchanges.send(*memory_of_pieces(call))


def count_plain(group: Group, call: Call) -> None:
    """Count a plain call. A baseline's version of its output holds no more."""
    if call.baseline is not None:
        call.baseline.forget()
    call.counters = call.plain_counters(group.world_size)
    group.count(call.counters, call.role)
