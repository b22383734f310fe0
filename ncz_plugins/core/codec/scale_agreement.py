"""How ranks agree on the quantization steps of one call: piece by piece on CPUs, all at once on GPUs.

Measuring a tensor takes a pass over it, during which nothing would cross the link. So a CPU measures a large tensor in
pieces: some frames of every segment first, which then travel while the next piece is measured. The pieces change no
quantization step, because the step of a block depends on that block alone.

A GPU measures in no time. There the steps stay on the device, and the host hears whether there are any when it first
has to wait for something else: the sizes of the first frames, or before anything is decoded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from ..config import Config
from .layout import Layout
from .quantize import Scales, joined

_FIRST_FRAMES = 2  # of a segment, in the first piece: one that travels while the next piece is measured, and one after
_FIRST_FRAMES_FAR = 8  # as one agreement more takes longer there than to measure them


def pieces_of(layout: Layout, config: Config, is_far: bool = False) -> list[range]:
    """The pieces that a tensor is measured in, as frames of every segment. One piece if scales are not per block.

    Each piece is as long as all before it, and the last one may be longer. Measuring is a few times as fast as a slow
    link, so the link has enough to carry meanwhile.

    Args:
        is_far: see `Transport.is_far`.
    """
    frames, block = layout.frames, config.quantizer.block_in_effect
    first = _FIRST_FRAMES_FAR if is_far else _FIRST_FRAMES
    # On a fast link ranks wait for each other, once more for every piece, and not for the link.
    if config.transport.has_fast_link or not block or first * layout.frame_elements % block:
        return [range(frames)]
    starts, next = [0], first
    while 2 * next <= frames:  # a shorter piece at the end would cost the time that it saves
        starts.append(next)
        next *= 2
    return [range(start, end) for start, end in zip(starts, [*starts[1:], frames])]


class ScaleAgreement(ABC):
    """The quantization steps of one call, on which the ranks agree.

    Attributes:
        scales: of the whole tensor; only those of required frames are filled in. None as long as none are.
        bypass: the reason why the call must go plain; None as long as there is none.
        outcome: on a GPU, what the host has yet to `learn` once it waits for something anyway: int64. Else None.
    """

    def __init__(self):
        self.scales: Scales | None = None
        self.bypass: object | None = None
        self.outcome: Tensor | None = None

    @property
    @abstractmethod
    def complete(self) -> bool:
        """Whether all scales are filled in, or there is a `bypass`, and the host knows."""

    @abstractmethod
    def require(self, frames: int) -> None:
        """Return once the scales of the first `frames` frames of every segment are filled in, or there is a `bypass`.

        On a GPU they are in the order of the stream. All ranks must require the same, in the same order relative to
        their other agreements, and all of it before they receive a frame: a rank that waits here sends no frames
        meanwhile, so another one that waits for these would never come here.
        """

    def learn(self, outcome: list[int]) -> None:  # noqa: B027 - a host has nothing to learn of itself
        """Take note of what the host has seen in `outcome`."""


class PiecewiseAgreement(ScaleAgreement):
    """On a CPU, piece by piece.

    The first piece is measured at once. Nothing is sent before the first `require`.

    Args:
        layout: how the tensor is cut.
        pieces: its frames, see `pieces_of`.
        block: elements that share a scale.
        measure: returns what this rank measured of some frames, see `quantize.measure`.
        agree: begins to replace that by its maximum over ranks, and returns a function that waits for it.
        derive: takes such a maximum and the layout that it belongs to. Returns scales, or the reason to go plain.
    """

    def __init__(
        self,
        layout: Layout,
        pieces: list[range],
        block: int,
        measure: Callable[[range], Tensor],
        agree: Callable[[Tensor], Callable[[], None]],
        derive: Callable[[Tensor, Layout], Scales | object],
    ):
        super().__init__()
        self._layout = layout
        self._pieces = pieces
        self._block = block
        self._measure = measure
        self._agree = agree
        self._derive = derive
        self._measured = [measure(pieces[0])]  # of pieces so far; when they are agreed on, by all ranks
        self._agreements: list[Callable[[], None]] = []
        self._agreed = 0  # pieces
        self._whole_decides = len(pieces) == 1  # also once a piece by itself would have to go plain

    @property
    def complete(self) -> bool:
        return self._agreed == len(self._pieces)

    def require(self, frames: int) -> None:
        while not self.complete and (self._whole_decides or frames > self._pieces[self._agreed].start):
            self._begin()
            self._end()
        # The next piece is measured, and its agreement begins, when the first frame of this one has been coded of each
        # segment that this rank sends: the link has something to carry then.
        if not self.complete and frames > self._pieces[self._agreed - 1].start + 1:
            self._begin()

    def hand_over_first(self) -> Tensor:
        """What this rank measured of the first piece, for the caller to replace by its maximum over ranks."""
        self._agreements.append(lambda: None)
        return self._measured[0]

    def _begin(self) -> None:
        """Begin to agree on the next piece, unless that was begun."""
        next = self._agreed
        if next == len(self._agreements):
            if next == len(self._measured):
                self._measured.append(self._measure(self._pieces[next]))
            self._agreements.append(self._agree(self._measured[next]))

    def _end(self) -> None:
        """Wait until the next piece is agreed on, and find its steps."""
        piece, measured = self._pieces[self._agreed], self._measured[self._agreed]
        self._agreements[self._agreed]()
        self._agreed += 1
        if not self._whole_decides:
            found = self._derive(measured, self._layout.cut(piece))
            if isinstance(found, Scales):
                self._fill_in(piece, found)
            else:
                self._whole_decides = True
        if self._whole_decides and self.complete:
            self._judge_the_whole()

    def _fill_in(self, frames: range, found: Scales) -> None:
        if self.scales is None:
            self.scales = Scales(*(each.new_zeros(self._layout.steps) for each in (found.inverse_steps, found.scales)))
        cut = self._layout.cut(frames)
        for segment in range(len(cut.lengths)):
            here, there = self._layout.run_steps(segment, frames), cut.steps_of(range(segment, segment + 1))
            self.scales.inverse_steps[here] = found.inverse_steps[there]
            self.scales.scales[here] = found.scales[there]

    def _judge_the_whole(self) -> None:
        """A piece may be worse than the whole; and the reason to go plain must not depend on how the tensor is cut."""
        pieces = list(zip(self._pieces, self._measured))
        found = self._derive(joined(pieces, self._layout, self._block), self._layout)
        if not isinstance(found, Scales):
            self.bypass = found
        elif self.scales is None:
            self.scales = found
        else:
            self._fill_in(range(self._layout.frames), found)


class DeviceAgreement(ScaleAgreement):
    """On a GPU, of all frames at once. All of it is queued on the stream.

    Args:
        measured: what this rank measured, see `quantize.measure_on_gpu`.
        agree: replaces that by its maximum over ranks.
        derive: takes the maximum, and returns the scales and the outcome, see `quantize.derive_on_gpu`.
        judge: takes these once the host has seen the outcome. Returns the reason to go plain, or None.
    """

    def __init__(
        self,
        measured: Tensor,
        agree: Callable[[Tensor], None],
        derive: Callable[[Tensor], tuple[Scales, Tensor]],
        judge: Callable[[Scales, list[int]], object | None],
    ):
        super().__init__()
        self._measured = measured
        self._agree = agree
        self._derive = derive
        self._judge = judge

    @property
    def complete(self) -> bool:
        return self.scales is not None and self.outcome is None

    def require(self, frames: int) -> None:
        if self.scales is None:
            self._agree(self._measured)
            self.scales, self.outcome = self._derive(self._measured)

    def learn(self, outcome: list[int]) -> None:
        self.bypass = self._judge(self.scales, outcome)
        self.outcome = None
