"""Handshake of ranks: they meet, and compare versions and configurations before the first collective."""

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
_OFF = "off"  # written by a rank without compression
_DEAF = "deaf"  # the verdict if all can go on, but some can't be called
_ADDRESS_BYTES = 512  # for a host's name of at most 253 bytes, and a port


def meet(ranks: Sequence[int], rank: int, purpose: str) -> dist.Store:
    """A part of torch's default store, under a new prefix, that only these ranks share.

    All of `ranks` must call this, in the same order relative to their other meetings. Nobody waits: a rank may be some
    meetings ahead. Meetings are counted in the store, so a process that replaces another one continues its count.

    Args:
        ranks: global ranks.
        rank: the index of this rank in `ranks`.
        purpose: a name. Meetings with different purposes are counted separately.
    """
    store = dist.distributed_c10d._get_default_store()
    name = f"ncz/{purpose}/{hashlib.sha256(repr(list(ranks)).encode()).hexdigest()}"
    return dist.PrefixStore(f"{name}/{store.add(f'{name}/met by {rank}', 1)}", store)


def store_of_own(store: dist.Store) -> dist.Store:
    """The same store by a connection of its own, of use while another thread waits for a key of `store`.

    Old versions of torch have only `store` itself, and so have stores that are written in Python. If the server has
    gone, the first use of the result says so.
    """
    try:
        return store.clone()
    except (AttributeError, RuntimeError):
        return store


def open_store(
    rank: int, world_size: int, timeout: timedelta, host: str, broadcast: Callable[[Tensor], Tensor]
) -> dist.Store:
    """A new store for ranks that meet without torch.distributed. All of them must call this. Rank 0 serves the store.

    Args:
        host: name or address by which other machines reach this one; only that of rank 0 is used.
        broadcast: takes a tensor, uint8, [n], and returns the tensor of rank 0. The address of the store travels in
            it as JSON. Horovod's own broadcast of objects uses pickle, which would run code that a peer sends.
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

    Each rank writes its own to the store, and compares a digest of it with those of a few others, which have done the
    same: see `children_of`. If all are alike, the first rank publishes an empty verdict. If not, it reads what all have
    written, and the verdict says who differs. A rank without compression writes "off" and returns at once, as this
    package may not delay it. All others then raise.

    Args:
        store: the store that `meet` returned.
        ranks: the global ranks, for messages.
        rank: the index of this rank in `ranks`.
        config: this rank's configuration; None: compression is off; an error: compression can't be on.

    Raises PeerError on every rank if one does not come within `transport.timeout_seconds`. If that is not set, the
    store's time-out counts.
    """
    said = json.dumps(described(config))
    store.set(f"rank {rank}", said)
    if config is None:
        store.set(f"alike {rank}", "")
        return
    seconds = config.transport.timeout_seconds if isinstance(config, Config) else None
    timeout = store.timeout if seconds is None else timedelta(seconds=seconds)
    deadline = time.monotonic() + timeout.total_seconds()
    if rank == 0:
        verdict = _publish_verdict(store, ranks, said, timeout, deadline)
    else:
        verdict = _await_verdict(store, ranks, rank, said, timeout, deadline)
    if verdict.startswith("differ"):
        raise MismatchError(f"ranks {verdict}. All must run the same ncz_plugins with the same configuration")
    if verdict:
        raise PeerError(verdict)


def children_of(rank: int, world_size: int) -> list[int]:
    """The ranks of which a rank hears in the store, at most log2(world_size), so that the first one hears of all.

    They are its children in a binomial tree. What lies below one of them are the ranks up to the next one.
    """
    below = (rank & -rank) or world_size
    distances = [1 << bit for bit in range((below - 1).bit_length())]
    return [rank + distance for distance in distances if rank + distance < world_size]


def _publish_verdict(store: dist.Store, ranks: Sequence[int], said: str, timeout: timedelta, deadline: float) -> str:
    """Compare what all ranks wrote, and publish the verdict. Returns it. Called by the first rank."""
    verdict, readers = "", 0
    if not _are_alike(store, 0, len(ranks), said, deadline):
        verdict, readers = _verdict(store, ranks, timeout, deadline)
    store.add("to read", readers)
    store.set("verdict", verdict)
    # If this process serves the store, the store ends with it: let the others read first.
    if verdict and readers:
        with suppress(RuntimeError):
            store.wait(["read"], _READ_WITHIN)
    return verdict


def _await_verdict(
    store: dist.Store, ranks: Sequence[int], rank: int, said: str, timeout: timedelta, deadline: float
) -> str:
    """Wait for the verdict of the first rank. If compression is off there, find one's own verdict."""
    first = _said(store, 0, timeout)
    if first is None:
        return _absent([ranks[0]], timeout)
    if first["compression"] == _OFF:
        return f"differ: {differences([first, _said(store, rank, timeout)], [ranks[0], ranks[rank]])}"
    _are_alike(store, rank, len(ranks), said, deadline)
    try:
        store.wait(["verdict"], 2 * timeout)  # the first rank may wait for one time-out for a rank that does not come
        verdict = store.get("verdict").decode()
    except RuntimeError as error:
        raise PeerError(f"rank {ranks[0]} did not compare configurations in time: {error}") from error
    if verdict:
        with suppress(RuntimeError):
            if store.add("to read", -1) == 0:
                store.set("read", "")
    return verdict


def _are_alike(store: dist.Store, rank: int, world_size: int, said: str, deadline: float) -> bool:
    """Whether this rank and all below it have written the same. Tells the rank above, unless one has not come."""
    digest = hashlib.sha256(said.encode()).hexdigest()
    for child in children_of(rank, world_size):
        if (found := _read(store, f"alike {child}", _left(deadline))) is None:
            return False
        if found.decode() != digest:
            digest = ""
            break
    store.set(f"alike {rank}", digest)
    return bool(digest)


def _verdict(store: dist.Store, ranks: Sequence[int], timeout: timedelta, deadline: float) -> tuple[str, int]:
    """Compare what all ranks wrote.

    Returns the verdict, and the number of other ranks that wait for it. The verdict says how the ranks differ or which
    ones did not come, and is empty if all is well.
    """
    came, absent = {}, []
    for index, rank in enumerate(ranks):
        said = _said(store, index, _left(deadline))
        if said is None:
            absent.append(rank)
            continue
        came[rank] = said
        if said["compression"] == _OFF:
            break  # the ranks differ: do not wait for the rest
    readers = sum(said["compression"] != _OFF for number, said in came.items() if number != ranks[0])
    if found := differences(list(came.values()), list(came)):
        return f"differ: {found}", readers
    return _absent(absent, timeout) if absent else "", readers


def _said(store: dist.Store, rank: int, timeout: timedelta) -> dict[str, object] | None:
    """Wait for what a rank wrote: see `described`. Returns None if the rank does not come."""
    found = _read(store, f"rank {rank}", timeout)
    return None if found is None else json.loads(found)


def _read(store: dist.Store, key: str, timeout: timedelta) -> bytes | None:
    """Wait for a key. Returns None if it does not come."""
    with suppress(RuntimeError):
        try:
            store.wait([key], timeout)
        except RuntimeError:
            if not store.check([key]):  # it may be there although the time is shorter than the way to the store
                return None
        return store.get(key)
    return None


def _left(deadline: float) -> timedelta:
    """The time until `deadline`, in seconds of `time.monotonic`; a moment if it has passed."""
    return timedelta(seconds=max(0.001, deadline - time.monotonic()))


def _absent(ranks: list[int], timeout: timedelta) -> str:
    return (
        f"{_named(ranks)} did not say within {timeout.total_seconds():g} s how compression is configured: look for a "
        "crash, a slow start, or a program that does not import ncz_plugins where the other ranks do"
    )


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def described(config: Config | NczError | None) -> dict[str, object]:
    """Name -> value of what all ranks must have in common, ready for JSON. For `config` see `compare_ranks`."""
    mine = {"version": __version__, "frame version": VERSION}
    if isinstance(config, Config):
        return mine | {"compression": "on"} | _flat(json.loads(config.canonical()))
    return mine | {"compression": _OFF if config is None else f"refused: {config}"}


def _flat(tree: dict, prefix: str = "") -> dict[str, object]:
    flat = {}
    for key, value in tree.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat


def differences(everyone: list[dict[str, object]], ranks: Sequence[int] | None = None) -> str:
    """Say in words how ranks differ; empty if they don't.

    Args:
        everyone: name -> value for each rank, such as `described` returns.
        ranks: numbers of the ranks, for messages; None: 0, 1, 2, ...
    """
    ranks = range(len(everyone)) if ranks is None else ranks
    found = []
    for key in everyone[0] if everyone else ():
        if any(key not in one for one in everyone):
            continue  # a setting: ranks without compression have none, and differ in "compression" already
        ranks_of: dict[str, list[int]] = {}
        for rank, one in zip(ranks, everyone):
            ranks_of.setdefault(json.dumps(one[key]), []).append(rank)
        if len(ranks_of) > 1:
            found.append(f"{key} is " + ", ".join(f"{v} on {_named(ranks)}" for v, ranks in ranks_of.items()))
    return "; ".join(found)


def require_all_able(
    store: dist.Store, rank: int, world_size: int, refusal: str | None, timeout: timedelta, listens: bool = True
) -> bool:
    """Return once every rank has said that it can go on. All of them must call this.

    Args:
        store: a store that nothing else uses under the same prefix.
        refusal: why this rank can't go on; None: it can.
        listens: whether other ranks can call this one.

    Returns whether all ranks listen.

    Raises UnsupportedError on a rank that can't go on, and PeerError on the others, or if a rank does not come.
    """
    with peer_errors("connecting to the other ranks"):
        if refusal is not None:
            store.set("verdict", f"rank {rank} of {world_size} can't go on: {refusal}")
        else:
            if not listens:
                store.set("deaf", "")
            if store.add("able", 1) == world_size:
                store.set("verdict", _DEAF if store.check(["deaf"]) else "")
        store.wait(["verdict"], timeout)
        verdict = store.get("verdict").decode()
    if verdict not in ("", _DEAF):
        _await_readers(store, world_size)
        raise PeerError(verdict) if refusal is None else UnsupportedError(refusal)
    return not verdict


def _await_readers(store: dist.Store, world_size: int) -> None:
    """Wait up to 5 s until all ranks have read the verdict, as the store ends with the rank that serves it."""
    with suppress(RuntimeError):
        if store.add("readers", 1) == world_size:
            store.set("read", "")
        store.wait(["read"], _READ_WITHIN)
