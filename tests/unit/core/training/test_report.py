"""What rank 0 says unasked about the share of compressed bytes."""

import pytest

from ncz_plugins.core.config import Config
from ncz_plugins.core.reasons import REMEDIES, Bypass
from ncz_plugins.core.runtime.statistics import Counters
from ncz_plugins.core.training.report import FIRST_STEPS, LATER_STEPS, CompressionReport


def step(compressed: int = 0, **plain: int) -> Counters:
    """A step in which so many MB went compressed, by a ratio of 10, and so many plain for reasons by their names."""
    because = {Bypass[name].value: megabytes * 10**6 for name, megabytes in plain.items()}
    return Counters(
        calls=1 + len(plain),
        compressed_calls=1,
        plain_bytes=compressed * 10**6 + sum(because.values()),
        wire_bytes=compressed * 10**5 + sum(because.values()),
        bypasses=dict.fromkeys(because, 1),
        bypassed_bytes=because,
    )


def lines(steps: list[Counters], config=None) -> list[tuple[int, str]]:
    """What is said, and after which step."""
    report = CompressionReport(Config.load(config))
    said = [(number, report.end_step(number, each)) for number, each in enumerate(steps, 1)]
    return [(number, line) for number, line in said if line is not None]


def test_it_is_said_once_after_the_first_steps():
    assert lines([step(10)] * 1000) == [
        (FIRST_STEPS, "ncz_plugins: steps 1 to 3: 100% of the bytes went compressed, ratio 10.0")
    ]


def test_the_main_reason_is_named_with_its_remedy():
    ((_, line),) = lines([step(10, TOO_SMALL=60, DTYPE=30)] * 10)
    assert "10% of the bytes went compressed, ratio 1.1; 6 of 9 calls went plain" in line
    assert line.endswith(f"as too small: {REMEDIES[Bypass.TOO_SMALL]}")


@pytest.mark.parametrize("bypass", Bypass, ids=lambda bypass: bypass.name)
def test_every_reason_has_a_remedy(bypass):
    ((_, line),) = lines([step(**{bypass.name: 1})] * 3)
    assert (
        f"0% of the bytes went compressed, ratio 1.0; 3 of 6 calls went plain, most of their bytes as {bypass.value}: "
        in line
    )


def test_what_somebody_chose_is_not_said_to_be_measured():
    ((_, line),) = lines([step(FAST_LINK=1)] * FIRST_STEPS, {"transport": {"min_bytes": "never"}})
    assert (
        "as link too fast: transport.min_bytes is never, or compression was measured to lose time on this link" in line
    )


def test_a_fixed_rate_is_not_said_to_compress_all_floats():
    ((_, line),) = lines([step(DTYPE=1)] * FIRST_STEPS, {"quantizer": {"mode": "bits", "value": 4}})
    assert line.endswith(
        "as dtype: only floats of 16, 32 and 64 bits are compressed; with quantizer.mode: bits, only 16 and 32 bits"
    )


def test_it_is_said_once_more_if_it_changes_much():
    said = lines([step(10)] * FIRST_STEPS + [step(9, DTYPE=1)] * LATER_STEPS + [step(1, DTYPE=9)] * 3 * LATER_STEPS)
    assert [number for number, _ in said] == [FIRST_STEPS, FIRST_STEPS + 2 * LATER_STEPS]
    assert "10% of the bytes" in said[1][1] and "as dtype" in said[1][1]


def test_that_nothing_is_reduced_is_said():
    ((_, line),) = lines([Counters()] * 10)
    assert "nothing was reduced by this package" in line


def test_warm_up_is_not_counted():
    config = {"steps": {"warmup": 5}}
    ((number, line),) = lines([step(WARM_UP=1)] * 5 + [step(10)] * 10, config)
    assert number == 5 + FIRST_STEPS and "steps 6 to 8: 100%" in line
