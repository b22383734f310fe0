"""What `ncz perf` measures: collectives, data, and the job that all ranks get. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")

# What there is to send beside files. Every rank has values of its own, the same ones in every run.
DATA = {
    "gradient": "gradients of a 1.9 M-parameter GPT after 100 steps of training on Python's own documentation, batch "
    "after batch at the same weights",
    "field": "smooth random fields of 128^3 points with Kolmogorov's spectrum of turbulence",
    "noise": "Gaussian noise of variance 1",
    "weights": "for all_gather, bfloat16 weights of that GPT before and after a step of AdamW at 1e-3, in turns: ncz "
    "sends them without loss, as changes",
}


@dataclass(frozen=True)
class Job:
    """What all ranks measure. It travels to them as JSON.

    Attributes:
        collective: one of COLLECTIVES.
        sizes: bytes of the whole tensor, ascending.
        peers: names in `contenders.CONTENDERS`, in the order of their turns; "plain" and "ncz" are among them.
        data: one of DATA, or an .npy file.
        config: of the contender "ncz", as a mapping.
        link: the rate of the link as --link has it; None for the network as it is.
        repeat: rounds that are timed; None for as many as fit into a few seconds.
        trace: whether to record what happens inside one call of the largest size.
        timeout: seconds that no single exchange may take.
    """

    collective: str
    sizes: list[int]
    peers: list[str]
    data: str
    config: dict[str, Any]
    link: str | None
    repeat: int | None
    trace: bool
    timeout: float

    @property
    def sends_weights(self) -> bool:
        """Whether two versions of bfloat16 weights take turns; all other data is float32, and always the same."""
        return self.data == "weights"

    @property
    def dtype(self) -> str:
        """That of the data, by its name in torch."""
        return "bfloat16" if self.sends_weights else "float32"

    @property
    def itemsize(self) -> int:
        return 2 if self.sends_weights else 4
