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
from ..errors import MismatchError, NczError, PeerError, UnsupportedError
from .base import peer_errors

_READ_WITHIN = timedelta(seconds=5)
_OFF = "off"  # what a rank without compression says
_ADDRESS_BYTES = 512  # a host's name has 253 at most


def meet(ranks: Sequence[int], rank: int, purpose: str) -> dist.Store:
    """A prefix of the default store that these global ranks, and only they, share for one purpose, once.

    All of `ranks` must call this, in the same order relative to their other meetings. Nobody waits: a rank may be some
    meetings ahead. Each rank's meetings are counted in the store, not in its process, so that a process that takes the
    place of another goes on counting.

    Args:
        rank: the place of this rank among `ranks`.
    """
    store = dist.distributed_c10d._get_default_store()
    name = f"ncz/{purpose}/{hashlib.sha256(repr(list(ranks)).encode()).hexdigest()}"
    return dist.PrefixStore(f"{name}/{store.add(f'{name}/met by {rank}', 1)}", store)


def open_store(
    rank: int, world_size: int, timeout: timedelta, host: str, broadcast: Callable[[Tensor], Tensor]
) -> dist.Store:
    """A new store for ranks that meet without torch.distributed. All of them must call this. Rank 0 serves it.

    Args:
        host: the name by which other machines reach the machine of rank 0.
        broadcast: takes a tensor, uint8, [n], and returns that of rank 0. The address travels in it as JSON:
            Horovod's function for broadcasting objects would unpickle it, which runs what a peer sends.
    """
    store, address = None, torch.zeros(_ADDRESS_BYTES, dtype=torch.uint8, device="cpu")
    if rank == 0:
        store = dist.TCPStore("0.0.0.0", 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        text = json.dumps([host, store.port]).encode().ljust(_ADDRESS_BYTES)
        address = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    host, port = json.loads(broadcast(address).numpy().tobytes())
    return store or dist.TCPStore(host, port, world_size, is_master=False, timeout=timeout)


def compare_ranks(store: dist.Store, ranks: Sequence[int], rank: int, config: Config | NczError | None) -> None:
    """Raise MismatchError on every rank unless all run the same versions with the same configuration.

    A rank where compression is off says so and returns at once: nothing of this package may hold it up. The others
    raise. The first rank reads what all ranks wrote and publishes the verdict, unless compression is off there.

    Args:
        store: what `meet` returned.
        ranks: what to call the ranks that met.
        rank: the place of this rank among them.
        config: None where compression is off. Where it can't be on, the error that says why.

    Raises PeerError on every rank if one does not come within `transport.timeout_seconds`, or if that is not set,
    within the store's time-out.
    """
    store.set(f"rank {rank}", json.dumps(described(config)))
    if config is None:
        return
    seconds = config.transport.timeout_seconds if isinstance(config, Config) else None
    timeout = store.timeout if seconds is None else timedelta(seconds=seconds)
    if rank == 0:
        verdict = _publish_verdict(store, ranks, timeout)
    else:
        verdict = _await_verdict(store, ranks, rank, timeout)
    if verdict.startswith("differ"):
        raise MismatchError(f"ranks {verdict}. All must run the same ncz_plugins with the same configuration")
    if verdict:
        raise PeerError(verdict)


def _publish_verdict(store: dist.Store, ranks: Sequence[int], timeout: timedelta) -> str:
    """How the ranks differ, or which ones did not come; empty if all is well. The other ranks get the same."""
    verdict, readers = _verdict(store, ranks, timeout)
    store.add("to read", readers)
    store.set("verdict", verdict)
    # This process may serve the store, which ends with it: let the others read first.
    if verdict and readers:
        with suppress(RuntimeError):
            store.wait(["read"], _READ_WITHIN)
    return verdict


def _await_verdict(store: dist.Store, ranks: Sequence[int], rank: int, timeout: timedelta) -> str:
    """What the first rank publishes, or would if compression were on there."""
    first = _said(store, 0, timeout)
    if first is None:
        return _absent([ranks[0]], timeout)
    if first["compression"] == _OFF:
        return f"differ: {differences([first, _said(store, rank, timeout)], [ranks[0], ranks[rank]])}"
    try:
        store.wait(["verdict"], 2 * timeout)  # the first rank may need one time-out to find that a rank does not come
        verdict = store.get("verdict").decode()
    except RuntimeError as error:
        raise PeerError(f"rank {ranks[0]} did not compare configurations in time: {error}") from error
    if verdict:
        with suppress(RuntimeError):
            if store.add("to read", -1) == 0:
                store.set("read", "")
    return verdict


def require_all_able(store: dist.Store, rank: int, world_size: int, refusal: str | None, timeout: timedelta) -> None:
    """Return once every rank has said that it can go on. All of them must call this.

    Args:
        store: which nothing else uses under the same prefix.
        refusal: why this rank can't; None: it can.

    Raises UnsupportedError on a rank that can't, and PeerError at once on the others, or if one does not come.
    """
    with peer_errors("connecting to the other ranks"):
        if refusal is not None:
            store.set("verdict", f"rank {rank} of {world_size} can't go on: {refusal}")
        elif store.add("able", 1) == world_size:
            store.set("verdict", "")
        store.wait(["verdict"], timeout)
        verdict = store.get("verdict").decode()
    if verdict:
        _await_readers(store, world_size)
        raise PeerError(verdict) if refusal is None else UnsupportedError(refusal)


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
    return mine | {"compression": _OFF if config is None else f"refused: {config}"}


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


def _verdict(store: dist.Store, ranks: Sequence[int], timeout: timedelta) -> tuple[str, int]:
    """How the ranks differ, or which ones did not come, empty if all is well; and how many others wait to read that."""
    deadline = time.monotonic() + timeout.total_seconds()
    came, absent = {}, []
    for place, rank in enumerate(ranks):
        said = _said(store, place, timedelta(seconds=max(0.001, deadline - time.monotonic())))
        if said is None:
            absent.append(rank)
            continue
        came[rank] = said
        if said["compression"] == _OFF:
            break  # which settles it, and ranks behind this one may come late
    readers = sum(said["compression"] != _OFF for said in came.values()) - 1
    if found := differences(list(came.values()), list(came)):
        return f"differ: {found}", readers
    return _absent(absent, timeout) if absent else "", readers


def _said(store: dist.Store, rank: int, timeout: timedelta) -> dict[str, object] | None:
    """What a rank wrote of itself, None if it does not come."""
    try:
        store.wait([f"rank {rank}"], timeout)
        return json.loads(store.get(f"rank {rank}"))
    except RuntimeError:
        return None


def _absent(ranks: list[int], timeout: timedelta) -> str:
    return (
        f"{_named(ranks)} did not say within {timeout.total_seconds():g} s how compression is configured there: died, "
        "was slower, or does not import ncz_plugins where the others do"
    )


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _flat(tree: dict, prefix: str = "") -> dict[str, object]:
    flat = {}
    for key, value in tree.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat
