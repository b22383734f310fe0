"""What is expected of frames, by those of two calls."""

from ncz_plugins.core.codec.forecast import Forecast


def forecast_of(*calls: list[int]) -> list[int] | None:
    forecast = Forecast()
    for sizes in calls:
        forecast.learn(sizes)
    return forecast.sizes


def test_two_calls_must_be_alike():
    assert forecast_of() is None
    assert forecast_of([6400, 640]) is None
    assert forecast_of([6400, 640], [6400, 640]) == [6500, 650]
    assert forecast_of([8000], [9000]) == [9140]
    assert forecast_of([8000], [9001]) is None
    assert forecast_of([9001], [8000]) is None


def test_the_last_two_count_and_of_each_frame_the_longer_one():
    assert forecast_of([1], [640, 6400], [1280, 5760]) == [1300, 6500]
