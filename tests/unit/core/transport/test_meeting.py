"""What ranks ask of the store in which they meet: each makes few requests, however many ranks there are."""

import math
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch.distributed as dist
from repository import ROOT

from ncz_plugins.core.config import Config
from ncz_plugins.core.errors import NczError, PeerError
from ncz_plugins.core.transport import mesh
from ncz_plugins.core.transport.agreements import neighbors_of
from ncz_plugins.core.transport.connections import Connections
from ncz_plugins.core.transport.endpoint import Endpoint
from ncz_plugins.core.transport.handshake import children_of, compare_ranks, require_all_able
from ncz_plugins.core.transport.topology import find_places

PATIENCE = timedelta(seconds=120)
PAGE = ROOT / "docs" / "results" / "planning.md"
UNITS = {"KB": 1e3, "MB": 1e6}


class CountingStore(dist.Store):
    """A store of one rank, which counts what this rank asks of the store that all share."""

    def __init__(self, store: dist.Store):
        super().__init__()
        self.store, self.requests, self.nbytes = store, 0, 0

    def counted(self, *moved) -> None:
        self.requests += 1
        self.nbytes += sum(map(len, moved))

    def set(self, key, value):
        self.counted(key, value)
        self.store.set(key, value)

    def get(self, key):
        found = self.store.get(key)
        self.counted(key, found)
        return found

    def add(self, key, amount):
        self.counted(key, bytes(8))
        return self.store.add(key, amount)

    def check(self, keys):
        self.counted(*keys)
        return self.store.check(keys)

    def wait(self, keys, timeout=PATIENCE):
        self.counted(*keys)
        self.store.wait(keys, timeout)

    @property
    def timeout(self):
        return PATIENCE


def met(world_size: int, meet: Callable[[int, dist.Store], object]) -> list[CountingStore]:
    """The store of each rank after all have met, each on a thread of its own."""
    shared = dist.HashStore()
    shared.set_timeout(PATIENCE)
    stores = [CountingStore(shared) for _ in range(world_size)]
    done: list = [None] * world_size

    def run(rank: int) -> None:
        done[rank] = meet(rank, stores[rank]) or True

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + PATIENCE.total_seconds()
    for thread in threads:
        thread.join(deadline - time.monotonic())
    for each in done:
        if hasattr(each, "close"):
            each.close()
    assert all(done), "a rank failed, or hangs"
    return stores


def require_few(world_size: int, stores: list[CountingStore]) -> None:
    """Each rank asks for a number of things that grows as log2, and none for what all others have written."""
    rounds = math.ceil(math.log2(world_size))
    requests = [each.requests for each in stores]
    nbytes = [each.nbytes for each in stores]
    print(f"{world_size} ranks: {max(requests)} requests and {max(nbytes)} bytes at most, {sum(nbytes)} bytes in all")
    assert max(requests) <= 20 + 6 * rounds
    assert sum(nbytes) <= world_size * (8_000 + 400 * rounds)
    # On busy cores a rank asks some times more; names of hosts and versions have other lengths elsewhere.
    of_page = told(world_size)
    assert of_page[0] == pytest.approx(max(requests), rel=0.2)
    assert of_page[1:] == pytest.approx((max(nbytes), sum(nbytes)), rel=0.1)


def told(world_size: int) -> tuple[float, float, float]:
    """What the page says of that many ranks: requests, bytes, and bytes of all ranks."""
    row = rf"^\| {world_size:,} \| (\d+) \| ([\d,]+) \| ([\d.]+) (KB|MB) \|$"
    [(requests, nbytes, total, unit)] = re.findall(row, PAGE.read_text(), flags=re.MULTILINE)
    return float(requests), float(nbytes.replace(",", "")), float(total) * UNITS[unit]


@pytest.mark.parametrize("world_size", [16, 64, 256])
def test_ranks_that_connect_ask_the_store_for_little(world_size):
    """All that a communicator does before its first agreement."""

    def meet(rank: int, store: CountingStore) -> Connections:
        compare_ranks(dist.PrefixStore("compare", store), range(world_size), rank, Config())
        find_places(dist.PrefixStore("places", store), rank, world_size)
        return Connections(dist.PrefixStore("connect", store), rank, world_size, PATIENCE)

    with patch.object(mesh, "MOST_RANKS", 2):
        require_few(world_size, met(world_size, meet))


def test_a_thousand_ranks_ask_the_store_for_little():
    """The same without the sockets, which are too many for one process."""
    world_size = 1024

    def meet(rank: int, store: CountingStore) -> Endpoint:
        compare_ranks(dist.PrefixStore("compare", store), range(world_size), rank, Config())
        find_places(dist.PrefixStore("places", store), rank, world_size)
        endpoint = Endpoint(dist.PrefixStore("mesh", store), rank, PATIENCE)
        able = require_all_able(dist.PrefixStore("able", store), rank, world_size, None, PATIENCE, endpoint.listens)
        assert able and all(endpoint.address_of(peer) for peer in neighbors_of(rank, world_size))
        return endpoint

    require_few(world_size, met(world_size, meet))


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 8, 33, 100])
def test_every_rank_is_heard_of_by_one_other_and_in_order(world_size):
    def below(rank: int) -> list[int]:
        return [rank, *(each for child in children_of(rank, world_size) for each in below(child))]

    assert below(0) == list(range(world_size))
    assert max(len(children_of(rank, world_size)) for rank in range(world_size)) <= (world_size - 1).bit_length()


@pytest.mark.parametrize("deaf", [[], [2], [0, 1, 2]])
def test_whether_all_ranks_can_be_called_is_known_to_all(deaf):
    found = {}

    def meet(rank: int, store: CountingStore) -> None:
        found[rank] = require_all_able(store, rank, 3, None, PATIENCE, rank not in deaf)

    met(3, meet)
    assert found == dict.fromkeys(range(3), not deaf)


def test_a_rank_that_can_not_go_on_ends_all():
    found = {}

    def meet(rank: int, store: CountingStore) -> None:
        with pytest.raises(NczError) as caught:
            require_all_able(store, rank, 3, "no descriptors" if rank == 1 else None, PATIENCE)
        found[rank] = caught.value

    met(3, meet)
    for rank, error in found.items():
        assert ("no descriptors" in str(error)) and (isinstance(error, PeerError) == (rank != 1))
