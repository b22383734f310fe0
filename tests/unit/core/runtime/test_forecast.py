"""What is expected of frames, by those of four calls."""

from ncz_plugins.core.runtime.forecast import Forecast, Forecasts


def forecast_of(*calls: list[int]) -> list[int] | None:
    forecast = Forecast()
    for sizes in calls:
        forecast.learn(sizes)
    return forecast.sizes


def test_four_calls_must_be_alike():
    assert forecast_of() is None
    assert forecast_of(*[[64000, 640]] * 3) is None
    assert forecast_of(*[[64000, 640]] * 4) == [65000, 650]
    assert forecast_of([64000], [66512], [64000], [65000]) == [66512 + 66512 // 64]
    assert forecast_of([64000], [66513], [64000], [65000]) is None


def test_each_frame_must_be_alike():
    assert forecast_of([64000, 32000], [32000, 64000], [64000, 32000], [32000, 64000]) is None


def test_a_call_that_differs_is_forgotten_after_four_others():
    calls = [[1]] + [[64000]] * 4
    assert forecast_of(*calls[:4]) is None
    assert forecast_of(*calls) == [65000]


def test_lengths_that_drift_a_little_are_expected_to_be_as_before():
    forecast = Forecast()
    for size in [64000] * 4 + [64500, 63500, 64700]:
        forecast.learn([size])
    assert forecast.sizes == [65000]
    forecast.learn([64800])  # a margin of less than a 256th
    assert forecast.sizes == [64800 + 64800 // 64]
    for _ in range(4):
        forecast.learn([63500])  # and of more than a 32nd
    assert forecast.sizes == [63500 + 63500 // 64]


def test_kinds_that_are_not_used_are_forgotten():
    forecasts = Forecasts()
    first = forecasts.of("first")
    for number in range(255):
        forecasts.of(f"{number}")
    assert forecasts.of("first") is first
    for number in range(256):
        forecasts.of(f"{number}")
    assert forecasts.of("first") is not first
