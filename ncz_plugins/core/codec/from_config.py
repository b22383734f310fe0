"""The codec that a configuration asks for: coder, predictor, costs and random numbers."""

from __future__ import annotations

from functools import lru_cache

from ...kernels.backend import Backend
from ...kernels.format import Coder, Coding, Noise, Predictor, SelectorCosts
from ..config import CoderCosts, Config
from ..runtime.device import Device
from ..runtime.forecast import Forecast
from ..runtime.recorded import NEVER, RecordedCall
from ..runtime.statistics import Counters
from .coded_tensor import CodedTensor
from .gpu_codec import GpuCodec, Outcome
from .quantize import Scales
from .tensor_codec import LosslessCodec, QuantizingCodec, TensorCodec


def codec_for(
    config: Config,
    device: Device,
    tensor: CodedTensor,
    scales: Scales | None,
    *,
    counters: Counters | None = None,
    link_gbps: float | None = None,
    carried_gbps: float = 0.0,
    noise: Noise | None = None,
    divisor: float = 1,
    forecast: Forecast | None = None,
    outcome: Outcome | None = None,
    recorded: RecordedCall = NEVER,
) -> TensorCodec:
    """The codec that `config` asks for.

    Args:
        scales: the quantization steps, already divided by `divisor`; None: nothing is quantized.
        counters: see TensorCodec; None: nobody reads them.
        link_gbps, carried_gbps: see `coding_for`.
        noise: random numbers of a stochastic quantizer, see `noise_for`; None: those of call 0, unshifted.
        divisor: see LosslessCodec.
        forecast, outcome, recorded: see GpuCodec.
    """
    counters = Counters() if counters is None else counters
    coding = coding_for(config, device.backend, link_gbps, carried_gbps)
    given = device, tensor, coding, config.entropy.checksum, counters
    if scales is None:
        return LosslessCodec(*given, divisor)
    noise = noise_for(config, call=0, addend=0, addends=1) if noise is None else noise
    if device.in_batches:
        return GpuCodec(*given, scales, noise, outcome, forecast, recorded)
    return QuantizingCodec(*given, scales, noise)


def coding_for(config: Config, backend: Backend, link_gbps: float | None = None, carried_gbps: float = 0.0) -> Coding:
    """The coder, predictor and costs that `config` asks for.

    Args:
        link_gbps: the speed of the link in Gbit/s, used if `config` states none; None: unknown, 1 Gbit/s is assumed.
        carried_gbps: what calls have shown the link to carry, in Gbit/s, used if it is more; see `Transport.learn`.
    """
    gbps = max(config.transport.link_gbps or link_gbps or 1, carried_gbps)
    entropy = config.entropy
    configured = None if backend.name == "cuda" else entropy.costs
    return _coding_at(gbps, entropy.coder, entropy.predictor, configured, backend.costs)


@lru_cache(maxsize=64)  # of parts of a configuration, as to hash a section takes longer than to look it up
def _coding_at(gbps: float, coder: str, predictor: str, configured: CoderCosts | None, costs: SelectorCosts) -> Coding:
    costs = costs._replace(link=max(1, round(8000 / gbps)))  # picoseconds for a byte
    if configured is not None:
        costs = costs._replace(**configured.model_dump())
    return Coding(Coder[coder.upper()], Predictor[predictor.upper()], costs)


def noise_for(config: Config, call: int, addend: int, addends: int) -> Noise | None:
    """Random numbers by which a stochastic quantizer rounds, different in each call. None for other quantizers.

    Ranks whose codes are added use the same numbers, shifted by equal parts of their range (stratified sampling). Where
    one rank rounds up another one rounds down, so errors of similar values cancel in the sum.

    Args:
        call: number of the call.
        addend: number of this rank's values among the `addends` that are summed, from 0.
    """
    if config.quantizer.kind_in_effect != "stochastic":
        return None
    return Noise(config.quantizer.seed, call % 2**32, (addend << 32) // addends % 2**32)
