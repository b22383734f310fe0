"""Interface between schedules and codecs: a `CodedTensor` is what is coded, a `Codec` codes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from .layout import Layout, Window


class CodedTensor(NamedTuple):
    """Tensor to encode and tensor to decode into, cut by one layout.

    Attributes:
        layout: the segments and frames of both.
        source: this rank's values; None if nothing is encoded.
        output: where decoded values go; may share memory with `source`. None if nothing is decoded.
    """

    layout: Layout
    source: Window | None = None
    output: Window | None = None

    def for_segments(self, segments: range) -> CodedTensor:
        """The same tensors, limited to neighbouring segments. The first of `segments` becomes segment 0."""
        start = self.layout.elements(segments).start
        return CodedTensor(
            self.layout.for_segments(segments), self.source.counted_from(start), self.output.counted_from(start)
        )


class Codec(ABC):
    """Encoder of this rank's values and decoder of results, for one call.

    Attributes:
        tensor: the tensors to encode and to decode into.
    """

    tensor: CodedTensor

    @property
    def layout(self) -> Layout:
        return self.tensor.layout

    @property
    def source(self) -> Window:
        return self.tensor.source

    @property
    def output(self) -> Window:
        return self.tensor.output

    @property
    def bypass(self) -> object | None:
        """The reason why the call must go plain, if that was found out after it began; else None."""
        return None

    @abstractmethod
    def for_segments(self, segments: range) -> Codec:
        """A codec for neighbouring segments only. The first of `segments` becomes segment 0."""

    @abstractmethod
    def finish(self) -> None:
        """Return once all encoding and decoding is done."""


class ExchangingCodec(Codec):
    """Codec of pieces that ranks send each other, where nothing is summed.

    Attributes:
        tensor: its layout has a segment for each rank: the piece that goes there. `source` holds all of them.
        received: its layout has a segment for each rank: the piece that comes from there. `output` holds all of them.
    """

    received: CodedTensor

    def copy_own(self, rank: int) -> None:
        """Copy the piece that stays on this rank, with every bit."""
        own = self.source[self.layout.segment(rank)]
        self.received.output[self.received.layout.segment(rank)].copy_(own)

    def for_segments(self, segments: range) -> Codec:
        raise NotImplementedError("pieces are exchanged between all ranks at once")
