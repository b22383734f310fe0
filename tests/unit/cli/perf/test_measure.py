"""What `ncz perf` computes from what it measured: counts and bandwidths of nccl-tests, and the bound of each block."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ncz_plugins.cli.perf import COLLECTIVES, verify
from ncz_plugins.cli.perf.measure import _added, bandwidths, elements
from ncz_plugins.cli.perf.network import namespace, sent_bytes
from ncz_plugins.core.config import QuantizerConfig


@given(st.sampled_from(sorted(COLLECTIVES)), st.integers(8, 1 << 30), st.integers(1, 9))
def test_elements_fill_the_size_as_far_as_parts_are_alike(collective, size, ranks):
    whole, count = elements(collective, size, ranks)
    has_no_parts = collective in ("all_reduce", "reduce", "broadcast", "sendrecv")
    assert whole % ranks == 0 or has_no_parts
    assert count == (whole if has_no_parts else whole // ranks)
    assert count >= 1
    if size >= 4 * ranks:
        assert size - 4 * ranks < 4 * whole <= size


# Of nccl-tests' doc/PERFORMANCE.md: 1 GB in 0.5 s among 4 ranks.
@pytest.mark.parametrize(
    "collective, busbw",
    [
        ("all_reduce", 3.0),
        ("reduce_scatter", 1.5),
        ("reduce", 2.0),
        ("all_gather", 1.5),
        ("gather", 1.5),
        ("broadcast", 2.0),
        ("scatter", 1.5),
        ("all_to_all", 1.5),
        ("sendrecv", 2.0),
    ],
)
def test_bandwidths_are_those_of_nccl_tests(collective, busbw):
    assert bandwidths(collective, 10**9, 4, 0.5) == pytest.approx((2.0, busbw))


def test_counts_are_added_over_ranks():
    details = ({"coders": {"fixed": 1, "rans": 3}}, {"coders": {"rans": 2}}, {"coders": {}})
    assert list(_added(details, "coders").items()) == [("rans", 5), ("fixed", 1)]
    assert _added(({}, {}), "coders") is None


def test_sent_bytes_count_what_goes_over_the_loopback(monkeypatch):
    import socket

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            before = sent_bytes()
            sender.sendall(bytes(100_000))
            received = 0
            while received < 100_000:
                received += len(receiver.recv(100_000))
            assert sent_bytes() - before >= 100_000
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert sent_bytes() >= before + 100_000  # of all interfaces
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "surely-not-there")
    assert sent_bytes() is None
    assert namespace() == namespace()


def cut(numel: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    starts = np.arange(0, numel, block)
    return starts, np.diff(np.append(starts, numel))


@pytest.mark.parametrize(
    "mode, of_block",
    [
        ("abs", lambda b: 1.0),
        ("rel", lambda b: np.abs(b).max()),
        ("range", np.ptp),
        ("rms", lambda b: np.sqrt((b**2).mean())),
    ],
)
def test_bounds_are_relative_to_what_the_mode_says(mode, of_block):
    x = np.random.default_rng(0).standard_normal(10_000) + 5
    starts, sizes = cut(x.size, 4096)
    found = verify._measured(x, starts, sizes, QuantizerConfig(mode=mode, value=0.1)).sum(0)
    expected = [of_block(x[start : start + size]) for start, size in zip(starts, sizes)]
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


def test_an_error_is_a_share_of_the_bound_of_its_own_block():
    starts, _ = cut(3000, 1000)
    answer = verify.Answer(torch.zeros(3000, dtype=torch.float64), np.array([1.0, 10.0, 0.0]), starts)
    result = torch.zeros(3000)
    assert answer.over(result) == 0
    result[1500] = -5
    assert answer.over(result) == 0.5
    result[999] = 2
    assert answer.over(result) == 2
    assert answer.over(result, divisor=2) == 4  # of an average, half the error is allowed
    result[2999] = 1e-3
    assert answer.over(result) > 1e30
