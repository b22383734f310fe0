"""A mixture-of-experts GPT with simulated ranks: what they send each other passes through this library's codecs.

Each rank has some of the experts and some of the sequences. The rows of tokens travel to the experts that a router
chose (dispatch), results travel back (combine), and in the backward pass the gradients of both take the same ways.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from tasks import GPT, GPTConfig
from torch import Tensor, nn

from ncz_plugins.core.codec.coded_tensor import CodedTensor
from ncz_plugins.core.codec.fixed_rate import FixedRateCodec
from ncz_plugins.core.codec.from_config import noise_for
from ncz_plugins.core.codec.layout import Layout, Window
from ncz_plugins.core.codec.pieces import PiecesCodec
from ncz_plugins.core.config import Config, QuantizerConfig
from ncz_plugins.core.runtime.device import Host
from ncz_plugins.core.runtime.statistics import Counters
from ncz_plugins.kernels.format import Noise, Rows

RANKS, EXPERTS, CHOSEN = 4, 8, 2
BALANCE = 0.01  # weight of the loss that spreads tokens over experts (Fedus et al., 2021, arXiv 2101.03961)
NUDGE = 1e-6  # how much of a value a nudge changes
FRAME_ELEMENTS = 1 << 20
FLOATS = {"bf16": torch.bfloat16, "E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
SCALE_BITS = 32  # of each row, for floats of 8 bits

Table = list[list[int]]  # how many rows each rank sends to each rank


class Way(NamedTuple):
    """How rows travel from one rank to another.

    Attributes:
        kind: "plain"; "nudged", each value changed by up to a millionth, to show what chance does to a training; a key
            of FLOATS, those of 8 bits relative to the largest magnitude of a row, as DeepSeek-V3 and torchao have it;
            else the kind of a quantizer.
        mode, value, block: settings of the quantizer.
    """

    kind: str
    mode: str = ""
    value: float = 0.0
    block: int = 0

    @classmethod
    def of(cls, quantizer: QuantizerConfig) -> Way:
        """That of a configuration."""
        return cls(quantizer.kind_in_effect, quantizer.mode, quantizer.value, quantizer.block_in_effect)

    def describe(self) -> str:
        """A few words: "stochastic, rms 0.1 per 128"."""
        if not self.mode:
            return self.kind
        if self.mode == "bits":
            return f"{self.kind}, {self.value:g} bits"
        return f"{self.kind}, {self.mode} {self.value:g} per {self.block}"


class Link:
    """Rows on their way between the ranks, in one direction, and the bits that they take.

    Args:
        seed: of random rounding.
        gbps: for which the coder is chosen; see `coding_for`.

    Attributes:
        values, sent_bytes: values that went from one rank to another, and what they took. Casts and plain rows count as
            many bytes as they would take.
    """

    def __init__(self, way: Way, seed: int = 0, gbps: float = 0.1):
        self.way = way
        self.values = self.sent_bytes = 0
        self._calls = 0
        self._generator = torch.Generator().manual_seed(seed)
        self._device = Host()
        self._gbps = gbps
        if way.mode:
            block = way.block or None
            quantizer = {"kind": way.kind, "mode": way.mode, "value": way.value, "block": block, "seed": seed}
            self._config = Config(quantizer=quantizer)

    def __call__(self, rows: Tensor, table: Table) -> Tensor:
        """Send rows. Those that stay on their rank keep every bit.

        Args:
            rows: of all ranks, one rank after another, ordered by the rank that each goes to, [rows, width].

        Returns the rows as they arrive, one rank after another, ordered by the rank that each comes from.
        """
        self._calls += 1
        moves = torch.tensor([i != j for i in range(RANKS) for j in range(RANKS)])
        moves = moves.repeat_interleave(torch.tensor(table).view(-1))
        moving = rows[moves]
        self.values += moving.numel()
        arrived = rows.clone()
        arrived[moves] = self._sent(moving)
        return arranged(arrived, table)

    @property
    def bits(self) -> float:
        """Per value that was sent."""
        return 8 * self.sent_bytes / max(1, self.values)

    def _sent(self, rows: Tensor) -> Tensor:
        """What is left of rows that change their rank."""
        if not self.way.mode:
            self.sent_bytes += rows.numel() * self._bits(rows.shape[1]) / 8
            return self._cast(rows)
        output = torch.empty_like(rows)
        noise = noise_for(self._config, self._calls, addend=0, addends=1)
        send = self._pack if self.way.mode == "bits" else self._code
        send(rows.view(-1), output.view(-1), noise)
        return output

    def _bits(self, width: int) -> float:
        """Bits of a value without a quantizer, with its share of the row's scale."""
        if self.way.kind not in FLOATS:
            return 32
        bits = 8 * FLOATS[self.way.kind].itemsize
        return bits if bits > 8 else bits + SCALE_BITS / width

    def _cast(self, rows: Tensor) -> Tensor:
        if self.way.kind == "plain":
            return rows
        if self.way.kind == "nudged":
            return rows * (1 + NUDGE * (2 * torch.rand(rows.shape, generator=self._generator) - 1))
        dtype = FLOATS[self.way.kind]
        if dtype.itemsize > 1:
            return rows.to(dtype).float()
        scale = (rows.abs().amax(1, keepdim=True) / torch.finfo(dtype).max).clamp_min(1e-30)
        return (rows / scale).to(dtype).float() * scale

    def _code(self, source: Tensor, output: Tensor, noise: Noise | None) -> None:
        """Write the frames of an exchange, and read them, as if all rows went to one rank.

        Where a block is one row, its steps don't depend on the rank that the row goes to.
        """
        self._device.after(None)
        none, going, coming = (Layout.of(n, FRAME_ELEMENTS, True) for n in ([0, 0], [0, len(source)], [len(source), 0]))
        nothing = Window(torch.empty(0))
        ends = (
            (CodedTensor(going, Window(source)), CodedTensor(none, output=nothing)),
            (CodedTensor(none, nothing), CodedTensor(coming, output=Window(output))),
        )
        sender, receiver = (
            PiecesCodec(rank, self._config, self._device, *each, Counters(), self._gbps, 0.0, noise)
            for rank, each in enumerate(ends)
        )
        (_, head), (place, _) = sender.heads[0], receiver.heads[1]
        place.copy_(head)
        self.sent_bytes += head.nbytes
        for index, frame in enumerate(sender.encode(1)):
            receiver.decode(0, index, frame)
            self.sent_bytes += frame.nbytes
        receiver.finish()

    def _pack(self, source: Tensor, output: Tensor, noise: Noise | None) -> None:
        """The same at a fixed rate."""
        tensor = CodedTensor(Layout.of([len(source)], FRAME_ELEMENTS), Window(source), Window(output))
        codec = FixedRateCodec(self._device.backend, tensor, self._config.quantizer.bits, Counters(), noise)
        rows = Rows.of(len(source), 1, len(source))
        magnitudes = codec.magnitudes(rows)
        packed = codec.pack(rows, magnitudes)
        codec.unpack_sum(packed, 1, rows, magnitudes, range(1))
        self.sent_bytes += packed.nbytes + magnitudes.nbytes


