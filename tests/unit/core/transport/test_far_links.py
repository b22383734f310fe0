"""What a transport learns of a link with a long round trip, from the calls that it carried."""

import pytest

from ncz_plugins.core.transport.base import Transport

MB = 10**6


def transport(trip_seconds: float) -> Transport:
    """One that carries nothing."""
    kind = type("Carrying", (Transport,), {name: None for name in Transport.__abstractmethods__})
    kind.trip_seconds = trip_seconds
    return kind()


@pytest.mark.parametrize(
    ("waiting", "gbps"),
    [(0.5, 1.6), (0.4, 2.0), (0.25, 3.2), (0.0, 3.2)],  # never more than twice what was sent in all of the time
)
def test_a_call_that_hardly_waits_could_have_sent_more(waiting, gbps):
    far = transport(0.025)
    far.learn(100 * MB, 0.5, waiting)
    assert far.carried_gbps == pytest.approx(gbps)


def test_slower_calls_are_believed_slowly():
    far = transport(0.025)
    far.learn(100 * MB, 0.5, 0.5)
    far.learn(10 * MB, 0.5, 0.5)
    assert far.carried_gbps == pytest.approx(0.9 * 1.6)
    for _ in range(50):
        far.learn(10 * MB, 0.5, 0.5)
    assert far.carried_gbps == pytest.approx(0.16)


def test_small_calls_and_near_links_tell_nothing():
    far, near = transport(0.025), transport(0.0002)
    far.learn(MB // 2, 0.001, 0.001)
    near.learn(100 * MB, 0.5, 0.5)
    assert far.carried_gbps == near.carried_gbps == 0
