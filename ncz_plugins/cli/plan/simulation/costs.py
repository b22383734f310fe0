"""Costs of a rank: coding, messages and calls, without the time that bytes spend on a link."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from ....core.config import CoderCosts
from ....core.schedules.choice import MESSAGE_US

_OTHER_VALUES_SHARE = 0.75  # share of values other than the most frequent one, at the default bound

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class CodingCosts(BaseModel):
    """Costs of coding one value, in picoseconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    encode: Amount
    decode: Amount


class Costs(BaseModel):
    """Costs of a rank that has a core of its own; on a GPU, time until the next operation can begin.

    Names end in the unit: us for microseconds, ps for picoseconds.

    Attributes:
        kind: where tensors live. GPUs code all frames of a call at once, CPUs one after another.
        source: source of the numbers, with the date.
        call_us: constant cost of a compressed call.
        fixed_rate_call_us: constant cost of a call at a fixed rate on a GPU, whose messages cost as much as those of
            plain calls; None: as other calls.
        message_us: sending one message and receiving one; by default what `transport.schedule: auto` chooses by.
        socket_ps: sending one byte and receiving one.
        measure_ps: finding the scale of one value.
        coders: name of a coder -> costs, measured with the kernels alone.
        coding_times: factor on these costs in a call, where coding shares memory with the network.
        plain_call_us: constant cost of an uncompressed call.
        plain_message_us: one step of an uncompressed call, which sends one message and receives one.
        plain_ps: adding and copying one byte in an uncompressed call, in addition to `socket_ps`.
        cast_ps: casting one value to bfloat16 and back.
        local_gbps: rate of the exchange inside a node, in Gbit/s.
        local_us: constant cost of each of the two stages of a call that exchange inside a node.
        link_share: share of a link's nominal rate that remains for payload, without headers.
        error: median relative error of predictions that were compared with measurements; None if none were.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["cpu", "gpu"]
    source: str
    call_us: Amount
    fixed_rate_call_us: Amount | None = None
    message_us: Amount = MESSAGE_US
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
        """Costs of calls at a fixed rate. On a GPU, the host takes no part in their messages."""
        if self.fixed_rate_call_us is None:
            return self
        return self.model_copy(update={"call_us": self.fixed_rate_call_us, "message_us": self.plain_message_us})

    def with_coders(self, measured: CoderCosts, source: str) -> Costs:
        """A copy with costs of coders that `ncz tune` measured, half for encoding and half for decoding.

        Args:
            measured: costs of encoding and decoding together, in picoseconds per value.
            source: file or setting with these costs.
        """
        rans = measured.rans + _OTHER_VALUES_SHARE * measured.rans_rest
        found = {"raw": measured.raw, "fixed": measured.fixed, "huffman": measured.huffman, "rans": rans}
        halves = {name: CodingCosts(encode=both / 2, decode=both / 2) for name, both in found.items()}
        source = f"{self.source.strip().removesuffix('.')}, coders from {source}"
        return self.model_copy(update={"coders": self.coders | halves, "source": source})
