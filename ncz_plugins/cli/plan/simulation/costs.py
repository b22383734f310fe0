"""What it costs a rank to code, to send and to call, apart from the time that bytes spend on a link."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from ....core.config import CoderCosts

_OTHER_VALUES = 0.75  # of all values at the default bound: the share of those other than the most frequent one

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class CodingCosts(BaseModel):
    """Of one value, in picoseconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    encode: Amount
    decode: Amount


class Costs(BaseModel):
    """What a rank spends, on a core that it has for itself; of a GPU, what passes before its next operation can begin.

    Attributes:
        kind: where tensors live. GPUs code all frames of a call at once, CPUs one after the other.
        source: where the figures come from, with the date.
        call_us: of each compressed call, whatever its size, in microseconds.
        fixed_rate_call_us: of each call at a fixed rate on a GPU, whose messages cost what those of plain calls do;
            None: as others.
        message_us: to send one message and to receive one.
        socket_ps: to send one byte and to receive one, in picoseconds.
        measure_ps: to find the scale of one value.
        coders: by the name of the coder, as kernels take it by themselves.
        coding_times: what coding takes in a call, where it shares memory with the network, times that.
        plain_call_us: of each uncompressed call of the runtime beneath.
        plain_message_us: of each of its steps, in which it sends one message and receives one.
        plain_ps: of each byte that it sends, beside `socket_ps`: to add it up, and to copy it.
        cast_ps: to turn a value into bfloat16 and back.
        local_gbps: at which the ranks of a node exchange what they add up among themselves, in Gbit/s.
        local_us: of each of the two stages of a call in which they do.
        link_share: of a link's nominal rate, what is left for payload beside headers.
        error: how far predictions were off where they were compared with measurements, as a share; half of all were
            closer. None where nothing was compared.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["cpu", "gpu"]
    source: str
    call_us: Amount
    fixed_rate_call_us: Amount | None = None
    message_us: Amount
    socket_ps: Amount
    measure_ps: Amount
    coders: dict[str, CodingCosts]
    coding_times: Amount
    plain_call_us: Amount
    plain_message_us: Amount
    plain_ps: Amount
    cast_ps: Amount
    local_gbps: Annotated[float, Field(gt=0)]
    local_us: Amount
    link_share: Annotated[float, Field(gt=0, le=1)]
    error: Amount | None = None

    @property
    def at_a_fixed_rate(self) -> Costs:
        """Of calls at a fixed rate: on a GPU no host has a part in their messages."""
        if self.fixed_rate_call_us is None:
            return self
        return self.model_copy(update={"call_us": self.fixed_rate_call_us, "message_us": self.plain_message_us})

    def with_coders(self, measured: CoderCosts, source: str) -> Costs:
        """The same with what `ncz tune` measured of coders: encoding and decoding together, which count half each.

        Args:
            source: where that stands.
        """
        rans = measured.rans + _OTHER_VALUES * measured.rans_rest
        found = {"raw": measured.raw, "fixed": measured.fixed, "huffman": measured.huffman, "rans": rans}
        halves = {name: CodingCosts(encode=both / 2, decode=both / 2) for name, both in found.items()}
        source = f"{self.source.strip().removesuffix('.')}, coders from {source}"
        return self.model_copy(update={"coders": self.coders | halves, "source": source})
