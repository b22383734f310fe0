"""How ranks meet, and what they compare before their first compressed collective."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ...kernels.format import VERSION
from ...version import __version__
from ..config import Config
from ..errors import MismatchError, NczError, PeerError

_READ_WITHIN = timedelta(seconds=5)
_ADDRESS_BYTES = 512  # a host's name has 253 at most


def meet(ranks: list[int], purpose: str) -> dist.Store:
    """A prefix of the default store that these global ranks, and only they, share for one purpose, once.

    All of `ranks` must call this, in the same order relative to their other meetings. The meetings are counted in the
    store itself and not in each process, so that the ranks agree on the number whatever else each of them did.
    """
    store = dist.distributed_c10d._get_default_store()
    name = f"ncz/{purpose}/{hashlib.sha256(repr(ranks).encode()).hexdigest()}"
    met_before = (store.add(f"{name}/members", 1) - 1) // len(ranks)
    return dist.PrefixStore(f"{name}/{met_before}", store)


def open_store(
    rank: int, world_size: int, timeout: timedelta, host: str, broadcast: Callable[[Tensor], Tensor]
) -> dist.Store:
    """A new store for ranks that meet without torch.distributed. All of them must call this. Rank 0 serves it.

    Args:
        host: the name by which other machines reach the machine of rank 0.
        broadcast: takes a tensor, uint8, [n], and returns that of rank 0. The address travels in it as JSON:
            Horovod's function for broadcasting objects would unpickle it, which runs what a peer sends.
    """
    store, address = None, torch.zeros(_ADDRESS_BYTES, dtype=torch.uint8)
    if rank == 0:
        store = dist.TCPStore("0.0.0.0", 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        text = json.dumps([host, store.port]).encode().ljust(_ADDRESS_BYTES)
        address = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    host, port = json.loads(broadcast(address).numpy().tobytes())
    return store or dist.TCPStore(host, port, world_size, is_master=False, timeout=timeout)


def compare_ranks(store: dist.Store, rank: int, world_size: int, config: Config | NczError | None) -> None:
    """Raise MismatchError on every rank unless all run the same versions with the same configuration.

    Rank 0 reads what all ranks wrote and publishes the verdict, so that no rank is left waiting.

    Args:
        store: what `meet` returned.
        rank, world_size: within the ranks that met.
        config: None where compression is off. Where it can't be on, the error that says why.

    Raises PeerError on every rank if one does not come within `transport.timeout_seconds`, or if that is not set,
    within the store's time-out.
    """
    store.set(f"rank {rank}", json.dumps(described(config)))
    seconds = config.transport.timeout_seconds if isinstance(config, Config) else None
    timeout = store.timeout if seconds is None else timedelta(seconds=seconds)
    if rank == 0:
        store.set("verdict", _verdict(store, world_size, timeout))
    try:
        store.wait(["verdict"], 2 * timeout)  # rank 0 may need one time-out to find that a rank does not come
        verdict = store.get("verdict").decode()
    except RuntimeError as error:
        raise PeerError(f"rank 0 of {world_size} did not compare configurations in time: {error}") from error
    if verdict.startswith("differ"):
        _await_readers(store, world_size)
        raise MismatchError(f"ranks {verdict}. All must run the same ncz_plugins with the same configuration")
    if verdict:
        raise PeerError(verdict)


def _await_readers(store: dist.Store, world_size: int) -> None:
    """Wait for a moment until all ranks have read the verdict: the store ends with the rank that serves it."""
    with suppress(RuntimeError):
        if store.add("readers", 1) == world_size:
            store.set("read", "")
        store.wait(["read"], _READ_WITHIN)


def described(config: Config | NczError | None) -> dict[str, object]:
    """What all ranks must have in common, ready for JSON. See `compare_ranks`."""
    mine = {"version": __version__, "frame version": VERSION}
    if isinstance(config, Config):
        return mine | {"compression": "on"} | _flat(json.loads(config.canonical()))
    return mine | {"compression": "off" if config is None else f"refused: {config}"}


def differences(everyone: list[dict[str, object]], ranks: Sequence[int] | None = None) -> str:
    """How ranks differ, in words; empty if they don't.

    Args:
        everyone: what each rank has of things by their names, in rank order; say, what `described` returned.
        ranks: what to call the ranks; None: by their places in `everyone`.
    """
    ranks = range(len(everyone)) if ranks is None else ranks
    found = []
    for key in everyone[0]:
        if any(key not in one for one in everyone):
            continue  # a setting, and ranks where compression is off have none: "compression" differs then
        ranks_of: dict[str, list[int]] = {}
        for rank, one in zip(ranks, everyone):
            ranks_of.setdefault(json.dumps(one[key]), []).append(rank)
        if len(ranks_of) > 1:
            found.append(f"{key} is " + ", ".join(f"{v} on {_named(ranks)}" for v, ranks in ranks_of.items()))
    return "; ".join(found)


def _verdict(store: dist.Store, world_size: int, timeout: timedelta) -> str:
    """How the ranks differ, or which one did not come; empty if all is well."""
    everyone = []
    deadline = time.monotonic() + timeout.total_seconds()
    for rank in range(world_size):
        try:
            store.wait([f"rank {rank}"], timedelta(seconds=max(0.001, deadline - time.monotonic())))
            everyone.append(json.loads(store.get(f"rank {rank}")))
        except RuntimeError:
            return (
                f"rank {rank} of {world_size} did not say how it is configured in time: "
                "it died, or does not import ncz_plugins where the others do"
            )
    found = differences(everyone)
    return f"differ: {found}" if found else ""


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _flat(tree: dict, prefix: str = "") -> dict[str, object]:
    flat = {}
    for key, value in tree.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat
