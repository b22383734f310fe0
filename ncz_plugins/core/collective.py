"""One compressed collective from beginning to end: agree, then exchange frames, or go plain."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from ..kernels.format import DTYPES
from .codec.layout import Layout, Window
from .codec.quantize import Bypass, Scales, derive, measure
from .codec.scale_agreement import ScaleAgreement, pieces_of
from .codec.tensor_codec import TensorCodec, codec_for
from .config import Config
from .errors import MismatchError
from .runtime.device import Device
from .runtime.statistics import Counters
from .runtime.trace import span
from .training.error_feedback import Feedback
from .transport.handshake import RankComparison

# Bytes that a bandwidth-optimal collective makes each rank send, on average, for `nbytes` of input.
_PLAIN_BYTES = {
    "all_reduce": lambda nbytes, n: 2 * nbytes * (n - 1) // n,
    "reduce_scatter_tensor": lambda nbytes, n: nbytes * (n - 1) // n,
    "all_gather_into_tensor": lambda nbytes, n: nbytes * (n - 1),
    "broadcast": lambda nbytes, n: nbytes * (n - 1) // n,
}


@dataclass(frozen=True)
class Call:
    """One collective, ready to run.

    Attributes:
        collective: its name in torch.distributed, one of `_PLAIN_BYTES`.
        layout: how the whole tensor is cut, of which `source` and `output` hold parts.
        source: what this rank contributes.
        output: where the result goes; may be the memory of `source`.
        measured: segments of `source` that count in the agreement on steps.
        schedule: takes the transport, the codec and the counters.
        plain: the uncompressed collective, for when it turns out that compression can't serve.
        inside: what the ranks of a node do among themselves before all others, once it is sure that all ranks make the
            same call: takes the transport and the counters, and returns what is contributed in place of `source`.
        addends: ranks whose values are summed.
        divisor: what the sum is divided by.
        root: rank that a broadcast starts from.
        feedback: adds what quantizing has lost before, and keeps what it loses now; None where that is not wanted.
        plain_sum: replaces a tensor by its uncompressed sum over ranks, to verify a compressed one; only sums have it.
        in_pieces: whether frames may travel before all is measured, and be for nothing if then it has to go plain.
        draw: what a stochastic quantizer's random numbers are drawn by, this rank's own; None for the call's number.
    """

    collective: str
    layout: Layout
    source: Window
    output: Window
    measured: range
    schedule: Callable
    plain: Callable[[], None]
    inside: Callable[..., Window] | None = None
    addends: int = 1
    divisor: float = 1
    root: int = 0
    feedback: Feedback | None = None
    plain_sum: Callable[[Tensor], None] | None = None
    in_pieces: bool = True
    draw: int | None = None

    def described(self, number: int, config: Config) -> dict[str, int]:
        """What all ranks must have in common."""
        return {
            "number of the call": number,
            "collective": list(_PLAIN_BYTES).index(self.collective),
            "elements": self.layout.numel,
            "dtype": DTYPES.index(self.source.data.dtype),
            "checksum of the divisor": zlib.crc32(repr(float(self.divisor)).encode()),
            "source rank": self.root,
            "checksum of the configuration": checksum_of(config),
        }


class BypassBackoff:
    """Which calls go plain without being measured, as those of their kind turned out to be hopeless.

    After such a call the next one of its kind goes plain, then the next 2, 4, ... 64, until one is compressed. All
    ranks make the same calls and learn the same of them, so they decide alike.
    """

    _HOPELESS = (Bypass.NOT_WORTH, Bypass.CODE_OVERFLOW)
    _LONGEST = 64

    def __init__(self):
        self._kinds: dict[str, _Hopeless] = {}

    def lost(self, call: Call, config: Config) -> Bypass | None:
        """The reason why this call is to go plain at once, if there is one."""
        hopeless = self._kinds.get(_kind(call, config))
        if hopeless is None or not hopeless.left:
            return None
        hopeless.left -= 1
        return hopeless.reason

    def learn(self, call: Call, config: Config, bypass: Bypass | None) -> None:
        """What became of a call that was measured: it was compressed, or went plain for this reason."""
        if bypass in self._HOPELESS:
            hopeless = self._kinds.setdefault(_kind(call, config), _Hopeless())
            hopeless.reason = bypass
            hopeless.length = hopeless.left = min(2 * hopeless.length or 1, self._LONGEST)
        else:
            self._kinds.pop(_kind(call, config), None)

    def state_dict(self) -> dict[str, list]:
        """Numbers and strings, for a checkpoint."""
        return {kind: [each.reason.value, each.left, each.length] for kind, each in self._kinds.items()}

    def load_state_dict(self, state: dict[str, list]) -> None:
        """Take over what `state_dict` gave."""
        self._kinds = {kind: _Hopeless(Bypass(reason), *numbers) for kind, (reason, *numbers) in state.items()}


@dataclass
class _Hopeless:
    """Calls of one kind: why they go plain, how many more will without being measured, and out of how many."""

    reason: Bypass | None = None
    left: int = 0
    length: int = 0


def _kind(call: Call, config: Config) -> str:
    """What calls must have in common to be expected to go alike."""
    bound = f"{config.quantizer.kind} {config.quantizer.mode} {config.quantizer.value}"
    return f"{call.collective} {call.layout.lengths} {call.source.data.dtype} {call.root} {call.divisor} {bound}"


@lru_cache
def checksum_of(config: Config) -> int:
    """A number by which ranks tell whether their configurations differ; found once for each, as calls are many."""
    return zlib.crc32(config.canonical().encode())


def run(
    call: Call, number: int, transport, device: Device, config: Config, patience: BypassBackoff | None = None
) -> Counters:
    """Run `call` to its end on this rank.

    Args:
        number: how many calls this rank has made, this one included.
        transport: a `Transport`, or what offers the same over another runtime.
        device: where the tensors of `call` live.
        patience: what all calls on this transport share; None to measure every one.

    Raises MismatchError on every rank if the ranks make different calls, PeerError, FrameError.
    """
    input = call.source.data
    plain_bytes = plain_wire_bytes(call.collective, input.nbytes, transport.world_size)
    counters = Counters(calls=1, bytes_in=input.nbytes, plain_bytes=plain_bytes)
    started = time.perf_counter()
    bypass = patience.lost(call, config) if patience else None
    if bypass is None:
        bypass = _compressed(call, number, transport, device, config, counters)
        if patience:
            patience.learn(call, config, bypass)
    if bypass is None:
        counters.compressed_calls = 1
    else:
        with span("plain", input.nbytes, counters):
            call.plain()
            device.synchronize()
        counters.wire_bytes += plain_bytes
        counters.bypasses[bypass.value] = 1
        counters.bypassed_bytes[bypass.value] = plain_bytes
    counters.seconds = time.perf_counter() - started
    return counters


def frame_elements(tensor: Tensor, config: Config) -> int:
    """Elements of a full frame of `tensor`."""
    return config.transport.frame_bytes // tensor.element_size()


def layout_of_sum(tensor: Tensor, world_size: int, config: Config) -> Layout:
    """How a tensor that is summed over ranks is cut."""
    block = config.quantizer.block_in_effect
    return Layout.split(tensor.numel(), world_size, frame_elements(tensor, config), block)


def bypassed(collective: str, input: Tensor, reason: Bypass, world_size: int) -> Counters:
    """The counters of a call that goes plain without asking the other ranks."""
    sent = plain_wire_bytes(collective, input.nbytes, world_size)
    because = {"bypasses": {reason.value: 1}, "bypassed_bytes": {reason.value: sent}}
    return Counters(calls=1, bytes_in=input.nbytes, plain_bytes=sent, wire_bytes=sent, **because)


def plain_wire_bytes(collective: str, nbytes: int, world_size: int) -> int:
    """What each rank sends, on average, when the collective runs plain on `nbytes` of input."""
    return _PLAIN_BYTES[collective](nbytes, world_size)


def _compressed(
    call: Call, number: int, transport, device: Device, config: Config, counters: Counters
) -> Bypass | None:
    """Run `call` to its end; or leave its output as it is and return the reason why it has to go plain."""
    input = call.source.data
    with span("agree", input.nbytes, counters):
        codec = _agree(call, number, transport, device, config, counters)
    if isinstance(codec, Bypass):
        return codec
    try:
        call.schedule(transport, codec, counters)
    except BaseException:
        device.abandon()
        raise
    codec.finish()
    if codec.bypass:
        counters.coders.clear()  # of frames that were for nothing
    elif call.feedback:
        with span("encode", input.nbytes, counters):
            call.feedback.keep(codec.remainder(call.measured))
            device.synchronize()  # who saves it with a checkpoint reads it on another stream
    return codec.bypass


def _agree(
    call: Call, number: int, transport, device: Device, config: Config, counters: Counters
) -> TensorCodec | Bypass:
    """The codec that all ranks use, or the reason why they all go plain."""
    # Whether all ranks make the same call is asked first: the vector after it has a length that
    # depends on the call. The answer travels while the tensor is being measured.
    described = call.described(number, config)
    comparison = RankComparison(described)
    same_call = transport.start_max(comparison.tensor, counters)
    source = call.source
    if call.inside is None:
        source, steps = _prepared(call, source, transport, device, config, counters)
    same_call.wait()
    for what, (low, high) in comparison.differing().items():
        raise MismatchError(
            f"{call.collective}: ranks differ in {what}: {described[what]} on rank {transport.rank}, "
            f"from {low} to {high} over all ranks. Every rank must make the same calls in the same order."
        )
    if call.inside is not None:
        source = call.inside(transport, counters)
        device.synchronize()  # within the time-out: measuring waits without a limit
        source, steps = _prepared(call, source, transport, device, config, counters)
    scales = None
    if steps is not None:
        steps.require(1)
        if steps.bypass:
            return steps.bypass
        scales = steps.scales.to(call.source.data.device)
    return codec_for(
        config,
        device,
        call.layout,
        scales,
        source,
        call.output,
        counters,
        draw=number if call.draw is None else call.draw,
        rank=transport.rank,
        link_gbps=transport.link_gbps,
        divisor=call.divisor,
        steps=steps,
    )


def _prepared(
    call: Call, source: Window, transport, device: Device, config: Config, counters: Counters
) -> tuple[Window, ScaleAgreement | None]:
    """What is quantized, and its steps, which the ranks are still to agree on; None where none are needed."""
    if call.feedback:
        with span("measure", source.data.nbytes, counters):
            source = call.feedback.added_to(source)
    layout, quantizer = call.layout, config.quantizer
    if quantizer.kind == "lossless":
        return source, None

    def measured(frames: range) -> Tensor:
        with span("measure", source.data.nbytes * len(frames) // layout.frames, counters):
            return measure(device.backend, source, layout, call.measured, quantizer, frames)

    def agree(measured: Tensor) -> Callable[[], None]:
        return transport.start_max(measured, counters).wait

    def derived(agreed: Tensor, layout: Layout) -> Scales | Bypass:
        return derive(agreed, layout, quantizer, source.data.dtype, call.addends, call.divisor)

    # A GPU measures in no time, and would have to be waited for.
    in_pieces = call.in_pieces and source.data.device.type == "cpu"
    pieces = pieces_of(layout, config) if in_pieces else [range(layout.frames)]
    return source, ScaleAgreement(layout, pieces, quantizer.block_in_effect, measured, agree, derived)
