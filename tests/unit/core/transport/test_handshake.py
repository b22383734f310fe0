"""How ranks meet, and what they compare before their first compressed collective."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from ranks import play

from ncz_plugins.core.config import Config
from ncz_plugins.core.errors import ConfigError, MismatchError, PeerError
from ncz_plugins.core.transport.handshake import compare_ranks, described, differences, meet

# ---------------------------------------------------------------- meeting


def test_ranks_share_a_store_by_themselves_each_time_they_meet(monkeypatch):
    default = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: default)
    ahead = [meet([0, 1, 2], 0, "test") for _ in range(2)]  # before any other comes
    meetings = [[first, *(meet([0, 1, 2], rank, "test") for rank in (1, 2))] for first in ahead]
    others = [[meet([0, 1], 0, "test")], [meet([0, 1, 2], 0, "something else")]]
    for number, stores in enumerate([*meetings, *others]):
        assert not any(store.check(["key"]) for store in stores)
        stores[-1].set("key", str(number))
        assert all(store.check(["key"]) and store.get("key") == str(number).encode() for store in stores)


# ---------------------------------------------------------------- configurations


def compared(configs: list) -> list:
    """The error of each rank, None where it may go on."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=30))

    def body(transport):
        try:
            compare_ranks(store, range(len(configs)), transport.rank, configs[transport.rank])
        except (MismatchError, PeerError) as error:
            return error
        return None

    return play(len(configs), body)


def test_ranks_that_are_configured_alike_go_on():
    assert compared([Config()] * 3) == [None] * 3
    assert compared([None] * 2) == [None] * 2


def test_what_differs_is_named_with_who_has_what_on_every_rank():
    configs = [Config(), Config(quantizer={"value": 0.5}), Config()]
    errors = compared(configs)
    assert all(isinstance(error, MismatchError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert "quantizer.value is 0.375 on ranks 0, 2, 0.5 on rank 1" in str(errors[0])


OFF_AT = [(0,), (1,), (2,), (0, 2), (1, 2)]


@pytest.mark.parametrize("off", OFF_AT)
def test_a_rank_without_compression_is_named_by_the_others_and_goes_on(off):
    errors = compared([None if rank in off else Config() for rank in range(3)])
    for rank, error in enumerate(errors):
        if rank in off:
            assert error is None
        else:
            assert isinstance(error, MismatchError)
            assert "compression is " in str(error) and f'"off" on rank {off[0]}' in str(error)


def test_a_rank_without_compression_waits_for_nobody():
    compare_ranks(dist.HashStore(), [0, 1], 0, None)
    compare_ranks(dist.HashStore(), [0, 1], 1, None)


def test_a_rank_with_a_refused_configuration_is_named():
    refused = ConfigError("quantizer.value: -1 is not allowed")
    assert "refused: quantizer.value: -1" in str(compared([Config(), refused])[0])
    for error in compared([None, refused, Config()])[1:]:
        assert '"off" on rank 0' in str(error)


def test_settings_of_compression_are_not_compared_where_it_is_off():
    assert set(described(None)) == {"version", "frame version", "compression"}
    assert differences([described(None), described(Config())]).startswith("compression is ")


def test_ranks_that_do_not_come_are_named():
    config = Config(transport={"timeout_seconds": 0.5})
    store = dist.HashStore()
    with pytest.raises(PeerError, match="ranks 6, 7 did not say within 0.5 s how compression is configured"):
        compare_ranks(store, [5, 6, 7], 0, config)
    with pytest.raises(PeerError, match="rank 5 did not say within 0.5 s"):
        compare_ranks(dist.HashStore(), [5, 6, 7], 1, config)


class FarStore(dist.Store):
    """A store whose server is 20 ms away."""

    def __init__(self, store: dist.Store):
        super().__init__()
        self.set, self.get, self.add, self.check = store.set, store.get, store.add, store.check
        self.store = store

    def wait(self, keys, timeout=timedelta(seconds=60)):
        if timeout < timedelta(milliseconds=20):
            raise RuntimeError("wait timeout")
        self.store.wait(keys, timeout)

    @property
    def timeout(self):
        return timedelta(seconds=60)


def test_only_ranks_that_do_not_come_are_named_where_the_store_is_far():
    """The first rank looks who has come when the time is over."""
    config, store = Config(transport={"timeout_seconds": 0.5}), dist.HashStore()
    ranks, came = [5, 6, 7, 8], [0, 1, 2]  # the last one comes late

    def error_of(rank: int) -> str:
        with pytest.raises(PeerError) as caught:
            compare_ranks(FarStore(store), ranks, rank, config)
        return str(caught.value)

    with ThreadPoolExecutor(len(came)) as pool:
        for message in pool.map(error_of, came):
            assert message.startswith("rank 8 did not say within 0.5 s")


def test_many_ranks_are_abridged():
    everyone = [{"key": 1}] + [{"key": 2}] * 12
    assert differences(everyone) == "key is 1 on rank 0, 2 on ranks 1, 2, 3, 4, 5, 6, 7, 8, ..."
