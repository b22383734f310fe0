"""How ranks meet, and what they tell each other before their first compressed collective."""

from __future__ import annotations

import hashlib
import json

import torch
import torch.distributed as dist

from ..kernels.format import VERSION
from ..version import __version__
from .config import Config
from .errors import MismatchError, NczError, PeerError


def meet(ranks: list[int], purpose: str) -> dist.Store:
    """A corner of the store that these global ranks, and only they, share for one purpose, one time.

    All of `ranks` must call this, in the same order relative to their other meetings. Counting in
    the store itself, not in each process, keeps the ranks in step whatever else each of them did.
    """
    store = dist.distributed_c10d._get_default_store()
    name = f"ncz/{purpose}/{hashlib.sha256(repr(ranks).encode()).hexdigest()}"
    met_before = (store.add(f"{name}/members", 1) - 1) // len(ranks)
    return dist.PrefixStore(f"{name}/{met_before}", store)


def compare_ranks(store: dist.Store, rank: int, world_size: int, config: Config | NczError | None) -> None:
    """Raise MismatchError on every rank unless all run the same versions with the same configuration.

    Args:
        store: what `meet` returned; `rank` counts within those who met.
        config: None where compression is off; where it can't be on, the error that says why.

    The first rank reads what all wrote and publishes the verdict, so that nobody is left waiting.
    Raises PeerError on every rank if one does not show up within the store's time-out.
    """
    mine = {"version": __version__, "frame version": VERSION}
    if isinstance(config, Config):
        mine |= {"compression": "on", **json.loads(config.canonical())}
    else:
        mine |= {"compression": "off" if config is None else f"refused: {config}"}
    store.set(f"rank {rank}", json.dumps(mine))
    if rank == 0:
        store.set("verdict", _verdict(store, world_size))
    try:
        verdict = store.get("verdict").decode()
    except RuntimeError as error:
        raise PeerError(f"rank 0 of {world_size} did not compare configurations in time: {error}") from error
    if verdict.startswith("differ"):
        raise MismatchError(f"ranks {verdict}. All must run the same ncz_plugins with the same configuration")
    if verdict:
        raise PeerError(verdict)


class Comparison:
    """Whether all ranks hold the same numbers, found out by a MAX all-reduce of the numbers and their negatives.

    Args:
        numbers: this rank's, each with what it stands for.

    Attributes:
        tensor: to be replaced by its element-wise maximum over ranks, before `differing` is called.
    """

    def __init__(self, numbers: dict[str, int]):
        self._names = list(numbers)
        self.tensor = torch.tensor([*numbers.values(), *(-number for number in numbers.values())])

    def differing(self) -> dict[str, tuple[int, int]]:
        """The lowest and the highest of what is not the same on all ranks."""
        highest, negated = self.tensor.view(2, -1).tolist()
        ends = {name: (-low, high) for name, low, high in zip(self._names, negated, highest)}
        return {name: (low, high) for name, (low, high) in ends.items() if low != high}


def _verdict(store: dist.Store, world_size: int) -> str:
    """Empty if all ranks are alike."""
    everyone = []
    for rank in range(world_size):
        try:
            everyone.append(_flat(json.loads(store.get(f"rank {rank}"))))
        except RuntimeError:
            return (
                f"rank {rank} of {world_size} did not say how it is configured in time: "
                "it died, or does not import ncz_plugins where the others do"
            )
    differences = []
    for key in everyone[0]:
        if any(key not in one for one in everyone):
            continue  # a setting of ranks where compression is on, which they have not all in common
        ranks_of: dict[str, list[int]] = {}
        for rank, one in enumerate(everyone):
            ranks_of.setdefault(json.dumps(one[key]), []).append(rank)
        if len(ranks_of) > 1:
            differences.append(f"{key} is " + ", ".join(f"{v} on {_named(ranks)}" for v, ranks in ranks_of.items()))
    return "differ: " + "; ".join(differences) if differences else ""


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _flat(tree: dict, prefix: str = "") -> dict[str, object]:
    flat = {}
    for key, value in tree.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat
