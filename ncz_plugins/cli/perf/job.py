"""Job that all ranks of `ncz perf` get, and the collectives and data to choose from. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple


class Collective(NamedTuple):
    """What a collective takes and gives.

    Attributes:
        bus_share: takes the number of ranks; returns the share of the data that a bandwidth-optimal collective moves
            through each. As in nccl-tests, busbw is algbw times this.
        parts: "input" if a rank passes its part and gets all of them, "output" if it gets one part of many, "both" if
            it passes and gets many; "" if there are no parts.
        is_sum: whether it adds.
        to_root: whether rank 0 alone gets the result.
    """

    bus_share: Callable[[int], float]
    parts: str = ""
    is_sum: bool = False
    to_root: bool = False


def _all(ranks: int) -> float:
    return 1.0


def _of_others(ranks: int) -> float:
    return (ranks - 1) / ranks


COLLECTIVES = {
    "all_reduce": Collective(lambda ranks: 2 * (ranks - 1) / ranks, is_sum=True),
    "reduce_scatter": Collective(_of_others, "output", is_sum=True),
    "reduce": Collective(_all, is_sum=True, to_root=True),
    "all_gather": Collective(_of_others, "input"),
    "gather": Collective(_of_others, "input", to_root=True),
    "broadcast": Collective(_all),
    "scatter": Collective(_of_others, "output"),
    "all_to_all": Collective(_of_others, "both"),
    "sendrecv": Collective(_all),
}

# Data to send, besides files. Each rank has different values, which are the same in every run.
DATA = {
    "gradient": "gradients of a 1.9 M-parameter GPT after 100 steps of training on Python's own documentation, batch "
    "after batch at the same weights",
    "field": "smooth random fields of 128^3 points with Kolmogorov's spectrum of turbulence",
    "noise": "Gaussian noise of variance 1",
    "activation": "hidden states of that GPT, token after token, as they enter its MLPs; ncz sends them as `role: "
    "activation` says",
    "weights": "for all_gather, bfloat16 weights of that GPT before and after a step of AdamW at 1e-3, in turns: ncz "
    "sends them without loss, as changes",
}


@dataclass(frozen=True)
class Job:
    """Job of all ranks, sent to them as JSON.

    Attributes:
        collective: a key of COLLECTIVES.
        sizes: bytes of the whole tensor, ascending.
        peers: keys of `contenders.CONTENDERS` in the order of their turns, including "plain" and "ncz".
        data: key of DATA, or path of an .npy file.
        config: settings of the contender "ncz", as a mapping.
        repeat: number of timed rounds; None for as many as fit into 2 seconds.
        trace: whether to record one call of the largest size.
        timeout: time limit of one exchange, in seconds.
    """

    collective: str
    sizes: list[int]
    peers: list[str]
    data: str
    config: dict[str, Any]
    repeat: int | None
    trace: bool
    timeout: float

    @property
    def role(self) -> str | None:
        """Role of the tensors. Weights are two versions in bfloat16 in turns; other data are float32, never changed."""
        return {"weights": "parameter", "activation": "activation"}.get(self.data)

    @property
    def dtype(self) -> str:
        """dtype of the data, by its name in torch."""
        return "bfloat16" if self.role == "parameter" else "float32"

    @property
    def itemsize(self) -> int:
        """Bytes of a value."""
        return 2 if self.role == "parameter" else 4
