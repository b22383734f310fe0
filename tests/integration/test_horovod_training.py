"""What lasts from step to step under Horovod: error feedback, policies, steps, the guard, records, checkpoints."""

import json

import pytest
from launch import WORKERS, horovod_ranks, launch, needs_horovod

pytestmark = [pytest.mark.slow, needs_horovod]

BOUND, STEPS, STOPS = 0.05, 8, (1, 4)  # as the worker has them
ROUNDING = 2.0**-22  # of an average or two, as a share of the largest value
# Of the run that is resumed: every step differs from the one before in something that must be restored.
CONFIG = {
    "quantizer": {"kind": "stochastic", "value": 1.0, "error_feedback": True},
    "policies": [{"name": "*.bias", "action": "skip"}, {"name": "b.weight", "quantizer": {"value": 0.1}}],
    "steps": {"warmup": 2, "bounds": [{"step": 5, "times": 0.5}]},
    "guard": {"every": 3, "max_relative_error": 1e-9, "on_alarm": "tighten"},
    "transport": {"min_bytes": 0},
}


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """What all cases found, and then the runs that went on from the checkpoints that the first left."""
    folder = tmp_path_factory.mktemp("training")
    config = folder / "config.json"
    config.write_text(json.dumps(CONFIG))

    def run(part):
        command = horovod_ranks(WORKERS / "horovod_training.py", folder, part)
        return launch(command, folder / part, timeout=120, environment={"NCZ_CONFIG": str(config)})

    return run("all"), run("resumed")


@pytest.fixture(scope="module")
def ranks(launched):
    assert len(launched[0].ranks) == 2
    return launched[0].ranks


@pytest.mark.parametrize("stop", STOPS)
def test_a_run_that_was_stopped_and_resumed_is_the_same_to_the_bit(stop, launched):
    whole, resumed = launched
    assert len(resumed.ranks) == 2
    for before, after in zip(whole.ranks, resumed.ranks):
        assert before["run"] == after[f"step {stop}"]
        assert before["run"]["kept"]["step"] == STEPS


def test_what_is_lost_is_made_up_for(ranks):
    for rank in ranks:
        result = rank["feedback"]
        assert BOUND / 2 < result["error"] <= BOUND + result["rounding"]  # after six steps as after one
        assert result["error_with_what_is_kept"] <= result["rounding"]
        assert BOUND / 2 < result["kept"] <= BOUND


def test_every_tensor_is_known_by_a_name_of_its_own(ranks):
    for rank in ranks:
        names = rank["names"]
        parameters = names["parameters"]
        assert names["an optimizer"] == names["groups"] == parameters
        assert names["without names"] == [f"allreduce.noname.0.{at}" for at in range(len(parameters))]
        second = [f"optimizer 2/{name}" for name in parameters]
        assert names["two optimizers, the first then made anew"] == parameters + second
        assert names["a group"] == ["allreduce/g.0", "allreduce/g.1"]
        assert names["a gradient through an average"] == ["allreduce/x", "allreduce/x.gradient"]


@pytest.mark.parametrize(
    "case, remedy",
    {
        "a tensor": "pass name=",
        "a name twice": "2 pending tensors have the name allreduce/same",
        "an optimizer with policies by name": "policies[0].name: '*.bias'",
    }.items(),
)
def test_what_needs_names_is_refused_without(case, remedy, ranks):
    for rank in ranks:
        error = rank["without names"][case]
        assert error["kind"] == "UnsupportedError" and remedy in error["message"]


def test_each_parameter_gets_what_its_policy_says(ranks):
    for rank in ranks:
        warm_up, step = rank["treated differently"]["steps"]
        assert (warm_up["calls"], warm_up["compressed"], warm_up["bypasses"]) == (1, 0, {"warm-up": 1})
        assert max(warm_up["errors"].values()) <= ROUNDING * warm_up["largest"]
        assert (step["calls"], step["compressed"], step["bypasses"]) == (3, 2, {"policy": 1})
        for name, error in step["errors"].items():
            if name.endswith(".bias") or name.startswith("exit."):
                assert error <= ROUNDING * step["largest"], name
            elif name == "b.weight":
                assert 0 < error <= BOUND / 50 + ROUNDING * step["largest"]
            else:
                assert BOUND / 50 < error <= BOUND + ROUNDING * step["largest"], name


def test_steps_are_those_of_the_optimizer(ranks):
    for rank in ranks:
        # The metric after the third step belongs to the fourth, which is the first one after the warm-up.
        assert rank["steps"] == {"steps": 4, "compressed": [0, 0, 0, 2], "alone": 4}


def test_the_guard_verifies_and_answers(ranks):
    for rank in ranks:
        result = rank["verified"]
        header, *steps = result["lines"]
        assert header["backend"] == "horovod" and header["ranks"] == 2
        assert [step["step"] for step in steps] == [1, 2, 3, 4]
        assert [step["bound_times"] for step in steps] == [1, 0.5, 0.5, 0.25]
        for at, step in enumerate(steps):
            if at % 2:
                assert "guard" not in step
                continue
            (finding,) = step["guard"]
            assert finding["name"] == f"tensor {at}" and finding["alarm"]
            assert finding["relative_error"] == pytest.approx(result["relative_errors"][at], rel=1e-3)
        for times, error in zip([1, 0.5, 0.5, 0.25], result["errors"]):
            assert times * BOUND / 2 < error <= times * BOUND + 1e-5
        assert result["stopped"]["kind"] == "AccuracyError"
    assert len({rank["verified"]["stopped"]["message"] for rank in ranks}) == 1


def test_ranks_that_load_nothing_follow_the_one_that_does(ranks):
    first, second = (rank["loaded by the first only"] for rank in ranks)
    assert first["had"]["step"] == 3 and first["had"]["kept"] > 0
    assert second["had"] == {"step": 0, "kept": 0}
    for result in (first, second):
        assert result["step"] == 4 and result["compressed"] == [1]  # past the warm-up
    assert first["sha256"] == second["sha256"]


def test_they_follow_a_guard_that_has_tightened(ranks):
    results = [rank["known by the first only"]["guard"] for rank in ranks]
    for result in results:
        assert BOUND / 4 < result["error"] <= BOUND / 2 + result["rounding"]
    assert len({result["sha256"] for result in results}) == 1


def test_elastic_training_can_go_back_to_a_commit_again(ranks):
    for rank in ranks:
        committed, *restored = rank["restored twice"]["states"]
        assert committed[0] == 1 and restored == [committed] * 2


def test_what_another_rank_has_kept_is_left_to_it(launched, ranks):
    for rank in ranks:
        assert rank["saved by another rank"] == {"step": 1, "kept": 0}
    assert launched[0].output.count("saved by rank 1 of 2 and is loaded by rank 0 of 2") == 1
