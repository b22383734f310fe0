"""Recording: what is recorded, where, and that nothing is when nobody asks."""

import json
import threading
import time
import weakref

import pytest

from ncz_plugins.core.errors import FrameError
from ncz_plugins.core.runtime import trace
from ncz_plugins.core.runtime.statistics import Counters


class Work:
    """What a send or a receive under way is to its waiter."""

    def __init__(self, error: Exception | None = None):
        self.go = threading.Event()
        self.waits = 0
        self._error = error

    def wait(self):
        self.waits += 1
        assert self.go.wait(10)
        if self._error is not None:
            raise self._error


def spans(events: list[dict]) -> list[dict]:
    return [event for event in events if event["ph"] == "X"]


def rows(events: list[dict]) -> dict[int, str]:
    return {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}


def test_spans_nest_in_the_row_of_their_thread():
    counters = Counters()

    def elsewhere():
        with trace.span("decode", 3, counters):
            pass

    with trace.recording() as events:
        with trace.span("agree", 1, counters), trace.span("wait", 2, counters):
            time.sleep(0.001)
        other = threading.Thread(target=elsewhere, name="the other")
        other.start()
        other.join()
    wait, agree, decode = spans(json.loads(json.dumps(events)))
    assert [event["name"] for event in (wait, agree, decode)] == ["wait", "agree", "decode"]
    assert [event["args"]["bytes"] for event in (wait, agree, decode)] == [2, 1, 3]
    assert agree["ts"] <= wait["ts"] and wait["ts"] + wait["dur"] <= agree["ts"] + agree["dur"]
    assert wait["tid"] == agree["tid"] != decode["tid"]
    assert rows(events)[wait["tid"]] == threading.current_thread().name and rows(events)[decode["tid"]] == "the other"
    assert wait["dur"] == pytest.approx(1e6 * counters.wait_seconds)


def test_nothing_is_recorded_outside():
    work = Work()
    with trace.recording() as events:
        pass
    with trace.span("encode", 1):
        pass
    assert trace.transfer(work, "row", "frame", lambda: 1) is work
    assert events == []


def test_a_transfer_is_waited_for_once_and_its_row_is_without_overlap():
    first, second = Work(), Work()
    with trace.recording() as events:
        watched = [trace.transfer(work, "to rank 1", "frame", lambda n=n: n) for n, work in enumerate((first, second))]
        second.go.set()
        first.go.set()
        for each in watched:
            each.wait()
    assert (first.waits, second.waits) == (1, 1)
    one, two = spans(events)
    assert [one["args"]["bytes"], two["args"]["bytes"]] == [0, 1] and one["tid"] == two["tid"]
    assert one["ts"] + one["dur"] <= two["ts"] + 1e-3  # microseconds


def test_a_transfer_is_let_go_before_whoever_waits_goes_on():
    """They may end the program next, and torch aborts it if a thread frees a send or a receive just then."""
    work = Work()
    there = weakref.ref(work)
    work.go.set()
    with trace.recording():
        watched = trace.transfer(work, "a", "frame", lambda: 1)
        del work
        watched.wait()
        assert there() is None


def refused() -> int:
    raise FrameError("no size")


@pytest.mark.parametrize(
    ("error", "nbytes", "expected"),
    [(RuntimeError("connection reset"), lambda: 1, RuntimeError), (None, refused, FrameError)],
)
def test_what_goes_wrong_with_a_transfer_comes_out_of_wait(error, nbytes, expected):
    broken, whole = Work(error), Work()
    with trace.recording() as events:
        first, second = (trace.transfer(broken, "a", "frame", nbytes), trace.transfer(whole, "a", "frame", lambda: 7))
        broken.go.set()
        whole.go.set()
        with pytest.raises(expected):
            first.wait()
        second.wait()
    assert [event["args"]["bytes"] for event in spans(events)] == [7]
