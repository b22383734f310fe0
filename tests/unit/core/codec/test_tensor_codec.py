"""What the codecs are told: coders, prices, checksums."""

from types import SimpleNamespace

import pytest
import torch

from ncz_plugins import kernels
from ncz_plugins.core.codec.coded_tensor import CodedTensor
from ncz_plugins.core.codec.from_config import codec_for, coding_for
from ncz_plugins.core.codec.gpu_codec import GpuCodec, Outcome
from ncz_plugins.core.codec.layout import Layout, Window
from ncz_plugins.core.codec.quantize import Scales
from ncz_plugins.core.codec.tensor_codec import LosslessCodec, QuantizingCodec, TensorCodec
from ncz_plugins.core.config import Config
from ncz_plugins.core.errors import FrameError
from ncz_plugins.core.runtime.device import Host
from ncz_plugins.core.runtime.statistics import Counters
from ncz_plugins.kernels.format import CHUNK, Coder, Coding, Predictor, SelectorCosts, blocks_of

BACKEND = kernels.cpu_backend()


@pytest.mark.parametrize(
    "configured, known, picoseconds",
    [(None, None, 8000), (None, 10.0, 800), (100, 10.0, 80), (0.001, None, 8_000_000), (1e4, None, 1), (3, None, 2667)],
)
def test_a_byte_costs_what_the_link_says(configured, known, picoseconds):
    costs = coding_for(Config(transport={"link_gbps": configured}), BACKEND, known).costs
    assert costs == BACKEND.costs._replace(link=picoseconds)


def test_a_byte_costs_less_where_calls_tell_that_the_link_carries_more():
    for configured, carried, gbps in ((0.04, 2.0, 2.0), (None, 4.0, 4.0), (10, 2.0, 10)):
        costs = coding_for(Config(transport={"link_gbps": configured}), BACKEND, None, carried).costs
        assert costs.link == 8000 / gbps


def test_coding_costs_what_the_configuration_says_on_cpus_only():
    costs = {"raw": 1, "fixed": 2, "huffman": 3, "rans": 4, "rans_rest": 5}
    config = Config(entropy={"costs": costs})
    assert coding_for(config, BACKEND).costs._asdict() == costs | {"link": 8000}
    gpu = SimpleNamespace(name="cuda", costs=SelectorCosts(raw=7))
    assert coding_for(config, gpu).costs == gpu.costs


@pytest.mark.parametrize("coder", ["auto", "raw", "fixed", "huffman", "rans"])
@pytest.mark.parametrize("predictor", ["auto", "none", "delta"])
def test_coders_and_predictors_are_known_by_their_names(coder, predictor):
    how = coding_for(Config(entropy={"coder": coder, "predictor": predictor}), BACKEND)
    assert (how.coder.name.lower(), how.predictor.name.lower()) == (coder, predictor)
    assert how.coder in Coder and how.predictor in Predictor


# ---------------------------------------------------------------- checksums


def codec(lossless: bool, checksum: bool, numel: int = 20) -> TensorCodec:
    ones = torch.ones(blocks_of(numel))
    window, output = Window(torch.arange(float(numel))), Window(torch.full((numel,), -1.0))
    tensor = CodedTensor(Layout.of([numel], CHUNK), window, output)
    common = (Host(), tensor, Coding(), checksum, Counters())
    return LosslessCodec(*common) if lossless else QuantizingCodec(*common, Scales(ones, ones))


@pytest.mark.parametrize("lossless", [False, True])
def test_under_checksum_a_frame_without_one_is_refused(lossless):
    frame = codec(lossless, checksum=False).encode(0, 0)
    strict = codec(lossless, checksum=True)
    for use, given in ((strict.decode, frame), (strict.encode, [frame]), (strict.encode, [frame, frame])):
        with pytest.raises(FrameError, match="frame 0 of segment 0 .* no checksum"):
            use(0, 0, given)
    assert (strict.output.data == -1).all()
    codec(lossless, checksum=False).decode(0, 0, strict.encode(0, 0))  # more than was asked for


