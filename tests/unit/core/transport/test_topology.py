"""Which ranks share a node."""

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from ranks import play

from ncz_plugins.core.errors import ConfigError
from ncz_plugins.core.transport import topology
from ncz_plugins.core.transport.topology import Nodes, Places, find_nodes, find_places


def host(name: str, network: str = "net:[1]") -> dict[str, str]:
    return {"name": name, "machine": f"boot of {name}", "network": network}


@pytest.mark.parametrize(
    ("ranks", "places"),
    [
        ([host("a"), host("b"), host("a"), host("b")], Places([[0, 2], [1, 3]], [[0, 2], [1, 3]])),
        ([host("a"), host("a", "net:[2]"), host("a")], Places([[0, 2], [1]], [[0, 1, 2]])),
        ([host("a")] * 4 + [host("b")] * 3, Places([[0, 1, 2, 3], [4, 5, 6]], [[0, 1, 2, 3], [4, 5, 6]])),
        ([host("a"), host("b")] + [host("c")] * 3, Places([[0], [1], [2, 3, 4]], [[0], [1], [2, 3, 4]])),
        ([host(f"{rank}") for rank in range(9)], Places([[rank] for rank in range(9)], [[rank] for rank in range(9)])),
    ],
)
def test_ranks_of_one_host_and_of_one_machine_are_found_in_any_order(ranks, places, monkeypatch):
    store, of_thread = dist.HashStore(), threading.local()
    monkeypatch.setattr(topology, "_this_host", lambda: ranks[of_thread.rank])

    def find(rank: int) -> Places:
        of_thread.rank = rank
        return find_places(store, rank, len(ranks))

    with ThreadPoolExecutor(len(ranks)) as pool:
        first, *others = pool.map(find, range(len(ranks)))
    assert first.names == [each["name"] for each in ranks]
    assert all(each[:2] == places[:2] for each in [first, *others])


def test_a_node_on_several_machines_is_warned_of():
    with pytest.warns(UserWarning, match="0 on a, 1 on b"):
        find_nodes(2, Places([[0, 2], [1, 3]], [[0, 2], [1, 3]], ["a", "b", "a", "b"]), 0, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find_nodes(2, Places([[0], [1], [2, 3]], [[0, 1], [2, 3]], ["a", "a", "b", "b"]), 0, 4)


def found(setting, world_size: int) -> list[Nodes | None]:
    store = dist.HashStore()

    def find(transport) -> Nodes | None:
        places = find_places(store, transport.rank, world_size)
        return find_nodes(setting, places, transport.rank, world_size)

    return play(world_size, find)


def test_consecutive_ranks_form_nodes_where_a_number_says_so():
    assert found(2, 4) == [Nodes(((0, 1), (2, 3)), rank // 2, rank % 2) for rank in range(4)]
    assert found(3, 6)[4] == Nodes(((0, 1, 2), (3, 4, 5)), 1, 1)


def test_ranks_of_one_host_stand_for_themselves_with_auto():
    assert found("auto", 4) == found("off", 4) == [None] * 4


def test_hosts_of_any_number_of_ranks_are_nodes_if_one_has_several():
    def nodes_of(*hosts):
        count = sum(map(len, hosts))
        return find_nodes("auto", Places(list(hosts), list(hosts)), count - 1, count)

    uneven = nodes_of([0, 2, 4], [1, 3], [5])
    assert uneven == Nodes(((0, 2, 4), (1, 3), (5,)), 2, 0) and uneven.speakers == 1 and not uneven.are_even
    larger = nodes_of([0, 1], [2, 3, 4])
    assert larger.speakers == 2 and not larger.speaks and larger.neighbors == [2, 3]
    assert nodes_of([0], [1], [2]) is None and nodes_of([0, 1, 2]) is None


@pytest.mark.parametrize(("setting", "world_size"), [(2, 3), (3, 4), (4, 4), (8, 4), (2, 2)])
def test_a_number_that_makes_no_nodes_is_refused(setting, world_size):
    with pytest.raises(ConfigError, match=f"hierarchy: {setting}: {world_size} ranks"):
        found(setting, world_size)