def arranged(rows: Tensor, table: Table) -> Tensor:
    """Rows in the order in which they arrive: see `Link`."""
    pieces = rows.split([count for row in table for count in row])
    return torch.cat([pieces[i * RANKS + j] for j in range(RANKS) for i in range(RANKS)])


def transposed(table: Table) -> Table:
    """How many rows travel back."""
    return [list(column) for column in zip(*table)]


class Exchange(torch.autograd.Function):
    """Rows by one link, and their gradients back by another."""

    @staticmethod
    def forward(ctx, rows: Tensor, table: Table, there: Link, back: Link) -> Tensor:
        ctx.table, ctx.back = transposed(table), back
        return there(rows, table)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return ctx.back(gradient.contiguous(), ctx.table), None, None, None


class Links(NamedTuple):
    """The four ways of a layer of experts; all layers share them."""

    dispatch: Link
    combine: Link
    dispatch_back: Link
    combine_back: Link


class Experts(nn.Module):
    """Feed-forward networks of which a router chooses some for each token, in place of a single one.

    Attributes:
        balance: the loss of the last call that spreads tokens over experts; 1 if all get as many.
    """

    def __init__(self, config: GPTConfig, links: Links):
        super().__init__()
        hidden = 4 * config.width // CHOSEN  # so that as many weights work for a token as without experts
        self.links = links
        self.router = nn.Linear(config.width, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(config.width, hidden), nn.GELU(), nn.Linear(hidden, config.width))
            for _ in range(EXPERTS)
        )
        self.apply(GPT._initialize)
        for expert in self.experts:
            nn.init.normal_(expert[-1].weight, std=0.02 / (2 * config.layers) ** 0.5)
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        # Choose the experts of each token.
        tokens = x.reshape(-1, x.shape[-1])
        scores = self.router(tokens).softmax(1)
        weights, chosen = scores.topk(CHOSEN, 1)
        weights = weights / weights.sum(1, keepdim=True)
        share = F.one_hot(chosen, EXPERTS).float().mean((0, 1))
        self.balance = EXPERTS * (share * scores.mean(0)).sum()

        # Order the rows by the rank that they are on, then by expert. All ranks have as many tokens and experts.
        expert = chosen.view(-1)
        token = torch.arange(len(tokens)).repeat_interleave(CHOSEN)
        key = token // (len(tokens) // RANKS) * EXPERTS + expert
        order = key.argsort(stable=True)
        counts = torch.bincount(key, minlength=RANKS * EXPERTS).view(RANKS, EXPERTS)
        table = counts.view(RANKS, RANKS, -1).sum(2).tolist()

        # To the experts, and back.
        arrived = Exchange.apply(tokens[token[order]], table, self.links.dispatch, self.links.dispatch_back)
        by_expert = arranged(expert[order], table).argsort(stable=True)
        of_experts = arrived[by_expert].split(counts.sum(0).tolist())
        results = torch.cat([expert(rows) for expert, rows in zip(self.experts, of_experts)])
        results = results[by_expert.argsort()]
        returned = Exchange.apply(results, transposed(table), self.links.combine, self.links.combine_back)

        # Mix what the experts of a token say.
        mixed = returned[order.argsort()].view(len(tokens), CHOSEN, -1) * weights[:, :, None]
        return mixed.sum(1).view(x.shape)


class ExpertsGPT(GPT):
    """The examples' GPT with experts in every block."""

    def __init__(self, config: GPTConfig, links: Links):
        super().__init__(config)
        for block in self.blocks:
            block.mlp = Experts(config, links)

    def travel(self, links: Links) -> None:
        """Let rows take other links from now on."""
        for block in self.blocks:
            block.mlp.links = links

    @property
    def balance(self) -> Tensor:
        """The mean of the layers' losses that spread tokens over experts."""
        return torch.stack([block.mlp.balance for block in self.blocks]).mean()

    def active_parameters(self) -> int:
        """How many work for a token."""
        of_experts = sum(p.numel() for block in self.blocks for p in block.mlp.experts.parameters())
        return self.parameter_count() - of_experts * (EXPERTS - CHOSEN) // EXPERTS
