"""The cuts: they cover every element once, on chunk boundaries, alike for all frames of a segment."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from ncz_plugins.core.codec.layout import Layout, Window
from ncz_plugins.kernels.format import CHUNK, SCALE_BLOCK, blocks_of

sizes = st.one_of(st.integers(0, 20), st.integers(0, 40 * CHUNK))
blocks = st.sampled_from([0, SCALE_BLOCK, 3 * SCALE_BLOCK, CHUNK, 4 * CHUNK])
frame_elements = st.sampled_from([1, CHUNK, 5 * CHUNK, 1 << 20])


def check(layout: Layout) -> None:
    elements, steps = [], []
    for segment in range(len(layout.lengths)):
        start = layout.segment(segment).start
        for index in range(layout.frames):
            frame, covered = layout.frame(segment, index), layout.frame_steps(segment, index)
            assert (frame.start - start) % CHUNK == 0 or frame.start == frame.stop
            assert covered.stop - covered.start == blocks_of(frame.stop - frame.start)
            elements += range(frame.start, frame.stop)
            steps += range(covered.start, covered.stop)
    assert elements == list(range(layout.numel))
    assert steps == list(range(layout.steps))


@given(sizes, st.integers(1, 9), frame_elements, blocks)
def test_split_covers_everything_once(numel, segments, frame, block):
    layout = Layout.split(numel, segments, frame, block)
    assert len(layout.lengths) == segments and layout.numel == numel
    check(layout)


@given(st.lists(sizes, min_size=1, max_size=4), frame_elements)
def test_given_lengths_are_covered_once(lengths, frame):
    check(Layout.of(lengths, frame))


@given(st.lists(sizes, min_size=1, max_size=4), frame_elements)
def test_frames_are_not_longer_than_they_need_to_be(lengths, frame):
    for overlap in (True, False):
        layout = Layout.of(lengths, frame, overlap)
        check(layout)
        assert layout.frame_elements <= max(-(-max(lengths) // CHUNK), 64) * CHUNK
        assert layout.frame_elements <= max(-(-frame // CHUNK), 1) * CHUNK


@given(sizes, st.integers(1, 9), blocks)
def test_blocks_do_not_depend_on_the_number_of_segments(numel, segments, block):
    one = Layout.split(numel, 1, CHUNK, block).block_lengths(block)
    assert Layout.split(numel, segments, CHUNK, block).block_lengths(block).tolist() == one.tolist()


@given(sizes, st.integers(1, 9), blocks)
def test_blocks_cover_every_element_and_step(numel, segments, block):
    layout = Layout.split(numel, segments, CHUNK, block)
    assert sum(layout.block_lengths(block)) == numel
    assert sum(layout.steps_per_block(block)) == layout.steps


def test_a_segment_is_cut_into_several_frames_so_that_coding_and_transfer_overlap():
    assert Layout.split(1 << 20, 2, 1 << 20, 0).frames >= 2
    assert Layout.split(1 << 20, 2, 1 << 20, 0, overlap=False).frames == 1
    assert Layout.split(1 << 19, 2, 1 << 20, 0).frames == 1  # 1 MiB of float32 is too little to cut


def test_a_part_is_cut_as_the_whole_is():
    whole = Layout((5 * CHUNK, 7 * CHUNK + 3, 0, 2 * CHUNK), 3 * CHUNK)
    part = whole.for_segments(range(1, 4))
    check(part)
    for segment in range(3):
        for index in range(part.frames):
            here, there = part.frame(segment, index), whole.frame(1 + segment, index)
            assert (here.start + 5 * CHUNK, here.stop + 5 * CHUNK) == (there.start, there.stop)


def test_a_window_is_a_view():
    data = torch.arange(10.0)
    Window(data, start=100)[slice(102, 104)].zero_()
    assert data.tolist() == [0, 1, 0, 0, 4, 5, 6, 7, 8, 9]
