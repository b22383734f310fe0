"""Frames that were cut, overwritten or made up: DamagedFrame or a valid decode, the same from every backend."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import with_flipped_bits

from ncz_plugins import kernels
from ncz_plugins.kernels import damage
from ncz_plugins.kernels.format import (
    CHUNK,
    HEADER_BYTES,
    HUFFMAN_LANES,
    MAGIC,
    SPOILED,
    VERSION,
    Coder,
    Coding,
    DamagedFrame,
    Predictor,
    blocks_of,
    chunks_of,
    max_frame_bytes,
)

REFERENCE = kernels.load("reference")
COMPILED = [kernels.load(name) for name in ("avx2", "portable") if kernels.statuses()[name] == "ok"]
UNTOUCHED = -559038737

pytestmark = pytest.mark.skipif(not COMPILED, reason="no compiled kernels to compare with the reference")


CODERS = (Coder.RAW, Coder.FIXED, Coder.HUFFMAN, Coder.RANS)
VERSION_AT, CODER_AT, PREDICTOR_AT, WIDTH_AT, FLAGS_AT = 4, 5, 6, 7, 16  # bytes of the header


def frame_of(count: int, coder: Coder, predictor: Predictor) -> torch.Tensor:
    """A frame of codes of between 0 and 20 bits, another number in each block."""
    generator = torch.Generator().manual_seed(count)
    codes = torch.randint(-(1 << 20), 1 << 20, (count,), generator=generator)
    codes >>= torch.randint(0, 22, (-(-count // 32),), generator=generator).repeat_interleave(32)[:count]
    if coder in (Coder.HUFFMAN, Coder.RANS):
        codes >>= 8  # such as pay, so that the frame is none of RAW
    frame = torch.empty(max_frame_bytes(count), dtype=torch.uint8)
    written = REFERENCE.encode_codes(codes.to(torch.int32), Coding(coder, predictor), frame)
    assert frame[CODER_AT] == coder
    return frame[:written].clone()


FRAMES = {
    f"{coder.name}-{predictor.name}-{count}": (count, frame_of(count, coder, predictor))
    for coder in CODERS
    for predictor in (Predictor.NONE, Predictor.DELTA)
    for count in ((1, 75) if coder in (Coder.RAW, Coder.FIXED) else (700,))
}
LONG = {  # several chunks; with entropy coders, which the reference is slow at, the fewest that are several
    f"{coder.name}-{predictor.name}": (count, frame_of(count, coder, predictor))
    for coder, predictor, count in (
        (Coder.RAW, Predictor.DELTA, 2 * CHUNK + 75),
        (Coder.FIXED, Predictor.NONE, 2 * CHUNK + 75),
        (Coder.FIXED, Predictor.DELTA, 2 * CHUNK + 75),
        (Coder.HUFFMAN, Predictor.NONE, CHUNK + 75),
        (Coder.RANS, Predictor.NONE, CHUNK + 75),
    )
}
frames = pytest.mark.parametrize("count,frame", FRAMES.values(), ids=FRAMES.keys())


def verdict(backend, frame: torch.Tensor, count: int) -> list[int] | str:
    """The codes, or what the backend says is wrong."""
    codes = torch.full((count,), UNTOUCHED, dtype=torch.int32)
    try:
        backend.decode_codes(frame, codes)
    except DamagedFrame as error:
        # What HUFFMAN and RANS frames hold is only known once it is decoded.
        if frame.numel() <= CODER_AT or frame[CODER_AT] not in (Coder.HUFFMAN, Coder.RANS):
            assert (codes == UNTOUCHED).all(), f"{backend.name} wrote codes of a damaged frame"
        return str(error)
    return codes.tolist()


def check(frame: torch.Tensor, count: int) -> list[int] | str:
    """The verdict, on which all backends must agree. They get an exactly sized copy, for sanitizers to watch."""
    expected = verdict(REFERENCE, frame, count)
    for backend in COMPILED:
        assert verdict(backend, frame.clone(), count) == expected, backend.name
    return expected


@frames
def test_whole_frames_are_accepted(count, frame):
    assert isinstance(check(frame, count), list)


@frames
def test_truncation_at_every_byte(count, frame):
    for size in range(frame.numel()):
        assert isinstance(check(frame[:size], count), str)


@frames
def test_bytes_behind_the_frame(count, frame):
    for extra in (1, 2, 8, 4096):
        assert isinstance(check(torch.cat([frame, torch.zeros(extra, dtype=torch.uint8)]), count), str)


@frames
def test_every_value_of_a_header_byte_that_says_what_the_frame_is(count, frame):
    accepted = 0
    for at in (VERSION_AT, CODER_AT, PREDICTOR_AT, WIDTH_AT, FLAGS_AT):
        for value in range(256):
            damaged = frame.clone()
            damaged[at] = value
            result = check(damaged, count)
            accepted += isinstance(result, list) and value != frame[at]
    assert accepted == 1  # the other predictor: as valid, other codes


@frames
def test_every_flipped_bit_of_the_numbers_in_the_header(count, frame):
    """They must be equal to something: a bit that nobody compares shows when it alone is flipped."""
    for at in set(range(HEADER_BYTES)) - {VERSION_AT, CODER_AT, PREDICTOR_AT, WIDTH_AT}:
        for bit in range(8):
            damaged = frame.clone()
            damaged[at] ^= 1 << bit
            assert isinstance(check(damaged, count), str), (at, bit)


@frames
@pytest.mark.parametrize("payload", [False, True])
def test_a_spoiled_frame_is_refused_as_such(count, frame, payload):
    spoiled = frame.clone() if payload else frame[:HEADER_BYTES].clone()
    spoiled[FLAGS_AT] = SPOILED
    assert "made of a frame that was damaged" in check(spoiled, count)


def test_every_cause_that_kernels_know_has_its_words():
    header = (Path(damage.__file__).parent / "common" / "format.h").read_text()
    causes = re.findall(r"= (\d+)", re.search(r"enum Damage.*?};", header, re.DOTALL)[0])
    assert len(causes) > 20
    for cause in map(int, causes):
        assert str(damage.error(-(cause + 256 * 1000), b"", 2000, 1))  # with nothing at hand


@pytest.mark.parametrize("coder", [Coder.HUFFMAN, Coder.RANS])
def test_without_the_frame_at_hand_its_damage_is_worded_all_the_same(coder):
    count = 700
    frame, said = with_another_table(frame_of(count, coder, Predictor.NONE), count)
    what, held = re.fullmatch(r"(.*) add up to \d+ bytes, the payload holds (\d+)", said).groups()
    cause, table = {Coder.HUFFMAN: (18, 2 * HUFFMAN_LANES), Coder.RANS: (24, 4)}[coder]
    result = -(cause + 256 * (int(held) + table))
    header, read = frame[:HEADER_BYTES].numpy().tobytes(), lambda first, size: frame[first:][:size].numpy().tobytes()
    assert str(damage.error(result, header, frame.numel(), count, read)) == said
    without = f"{what} do not add up to the {held} bytes that the payload holds"
    assert str(damage.error(result, header, frame.numel(), count)) == without


def with_another_table(frame: torch.Tensor, count: int) -> tuple[torch.Tensor, str]:
    """`frame` with one number in its table of sizes changed, and what backends say about it."""
    for at in range(HEADER_BYTES, frame.numel()):
        damaged = frame.clone()
        damaged[at] ^= 1
        said = check(damaged, count)
        if isinstance(said, str) and re.search(r"add up to \d+ bytes", said):
            return damaged, said
    pytest.fail("no byte of this frame is in a table of sizes")


def test_a_coder_of_a_later_version_is_told_from_damage(any_backend):
    frame = frame_of(75, Coder.RAW, Predictor.NONE)
    frame[CODER_AT] = 99
    with pytest.raises(DamagedFrame, match="coder 99 with width .* is unknown: damaged, or of a newer ncz_plugins"):
        any_backend.decode_codes(frame, torch.empty(75, dtype=torch.int32))


def made_up(coder: Coder, count: int, payload: bytes) -> torch.Tensor:
    header = struct.pack("<IBBBBIIII", MAGIC, VERSION, coder, Predictor.NONE, 0, count, len(payload), 0, 0)
    return torch.frombuffer(bytearray(header + payload), dtype=torch.uint8)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_huffman_codes_made_up(data):
    """Valid and invalid codes, then tables and lanes of any bytes."""
    count = data.draw(st.integers(0, 60))
    lengths = data.draw(
        st.sampled_from(
            [[1, 1], [1, 2, 2], [1, 2, 3, 3], [2, 2, 2, 2], [1], [1, 1, 1], [12, 1], [0, 1, 1], [], [1, 1, 0, 0]]
        )
        | st.lists(st.integers(0, 15), max_size=240)
    )
    nibbles = [*lengths, 0] if len(lengths) % 2 else lengths
    code = bytes([len(lengths)]) + bytes(a | b << 4 for a, b in zip(nibbles[::2], nibbles[1::2]))
    lanes = [data.draw(st.binary(max_size=8)) for _ in range(4)]
    table = struct.pack("<4H", *map(len, lanes)) if data.draw(st.booleans()) else data.draw(st.binary(max_size=9))
    check(made_up(Coder.HUFFMAN, count, code + table + b"".join(lanes)), count)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_rans_pages_made_up(data):
    """Valid and invalid frequencies, then pages of any bytes."""

    def table(frequencies: dict[int, int]) -> bytes:
        present = bytearray(32)
        for value in frequencies:
            present[value // 8] |= 1 << value % 8
        return bytes(present) + struct.pack(f"<{len(frequencies)}H", *(f for _, f in sorted(frequencies.items())))

    some = st.sampled_from(
        [{}, {0: 4096}, {0: 4000, 255: 96}, {1: 2048, 200: 2048}, {7: 4095, 227: 1}, {0: 0, 1: 4096}]
    )
    count = data.draw(st.integers(0, 60))
    mode = data.draw(st.sampled_from([0, 1, 127, 128]))
    words, extra = data.draw(st.binary(max_size=12)), data.draw(st.binary(max_size=9))
    states = struct.pack("<4I", *(data.draw(st.sampled_from([65536, 0, 2**32 - 1, 65536 * 4097])) for _ in range(4)))
    sizes = (
        struct.pack("<HH", len(words) // 2, len(extra))
        if data.draw(st.booleans())
        else data.draw(st.binary(max_size=5))
    )
    page = states + words[: len(words) // 2 * 2] + extra
    payload = bytes([mode]) + table(data.draw(some)) + table(data.draw(some)) + sizes + page
    check(made_up(Coder.RANS, count, payload), count)


@frames
def test_another_count_than_expected(count, frame):
    for other in (0, count - 1, count + 1, CHUNK + count):
        assert f"holds {count} codes, expected {other}" in check(frame, other)


@pytest.mark.parametrize("count,frame", LONG.values(), ids=LONG.keys())
def test_every_byte_of_the_table_and_the_widths(count, frame):
    """The bytes that say where other bytes lie, one at a time, to values about the limits."""
    table = 2 * chunks_of(count)
    first_chunk = HEADER_BYTES + table
    for at in (*range(HEADER_BYTES, first_chunk), *range(first_chunk, first_chunk + 600, 23)):
        for value in (0, 1, 32, 33, 255):
            damaged = frame.clone()
            damaged[at] = value
            check(damaged, count)


@frames
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_flips(count, frame, data):
    check(with_flipped_bits(frame, data), count)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_payloads_made_up_under_a_valid_header(data):
    count = data.draw(st.integers(0, 100))
    payload = data.draw(st.binary(max_size=120))
    if data.draw(st.booleans()) and count:  # a right table, so that the widths are looked at
        payload = struct.pack("<H", len(payload)) + payload
    coder, width = data.draw(
        st.sampled_from([(0, 8), (0, 16), (0, 32), (1, 0), (1, 8), (0, 0), (7, 0), (2, 0), (3, 0), (3, 8)])
    )
    predictor = data.draw(st.integers(0, 2))
    header = struct.pack("<IBBBBIIII", MAGIC, VERSION, coder, predictor, width, count, len(payload), 0, 0)
    check(torch.frombuffer(bytearray(header + payload), dtype=torch.uint8), count)


def test_what_stands_in_padding_is_ignored():
    """A sender may leave anything behind the last code of an octet; it must not get into a sum's frame."""
    count = 3
    x, inverse_steps = torch.ones(count), torch.ones(blocks_of(count))
    for predictor in (Predictor.NONE, Predictor.DELTA):
        frame = frame_of(count, Coder.FIXED, predictor)
        frame[-1] = 0xFF
        codes = check(frame, count)
        assert isinstance(codes, list)
        sums = []
        for backend in (REFERENCE, *COMPILED):
            out = torch.empty(max_frame_bytes(count), dtype=torch.uint8)
            written = backend.reduce(frame, x, inverse_steps, Coding(Coder.FIXED, Predictor.NONE), out)
            sums.append(out[:written].tolist())
            assert verdict(backend, out[:written], count) == [code + 1 for code in codes]
        assert all(s == sums[0] for s in sums)


@pytest.mark.parametrize("backend", [REFERENCE, *COMPILED], ids=lambda b: b.name)
@frames
def test_decode_and_reduce_refuse_too(backend, count, frame):
    x, ones = torch.zeros(count), torch.ones(blocks_of(count))
    damaged = frame[:-1].clone()
    with pytest.raises(DamagedFrame, match="payload has"):
        backend.decode(damaged, ones, x)
    assert (x == 0).all()
    out = torch.zeros(max_frame_bytes(count), dtype=torch.uint8)
    with pytest.raises(DamagedFrame, match="payload has"):
        backend.reduce(damaged, x, ones, Coding(), out)
    assert (out == 0).all()
