"""Recording: what is recorded, where, and that nothing is when nobody asks."""

import json
import threading
import time

import pytest

from ncz_plugins.core.runtime import trace
from ncz_plugins.core.runtime.statistics import Counters


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
    with trace.recording() as events:
        pass
    with trace.span("encode", 1):
        pass
    trace.record("row", "frame", 0.0, 1.0, 1)
    assert events == []
