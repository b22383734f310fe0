"""Job that all ranks of `ncz perf` get, and the collectives and data to choose from. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "sendrecv")

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
        collective: one of COLLECTIVES.
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
