"""How ranks meet, and what they compare before their first compressed collective."""

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
    meetings = [[meet([0, 1, 2], "test") for _ in range(3)] for _ in range(2)]
    others = [[meet([0, 1], "test")], [meet([0, 1, 2], "something else")]]
    for number, stores in enumerate([*meetings, *others]):
        assert not any(store.check(["key"]) for store in stores)
        stores[-1].set("key", str(number))
        assert all(store.check(["key"]) and store.get("key") == str(number).encode() for store in stores)


# ---------------------------------------------------------------- configurations


def compared(configs: list) -> list:
    """The error of each rank, None where it may go on."""
    store = dist.HashStore()

    def body(transport):
        try:
            compare_ranks(store, transport.rank, len(configs), configs[transport.rank])
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


def test_a_rank_without_compression_or_with_a_refused_configuration_is_named():
    assert '"on" on rank 0, "off" on rank 1' in str(compared([Config(), None])[1])
    refused = ConfigError("quantizer.value: -1 is not allowed")
    assert "refused: quantizer.value: -1" in str(compared([Config(), refused])[0])


def test_settings_of_compression_are_not_compared_where_it_is_off():
    assert set(described(None)) == {"version", "frame version", "compression"}
    assert differences([described(None), described(Config())]).startswith("compression is ")


def test_a_rank_that_does_not_come_is_named():
    config = Config(transport={"timeout_seconds": 1})
    store = dist.HashStore()
    with pytest.raises(PeerError, match="rank 1 of 2 did not say how it is configured in time"):
        compare_ranks(store, 0, 2, config)


def test_many_ranks_are_abridged():
    everyone = [{"key": 1}] + [{"key": 2}] * 12
    assert differences(everyone) == "key is 1 on rank 0, 2 on ranks 1, 2, 3, 4, 5, 6, 7, 8, ..."
