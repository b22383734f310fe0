"""Counting."""

import json
from dataclasses import fields

from ncz_plugins.core.runtime.statistics import Counters, Statistics


def test_ratio_is_plain_over_wire_and_one_where_nothing_was_sent():
    assert Counters(plain_bytes=80, wire_bytes=10).ratio == 8
    assert Counters().ratio == 1


def test_every_field_adds_up():
    def counters(factor: int) -> Counters:
        numbers = {item.name: factor * n for n, item in enumerate(fields(Counters), 1)}
        dicts = [name for name, value in vars(Counters()).items() if isinstance(value, dict)]
        return Counters(**numbers | {name: {"some": numbers[name]} for name in dicts})

    one, total = counters(1), Counters()
    total.add(one)
    total.add(one)
    assert total == counters(2)
    assert one == counters(1)  # adding leaves the summand alone


def test_steps_hold_what_was_recorded_between_them_and_only_the_latest_are_kept():
    statistics = Statistics(history=2)
    for calls in (1, 2, 3):
        for _ in range(calls):
            statistics.record(Counters(calls=1))
        assert statistics.end_step().calls == calls
    assert [step.calls for step in statistics.steps] == [2, 3]
    assert statistics.total.calls == 6


def test_everything_is_ready_for_json():
    statistics = Statistics(history=1)
    statistics.record(Counters(calls=1, plain_bytes=9, wire_bytes=3, bypasses={"too small": 1}, coders={"fixed": 2}))
    statistics.end_step()
    read = json.loads(json.dumps(statistics.to_dict()))
    assert read["total"] == read["steps"][0]
    assert read["total"]["ratio"] == 3 and read["total"]["bypasses"] == {"too small": 1}
    assert read["total"]["coders"] == {"fixed": 2}
