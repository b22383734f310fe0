"""What a schedule does with the tensor of one call, however that is coded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from .layout import Layout, Window


class CodedTensor(NamedTuple):
    """A tensor that is encoded, and one that decoded values go to.

    Attributes:
        layout: how it is cut.
        source: this rank's values; None where nothing is encoded.
        output: where decoded values go; it may be the memory of `source`. None where nothing is decoded.
    """

    layout: Layout
    source: Window | None = None
    output: Window | None = None

    def part(self, segments: range) -> CodedTensor:
        """Some neighbouring segments by themselves, which are numbered from 0."""
        start = self.layout.elements(segments).start
        return CodedTensor(self.layout.part(segments), self.source.counted_from(start), self.output.counted_from(start))


class Codec(ABC):
    """Encodes what this rank holds, and decodes into where the result belongs.

    Attributes:
        tensor: what is encoded and decoded.
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
        """The reason why the call must go plain after all, if it turned out that it must."""
        return None

    @abstractmethod
    def part(self, segments: range) -> Codec:
        """The codec of some neighbouring segments by themselves, which are numbered from 0."""

    @abstractmethod
    def finish(self) -> None:
        """Return once all that was asked for is done."""