@pytest.mark.parametrize("lossless", [False, True])
def test_under_checksum_every_flipped_bit_is_found(lossless):
    frame = codec(lossless, checksum=True).encode(0, 0)
    reader = codec(lossless, checksum=True)
    for use, given in ((reader.decode, frame), (reader.encode, [frame])):
        for position in range(len(frame)):
            for bit in range(8):
                frame[position] ^= 1 << bit
                with pytest.raises(FrameError):
                    use(0, 0, given)
                frame[position] ^= 1 << bit
        use(0, 0, given)


@pytest.mark.parametrize("lossless", [False, True])
def test_sums_of_frames(lossless):
    one = codec(lossless, checksum=True)
    frame = one.encode(0, 0)
    for frames, factor in (([], 1), ([frame], 2), ([frame, frame], 3)):
        one.decode(0, 0, one.encode(0, 0, frames))
        assert torch.equal(one.output.data, factor * one.source.data)


# ---------------------------------------------------------------- what is told


@pytest.mark.parametrize("two_threads", [False, True])
@pytest.mark.parametrize("use", ["decode", "decode_sum", "encode"])
def test_a_damaged_frame_is_named(use, two_threads):
    layout = Layout((3 * CHUNK, 3 * CHUNK), CHUNK)
    window, ones = Window(torch.ones(layout.numel)), torch.ones(layout.steps)
    made = QuantizingCodec(
        Host(two_threads), CodedTensor(layout, window, window), Coding(), False, Counters(), Scales(ones, ones)
    )
    frame = made.encode(1, 2)
    frame[0] ^= 1
    with pytest.raises(FrameError, match="^frame 2 of segment 1 is damaged"):
        getattr(made, use)(1, 2, frame if use == "decode" else [frame])
        made.finish()


def test_coding_takes_time():
    one = codec(lossless=False, checksum=False, numel=100 * CHUNK)
    counters, frames = one.counters, []
    for step, kind in (
        (lambda: frames.append(one.encode(0, 0)), "encode_seconds"),
        (lambda: one.decode(0, 0, frames[0]), "decode_seconds"),
        (lambda: one.decode_sum(0, 0, frames), "decode_seconds"),
    ):
        before = getattr(counters, kind)
        step()
        one.finish()
        assert getattr(counters, kind) > before


@pytest.mark.parametrize("seen, reason", [([0, 0, 5], None), ([0, 1, 5], "code overflow")])
def test_on_a_gpu_the_host_learns_late_whether_there_are_steps_and_a_call_without_any_reads_and_writes_nothing(
    seen, reason
):
    outcome = Outcome(torch.tensor(seen), lambda seen: "code overflow" if seen[1] else None)
    layout, scales, values = Layout.of([20], CHUNK), Scales(torch.ones(1), torch.ones(1)), torch.ones(20)
    twos = CodedTensor(layout, Window(2 * values))
    frame_of_twos = codec_for(Config(), Host(), twos, scales).encode(0, 0)
    tensor = CodedTensor(layout, Window(values), Window(values.clone()))
    made = GpuCodec(Host(), tensor, Coding(), False, Counters(), scales, outcome=outcome)
    assert made.sizes_on_host(torch.tensor([17])) == [17]  # and with the size of a frame the outcome
    assert outcome.on_device is None and made.bypass == reason
    frame = made.encode(0, 0).clone()
    made.decode(0, 0, frame_of_twos)
    made.finish()
    written = QuantizingCodec(Host(), tensor, Coding(), False, Counters(), scales).encode(0, 0)
    assert torch.equal(frame, written) == (reason is None)
    assert made.output.data.tolist() == [1.0 if reason else 2.0] * 20


def test_the_own_values_of_who_sends_changes_are_copied_to_the_output():
    source, output = torch.ones(3 * CHUNK), torch.zeros(3 * CHUNK)
    tensor = CodedTensor(Layout((CHUNK, 2 * CHUNK), CHUNK), Window(source), Window(output))
    made = LosslessCodec(
        Host(), tensor, Coding(), False, Counters(), base=Window(source), own=range(1, 2), whole=frozenset()
    )
    for index in range(2):
        made.decode(1, index, made.encode(1, index))
    assert output.tolist() == [0.0] * CHUNK + [1.0] * 2 * CHUNK
