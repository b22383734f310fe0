"""Several frames in one launch: the bytes and numbers of one frame after the other, whatever is batched."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from emulator import EmulatedLauncher
from planes import in_order
from samples import assert_same, codes_of_width, floats, sparse_codes
from test_cuda_kernels import (
    CODERS,
    NOISE,
    ONE_PASS,
    REFERENCE,
    buffer,
    coding_name,
    cuda,
    decode_codes,
    encode,
    encode_codes,
)
from torch.overrides import TorchFunctionMode

from ncz_plugins.kernels.backend import Decoding, Sum
from ncz_plugins.kernels.cuda import CudaBackend, frames
from ncz_plugins.kernels.cuda.arguments import MOST_INPUTS, MOST_PIECES
from ncz_plugins.kernels.format import (
    CHUNK,
    DTYPES,
    HUFFMAN32_PAGE,
    ON_GPUS,
    Coder,
    Coding,
    DamagedFrame,
    Predictor,
    blocks_of,
    max_frame_bytes,
)

COUNTS = [2 * CHUNK + 77, 0, CHUNK, 5, 3 * CHUNK]  # of one batch
ONE_HUFFMAN = Coding(Coder.HUFFMAN, Predictor.NONE)
CODINGS = [*ONE_PASS, *(Coding(coder) for coder in CODERS)]


class CountingLauncher(EmulatedLauncher):
    """Also counts launches, by kernel."""

    def __init__(self, seed: int = 0):
        super().__init__(seed)
        self.launched: dict[str, int] = {}

    def launch(self, kernel, dtype, grid, block, *arguments):
        self.launched[kernel] = self.launched.get(kernel, 0) + 1
        super().launch(kernel, dtype, grid, block, *arguments)

    def prepared(self, kernel, dtype, grid, block, *arguments):
        replay = super().prepared(kernel, dtype, grid, block, *arguments)

        def counted(noise):
            self.launched[kernel] += 1
            replay(noise)

        return counted


def values_of(count: int, seed: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sums_of(counts: list[int], inputs: int, dtype=torch.float32) -> list[Sum]:
    """A sum of each count, of values and of so many frames, each of another coder."""
    sums = []
    for i, count in enumerate(counts):
        inverse_steps = torch.full((blocks_of(count),), 4.0, dtype=dtype if dtype == torch.float64 else torch.float32)
        codings = itertools.islice(itertools.cycle(CODINGS[i:] + CODINGS[:i]), inputs)
        added = [
            encode(REFERENCE, values_of(count, 10 * i + j, dtype), inverse_steps, c) for j, c in enumerate(codings)
        ]
        sums.append(Sum(values_of(count, 99 + i, dtype), inverse_steps, buffer(count), added, first=8 * i))
    return sums


def frames_of(backend, sums: list[Sum], coding: Coding, noise=None) -> list[torch.Tensor]:
    sums = [each._replace(out=buffer(each.x.numel())) for each in sums]
    sizes = backend.encode_sums(sums, coding, noise).tolist()
    return [in_order(each.out[:size]) for each, size in zip(sums, sizes)]


def assert_same_sums(backend, sums: list[Sum], coding: Coding, noise=None) -> None:
    for ours, theirs in zip(
        frames_of(backend, sums, coding, noise), frames_of(REFERENCE, sums, coding, noise), strict=True
    ):
        assert_same(ours, theirs)
    backend.check()


@pytest.mark.parametrize("inputs", [0, 1, 3])
@pytest.mark.parametrize("coding", [*CODINGS, Coding(Coder.FIXED)], ids=coding_name)
def test_sums(coding, inputs):
    for seed, noise in enumerate((None, NOISE)):
        assert_same_sums(cuda(seed + 1), sums_of(COUNTS, inputs), coding, noise)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_of_all_dtypes(dtype):
    for coding, inputs in itertools.product((ONE_PASS[1], Coding()), (0, 2)):
        assert_same_sums(cuda(2), sums_of([CHUNK + 3, 9], inputs, dtype), coding, NOISE)


@pytest.mark.parametrize("coding", [ONE_PASS[0], Coding(Coder.HUFFMAN, Predictor.NONE)], ids=coding_name)
def test_more_frames_than_a_table_has_rows(coding):
    assert_same_sums(cuda(1), sums_of([5] * (2 * MOST_PIECES + 1), 1), coding)
    assert_same_sums(cuda(1), sums_of([5, 40, 6], MOST_INPUTS - 1), coding)
    assert_same_sums(cuda(1), sums_of([70], 2 * MOST_INPUTS + 3), coding)


@pytest.mark.parametrize("coding", [ONE_PASS[0], Coding()], ids=coding_name)
def test_sums_of_more_codes_than_are_added_at_once(coding, monkeypatch):
    monkeypatch.setattr(frames, "MOST_ELEMENTS", 4 * CHUNK)
    assert_same_sums(cuda(1), sums_of([2 * CHUNK, 5, 5 * CHUNK], 3), coding)


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
@pytest.mark.parametrize("coding", [ONE_PASS[0], Coding(), ONE_HUFFMAN], ids=coding_name)
def test_under_sanitizers(coding, sanitizer):
    backend, sums = cuda(1, sanitizer), sums_of([CHUNK + 9, 0, 40], 5)
    assert_same_sums(backend, sums, coding)
    assert_same_sums(backend, [each._replace(frames=()) for each in sums], coding, NOISE)
    decode(backend, sums)
    decode_sums(backend, sums, NOISE)
    sealed = [torch.cat([frame, frame[:3]]) for each in sums for frame in each.frames]
    backend.seal_frames(sealed)
    backend.statistics_of([each.x for each in sums])


def decode(backend, sums: list[Sum]) -> list[torch.Tensor]:
    decodings = [
        Decoding(frame, each.inverse_steps / 3, torch.full_like(each.x, 7)) for each in sums for frame in each.frames
    ]
    backend.decode_frames(decodings)
    return [each.out for each in decodings]


def test_decoding():
    """Of frames of all coders at once."""
    for sums in (sums_of(COUNTS, len(CODINGS)), sums_of([9] * MOST_PIECES, 2)):
        for ours, theirs in zip(decode(cuda(1), sums), decode(REFERENCE, sums), strict=True):
            assert_same(ours, theirs)


@pytest.mark.parametrize("coder", [Coder.HUFFMAN, Coder.FIXED])
def test_a_block_may_open_much_of_a_frame(coder, monkeypatch):
    monkeypatch.setattr(frames, "_MOST_OPENING_BLOCKS", 2)
    count = 8 * HUFFMAN32_PAGE + 9
    frame = encode_codes(REFERENCE, sparse_codes(count, 0.1), Coding(coder, Predictor.NONE))
    REFERENCE.seal(frame)
    for backend in (cuda(1), cuda(1, "thread")):
        assert_same(decode_codes(backend, frame, count), sparse_codes(count, 0.1))
    frame[-1] ^= 1
    with pytest.raises(DamagedFrame, match="checksum"):
        decode_codes(cuda(1), frame, count)


def decode_sums(backend, sums: list[Sum], noise=None, sealed: bool = False) -> list[torch.Tensor]:
    """Each in place of its values, which are copied first."""
    sums = [each._replace(x=(x := each.x.clone()), out=x) for each in sums]
    backend.decode_sums(sums, [each.inverse_steps / 3 for each in sums], noise, sealed)
    return [each.out for each in sums]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("noise", [None, NOISE], ids=["to nearest", "stochastic"])
def test_decoding_sums(noise, dtype):
    backend = cuda(1)
    for counts, inputs in (
        (COUNTS, 1),
        ([CHUNK + 3, 9], 3),
        ([60] * (MOST_PIECES + 2), 1),
        ([5, 40], MOST_INPUTS),
        ([5, 40], MOST_INPUTS + 2),
    ):
        sums = sums_of(counts, inputs, dtype)
        for ours, theirs in zip(decode_sums(backend, sums, noise), decode_sums(REFERENCE, sums, noise), strict=True):
            assert_same(ours, theirs)
    backend.check()


def sums_of_pages(counts: list[int], dtype=torch.float32, inputs: int = 1) -> list[Sum]:
    """A sum of each count, of values and of so many HUFFMAN32 frames. Every other pair has letters for gaps."""
    sums = []
    for i, count in enumerate(counts):
        steps = torch.full((blocks_of(count),), 4.0, dtype=dtype if dtype == torch.float64 else torch.float32)
        added = []
        for j in range(i, i + inputs):
            values = values_of(count, count + j + 1, dtype) / (1 + 15 * (j // 2 % 2))
            coding = Coding(Coder.HUFFMAN, (Predictor.NONE, Predictor.DELTA)[j % 2])
            added.append(encode(REFERENCE, values, steps, coding))
            assert not count or added[-1][5] == ON_GPUS[Coder.HUFFMAN]
        x = values_of(count, count, dtype)
        sums.append(Sum(x, steps, torch.empty_like(x), added, first=blocks_of(count)))
    return sums


def assert_same_values(backend, sums: list[Sum], noise=None) -> None:
    for ours, theirs in zip(decode_sums(backend, sums, noise), decode_sums(REFERENCE, sums, noise), strict=True):
        assert_same(ours, theirs)
    backend.check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("noise", [None, NOISE], ids=["to nearest", "stochastic"])
def test_a_sum_of_one_huffman_frame_needs_no_codes_in_memory(noise, dtype):
    """A block adds four pages, each of them whole or not."""
    launcher = CountingLauncher(1)
    assert_same_values(
        CudaBackend(launcher), sums_of_pages([5 * HUFFMAN32_PAGE + 77, 0, 2 * HUFFMAN32_PAGE], dtype), noise
    )
    assert set(launcher.launched) == {"ncz_open", "ncz_decode_sum" + "_at_random" * bool(noise)}


def test_sums_of_one_frame_beside_sums_of_several():
    sums = [*sums_of_pages([HUFFMAN32_PAGE + 9] * 2), *sums_of([HUFFMAN32_PAGE + 9, 5], len(CODINGS))]
    launcher = CountingLauncher(1)
    assert_same_values(CudaBackend(launcher), [sums[2], sums[0], sums[3], sums[1]])
    assert launcher.launched == {"ncz_open": 1, "ncz_sum_pages": 1, "ncz_decode_sum": 1}


@pytest.mark.parametrize("inputs", [2, 5])
@pytest.mark.parametrize("noise", [None, NOISE], ids=["to nearest", "stochastic"])
def test_several_huffman_frames_are_added_page_by_page(noise, inputs):
    """To values, and to frames."""
    sums = sums_of_pages([2 * HUFFMAN32_PAGE + 77, 0, HUFFMAN32_PAGE, CHUNK + 300], inputs=inputs)
    assert_same_values(cuda(1), sums, noise)
    for coding in (ONE_HUFFMAN, ONE_PASS[0]):
        assert_same_sums(cuda(1), sums, coding, noise)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_huffman_frames_of_all_dtypes(dtype):
    sums = sums_of_pages([HUFFMAN32_PAGE + 77], dtype, 3)
    assert_same_values(cuda(1), sums, NOISE)
    assert_same_sums(cuda(1), sums, ONE_HUFFMAN)


def sum_that_is(wanted: torch.Tensor, addends: list[torch.Tensor]) -> Sum:
    """Of codes as values and as HUFFMAN32 frames, `wanted` less the `addends` last."""
    steps, last = torch.ones(blocks_of(wanted.numel())), wanted - sum(addends)
    added = [encode(REFERENCE, each.float(), steps, ONE_HUFFMAN) for each in (*addends[1:], last)]
    assert all(frame[5] == ON_GPUS[Coder.HUFFMAN] for frame in added)
    return Sum(addends[0].float(), steps, torch.empty(wanted.numel()), added)


def assert_is(total: Sum, wanted: torch.Tensor) -> None:
    """As values, in place of its own, and as a frame."""
    backend = cuda(1)
    [frame] = frames_of(backend, [total], ONE_HUFFMAN)
    assert frame[5] == ON_GPUS[Coder.HUFFMAN]
    assert_same(decode_codes(backend, frame, wanted.numel()), wanted.int())
    x = total.x.clone()
    backend.decode_sums([total._replace(x=x, out=x)], [torch.ones_like(total.inverse_steps)])
    assert_same(x, wanted.float())
    backend.check()


ENDS = torch.tensor([32767, 32768, -32768, -32769, 65535, 65536, -(1 << 23), 1 << 23])


@pytest.mark.parametrize("inputs", [1, 2, 4])
def test_sums_of_any_size(inputs):
    """Where 16 bits end, and far behind."""
    wanted = torch.zeros(HUFFMAN32_PAGE, dtype=torch.int64)
    wanted[::132][: 7 * len(ENDS)] = ENDS.repeat(7)  # which all lanes share out among them
    seeds = (torch.Generator().manual_seed(i) for i in range(inputs))
    small = [torch.randint(-1, 2, wanted.shape, generator=seed) for seed in seeds]
    assert_is(sum_that_is(wanted, small), wanted)


@pytest.mark.parametrize("end", ENDS.tolist())
def test_sums_that_are_large_on_the_way(end):
    """The first frames of one page add up to what 16 bits may not hold; the sum of all is small."""
    large = torch.zeros(5 * HUFFMAN32_PAGE + 200, dtype=torch.int64)
    large[2 * HUFFMAN32_PAGE + 133] = end
    small = torch.randint(-9, 10, large.shape, generator=torch.Generator().manual_seed(1))
    assert_is(sum_that_is(small, [torch.zeros_like(large), large, small]), small)


@pytest.mark.parametrize("inputs", [1, 3])
def test_values_at_any_address_are_added_to_pages(inputs):
    sums = sums_of_pages([HUFFMAN32_PAGE, 2 * HUFFMAN32_PAGE + 5], inputs=inputs)
    expected = decode_sums(REFERENCE, sums)
    values = [torch.cat([each.x[:1], each.x])[1:] for each in sums]
    backend = cuda(1, "address")
    scales = [each.inverse_steps / 3 for each in sums]
    backend.decode_sums([each._replace(x=x, out=x) for each, x in zip(sums, values)], scales)
    for ours, theirs in zip(values, expected, strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("inputs", [1, 3])
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_sums_of_pages_under_sanitizers(sanitizer, inputs):
    sums = sums_of_pages([HUFFMAN32_PAGE + 9, 1000], inputs=inputs)
    assert_same_values(cuda(1, sanitizer), sums, NOISE)
    assert_same_sums(cuda(1, sanitizer), sums, ONE_HUFFMAN)


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_large_sums_of_pages_under_sanitizers(sanitizer):
    wanted = torch.zeros(HUFFMAN32_PAGE + 200, dtype=torch.int64)
    wanted[::900] = 1 << 20
    total = sum_that_is(wanted, [torch.zeros_like(wanted), wanted, wanted])
    backend = cuda(1, sanitizer)
    backend.decode_sums([total], [torch.ones_like(total.inverse_steps)])
    assert_same(total.out, wanted.float())
    backend.check()


@pytest.mark.parametrize("inputs", [1, 3])
def test_a_damaged_page_of_a_sum_is_reported(inputs):
    """The other sums of the batch are right. A frame that is made of it is spoiled."""
    sums = sums_of_pages([2 * HUFFMAN32_PAGE] * 3, inputs=inputs)
    whole, made = decode_sums(REFERENCE, [sums[0], sums[2]]), frames_of(REFERENCE, [sums[0], sums[2]], ONE_HUFFMAN)
    sums[1].frames[0][-700:-600] ^= 0x55
    backend = cuda(2)
    first, _, last = decode_sums(backend, sums)
    assert_same(first, whole[0])
    assert_same(last, whole[1])
    with pytest.raises(DamagedFrame):
        backend.check()
    first, spoiled, last = frames_of(backend, sums, ONE_HUFFMAN)
    assert_same(first, made[0])
    assert_same(last, made[1])
    with pytest.raises(DamagedFrame):
        backend.check()
    with pytest.raises(DamagedFrame, match="made of a frame that was damaged"):
        REFERENCE.decode_codes(spoiled, torch.empty(2 * HUFFMAN32_PAGE, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_may_have_fewer_bits_than_the_values(dtype):
    """As where error feedback adds what it has kept, in float32, to gradients of 16 bits."""
    for inputs, sealed in ((1, False), (1, True), (3, False)):
        sums = [each._replace(out=torch.empty(each.x.numel(), dtype=dtype)) for each in sums_of(COUNTS, inputs)]
        if sealed:
            REFERENCE.seal_frames([frame for each in sums for frame in each.frames])
        results = []
        for backend in (cuda(1), REFERENCE):
            backend.decode_sums(sums, [each.inverse_steps / 3 for each in sums], NOISE, sealed)
            backend.check()
            results.append([each.out.clone() for each in sums])
        for ours, theirs in zip(*results, strict=True):
            assert_same(ours, theirs)


def test_a_sum_with_a_damaged_frame_stays_as_it_was():
    sums = sums_of([CHUNK + 9, 2 * CHUNK, 40], 2)
    sums[1].frames[1][9] ^= 0x55
    backend, whole = cuda(1), decode_sums(REFERENCE, [sums[0], sums[2]])
    first, damaged, last = decode_sums(backend, sums)
    assert_same(damaged, sums[1].x)
    assert_same(first, whole[0])
    assert_same(last, whole[1])
    with pytest.raises(DamagedFrame):
        backend.check()
    decode_sums(backend, sums[2:], sealed=True)
    with pytest.raises(DamagedFrame, match="no checksum"):
        backend.check()


@pytest.mark.parametrize("coding", [ONE_PASS[0], Coding(Coder.HUFFMAN)], ids=coding_name)
def test_a_frame_among_padding_or_cut_off(coding):
    """What follows a frame has no meaning. One that is cut off leaves its sum as it is, and is not damage."""
    sums = sums_of([CHUNK + 9, 2 * CHUNK, 40], 1)
    frames = frames_of(REFERENCE, [each._replace(frames=[]) for each in sums], coding)
    expected = decode_sums(REFERENCE, [each._replace(frames=[frame]) for each, frame in zip(sums, frames)])
    rest = torch.arange(100, dtype=torch.uint8)
    padded = [torch.cat([frames[0], rest]), frames[1][:-1], torch.cat([frames[2], rest[:1]])]
    backend, scales = cuda(1), [each.inverse_steps / 3 for each in sums]
    outs = [torch.full_like(each.x, 9.5) for each in sums]
    wanted = [each._replace(frames=[frame], out=out) for each, frame, out in zip(sums, padded, outs)]
    backend.decode_sums(wanted, scales, padded=True)
    backend.check()
    assert_same(outs[0], expected[0])
    assert (outs[1] == 9.5).all()
    assert_same(outs[2], expected[2])
    padded[0][4] ^= 1
    backend.decode_sums(wanted, scales, padded=True)
    with pytest.raises(DamagedFrame, match="version"):
        backend.check()


def test_damage_that_a_failed_call_left_is_nobodys():
    sums = sums_of([CHUNK + 9], 2)
    sums[0].frames[1][9] ^= 0x55
    backend = cuda(1)
    decode_sums(backend, sums)
    backend.forget_report(torch.device("cpu"))
    backend.check()


def test_one_sum_is_decoded_as_several_are():
    [wanted] = sums_of([CHUNK + 9], 2)
    [expected] = decode_sums(REFERENCE, [wanted], NOISE)
    out = torch.empty_like(expected)
    cuda(1).decode_sum(wanted._replace(out=out), wanted.inverse_steps / 3, NOISE)
    assert_same(out, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics(dtype):
    for counts in (COUNTS, [0], [3] * (MOST_PIECES + 2)):
        tensors = [floats(count, dtype) for count in counts]
        for ours, theirs in zip(cuda(1).statistics_of(tensors), REFERENCE.statistics_of(tensors), strict=True):
            assert_same(ours, theirs)


def test_seals():
    ours, theirs = ([encode_codes(REFERENCE, codes_of_width(n, 9), ONE_PASS[0]) for n in COUNTS] for _ in range(2))
    cuda(1).seal_frames(ours)
    REFERENCE.seal_frames(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert_same(one, other)


def test_where_frames_must_have_a_checksum_one_without_is_damaged():
    sums = sums_of([CHUNK + 3, 0, 60], 1)
    made = []
    for backend in (REFERENCE, cuda(1)):
        sealed = [each._replace(frames=[each.frames[0].clone()]) for each in sums]
        backend.seal_frames([each.frames[0] for each in sealed])
        assert backend.encode_sums(sealed, ONE_PASS[0], None, True).tolist()
        backend.check()
        sealed[1] = sealed[1]._replace(frames=sums[1].frames)
        decodings = [Decoding(each.frames[0], each.inverse_steps, torch.full_like(each.x, 9.5)) for each in sealed]
        for work in (
            lambda backend=backend, sealed=sealed: backend.encode_sums(sealed, ONE_PASS[0], None, True),
            lambda backend=backend, decodings=decodings: backend.decode_frames(decodings, True),
        ):
            with pytest.raises(DamagedFrame, match="^it has no checksum"):
                work()
                backend.check()
        made.append(decodings[0].out)
    assert not (made[1] == 9.5).any()  # the other frames are read


@pytest.mark.parametrize("coding", [ONE_PASS[0], Coding(Coder.HUFFMAN), Coding()], ids=coding_name)
def test_damage_spoils_what_is_made_of_it(coding):
    """And nothing else of the batch."""
    sums = sums_of([CHUNK + 3, 50, 60], 3)
    whole = frames_of(REFERENCE, sums, coding)
    sums[1] = sums[1]._replace(frames=[*sums[1].frames[:2], sums[1].frames[2][:-1]])
    backend = cuda(1)
    made = frames_of(backend, sums, coding)
    with pytest.raises(DamagedFrame, match="payload has"):
        backend.check()
    assert_same(made[0], whole[0])
    assert_same(made[2], whole[2])
    with pytest.raises(DamagedFrame, match="made of a frame that was damaged"):
        REFERENCE.decode_codes(made[1], torch.empty(50, dtype=torch.int32))


@pytest.mark.parametrize("coder", [Coder.FIXED, Coder.HUFFMAN])
def test_of_a_damaged_frame_nothing_is_written(coder):
    """Also where only decoding shows the damage, but in HUFFMAN. The other frames of the batch are decoded."""
    count = 2 * CHUNK
    scales = torch.ones(blocks_of(count))
    frame = encode(REFERENCE, values_of(count, 1), scales, Coding(coder, Predictor.NONE))
    assert frame[5] == ON_GPUS.get(coder, coder)
    damaged = frame.clone()
    damaged[-1] ^= 0x80
    damaged[-700:-600] ^= 0x55
    decodings = [Decoding(each, scales, torch.full((count,), 9.5)) for each in (frame, damaged, frame)]
    backend = cuda(2)
    backend.decode_frames(decodings)
    is_damaged = False
    try:
        backend.check()
    except DamagedFrame:
        is_damaged = True
    assert is_damaged == (coder != Coder.FIXED)  # in FIXED, these bits are codes
    assert coder == Coder.HUFFMAN or is_damaged == bool((decodings[1].out == 9.5).all())
    assert not (decodings[0].out == 9.5).any() and torch.equal(decodings[0].out, decodings[2].out)


class Borrowed(TorchFunctionMode):
    """Adds up the bytes of all tensors that are made within it."""

    bytes = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if function in (torch.empty, torch.zeros):
            self.bytes += made.nbytes
        return made


class NothingLauncher:
    """Runs no kernel: how much memory a call takes does not depend on what they find."""

    def launch(self, *arguments):
        pass


@pytest.mark.parametrize("coding", [ONE_PASS[0], ONE_HUFFMAN, Coding()], ids=coding_name)
@pytest.mark.parametrize("inputs", [0, 1, 3])
def test_working_memory(coding, inputs):
    """Codes are in memory where frames are added up: 4 bytes for each of a sum, and 2 while several are added."""
    count, backend = 1 << 20, CudaBackend(NothingLauncher())
    steps, room = torch.ones(blocks_of(count)), torch.empty(max_frame_bytes(count), dtype=torch.uint8)
    received = [torch.zeros(count, dtype=torch.uint8)] * inputs
    total = Sum(torch.zeros(count), steps, room, received)
    of_code = 4 * bool(inputs) + 2 * (inputs > 1)
    beside = 0.01 * count + 5000 * inputs + (1 << 16)  # where chunks are, the codes of frames, and the sample
    with Borrowed() as written:
        backend.encode_sums([total], coding)
    assert written.bytes <= of_code * count + beside
    if inputs:
        with Borrowed() as read:
            backend.decode_sums([total._replace(out=total.x)], [steps])
        assert read.bytes <= of_code * (inputs > 1) * count + beside


LAUNCHES = {  # to encode, and to add frames to what is encoded
    ONE_PASS[0]: (1, 3),
    Coding(Coder.RAW, Predictor.NONE): (1, 3),
    Coding(Coder.FIXED): (3, 6),
    Coding(Coder.HUFFMAN, Predictor.NONE): (4, 7),
    Coding(): (4, 7),
}


@pytest.mark.parametrize("coding", LAUNCHES, ids=coding_name)
def test_launches(coding, monkeypatch):
    """As many for several frames as for one; those of a part more for each part."""

    def launches(work: Callable, *arguments) -> int:
        launcher = CountingLauncher()
        work(CudaBackend(launcher), *arguments)
        return sum(launcher.launched.values())

    one, several = sums_of([CHUNK + 9], 2), sums_of(COUNTS, 2)
    for sums in (one, several):
        without = [each._replace(frames=()) for each in sums]
        assert launches(CudaBackend.encode_sums, without, coding) == LAUNCHES[coding][0]
        assert launches(CudaBackend.encode_sums, sums, coding) == LAUNCHES[coding][1]
        assert launches(decode, sums) == 2
        assert launches(decode_sums, sums) == 3
        assert launches(decode_sums, [each._replace(frames=each.frames[:1]) for each in sums]) == 2
        assert launches(CudaBackend.statistics_of, [each.x for each in sums]) == 1
    monkeypatch.setattr(frames, "MOST_ELEMENTS", 3 * CHUNK)
    assert launches(CudaBackend.encode_sums, several, coding) == 3 * LAUNCHES[coding][1]
    assert_same_sums(cuda(1), several, coding)
