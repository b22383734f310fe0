"""What lasts from step to step: counted, decided alike, saved and restored."""

import copy
import json
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from on_rank import saved

from ncz_plugins.core.config import Config
from ncz_plugins.core.errors import AccuracyError, ConfigError
from ncz_plugins.core.runtime.statistics import Counters
from ncz_plugins.core.training.guard import Finding
from ncz_plugins.core.training.policy import ParameterSlice
from ncz_plugins.core.training.state import Training

RANKS = (0, 1)


def of_two_ranks(rank=0, **sections) -> Training:
    training = Training(sections)
    training.rank, training.world_size = rank, 2
    return training


def test_parts_that_are_treated_alike_are_put_together():
    training = of_two_ranks(policies=[{"name": "*.bias", "action": "skip"}])
    parts = [
        ParameterSlice("a.bias", 3),
        ParameterSlice("a.weight", 9),
        ParameterSlice(None, 1),
        ParameterSlice("b.bias", 3),
    ]
    (skipped, biases), (compressed, others) = training.grouped(parts, torch.float32, "gradient", RANKS)
    assert (biases, others) == ([0, 3], [1, 2])
    assert skipped.bypass and not compressed.bypass


def test_a_step_is_closed_counted_and_recorded(tmp_path, capsys):
    training = of_two_ranks(statistics={"jsonl": str(tmp_path / "run.jsonl"), "report_every": 2})
    training.begin(ranks=2)
    for _ in range(2):
        training.stats.record(Counters(calls=1, bytes_in=800, plain_bytes=800, wire_bytes=100))
        assert training.end_step().ratio == 8
    header, *records = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
    assert header["ranks"] == 2 and header["config"]["quantizer"]["value"] == 0.375
    assert [(each["step"], each["wire_bytes"], each["bound_times"]) for each in records] == [(1, 100, 1), (2, 100, 1)]
    assert records[0]["step_seconds"] is None and records[1]["step_seconds"] >= 0
    assert training.step == 2
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1 and printed[0].startswith("ncz_plugins: step 2: ")


def test_other_ranks_write_nothing(tmp_path, capsys):
    training = of_two_ranks(1, statistics={"jsonl": str(tmp_path / "run.jsonl"), "report_every": 1})
    training.begin(ranks=2)
    training.end_step()
    assert not (tmp_path / "run.jsonl").exists() and not capsys.readouterr().out


def of_a_run() -> Training:
    training = of_two_ranks()
    training.residuals.of(ParameterSlice("a", 5), torch.zeros(1)).copy_(torch.arange(5.0))
    group = training.of_group(RANKS)
    group.calls, group.guard.tightening = 17, 0.5
    training.step = 9
    return training


def part_of(state: dict, rank: int = 0) -> dict:
    """What a state has of one rank alone."""
    [part] = state[f"rank {rank}"]
    return part


GROUP = part_of(of_a_run().state_dict())["groups"]["0 1"]


def test_a_state_goes_through_a_checkpoint():
    training = of_two_ranks()
    training.load_state_dict(saved(of_a_run()))
    assert training.step == 9
    assert torch.equal(training.residuals.by_name["a"], torch.arange(5.0))
    assert part_of(training.state_dict())["groups"] == {"0 1": GROUP}  # though none was asked for yet
    group = training.of_group(RANKS)
    assert (group.calls, group.guard.tightening) == (17, 0.5)
    assert training.treatment(ParameterSlice("a", 5), torch.float32, None, RANKS).quantizer.value == 0.1875


@pytest.mark.parametrize(("rank", "world_size"), [(0, 3), (1, 2)])
def test_the_state_of_another_rank_gives_no_residuals(rank, world_size, capsys):
    training = Training()
    training.rank, training.world_size = rank, world_size
    training.load_state_dict(saved(of_a_run()))
    assert training.step == 9 and not training.residuals.by_name
    group = training.of_group((0, 1, 2))
    assert (group.calls, group.guard.tightening) == (0, 0.5)
    received = capsys.readouterr().err
    assert (
        f"saved by rank 0 of 2 and is loaded by rank {rank} of {world_size}: " in received
        and "starts at zero" in received
    )


def test_what_all_ranks_have_alike_is_taken_from_the_state_of_any():
    """As where one rank's state is loaded by all: they would number their calls differently."""
    training = Training()
    training.rank, training.world_size = 1, 2
    training.load_state_dict(saved(of_a_run()))
    assert training.of_group(RANKS).calls == 17


def with_part(key: str, value: object) -> dict:
    state = of_a_run().state_dict()
    return state | {"rank 0": (part_of(state) | {key: value},)}


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({}, "format None is not one that"),
        ({"step": 3}, "format None is not one that"),
        (None, "format 'NoneType' is not one that"),
        (
            {"format": 2, "rank": 0, "world_size": 2, "step": 3, "residuals": {}, "groups": {}},
            "format 2 is not one that",
        ),
        ({"format": 3, "world_size": 2, "step": 3, "tightening": 1.0}, 'no key "rank 0".*a part is missing'),
        ({"format": 3, "rank 0": ({"residuals": {}, "groups": {}},)}, "world_size: Field required"),
        *(
            (of_a_run().state_dict() | {key: value}, key)
            for key, value in [
                ("step", "3"),
                ("step", -1),
                ("step", True),
                ("world_size", 0),
                ("tightening", 0.0),
                ("tightening", "x"),
            ]
        ),
        *(
            (of_a_run().state_dict() | {"rank 0": value}, "ranks.0")
            for value in [
                None,
                (),
                {},
                ({},),
                ({"residuals": {}},),
                ({"groups": {}},),
                ({"residuals": {}, "groups": {}},) * 2,
            ]
        ),
        *(
            (with_part(key, value), key)
            for key, value in [
                ("residuals", None),
                ("residuals", {"a": [1.0, 2.0]}),
                ("residuals", {"a": torch.zeros(2, 2)}),
                ("residuals", {"a": torch.zeros(2).to_sparse()}),
                ("residuals", {3: torch.zeros(2)}),
                ("groups", []),
                ("groups", {"all": GROUP}),
                ("groups", {"0 1": {}}),
                ("groups", {"0 1": GROUP | {"guard": {"tightening": 0, "calls": 1}}}),
                ("groups", {"0 1": GROUP | {"guard": {"tightening": "x", "calls": 1}}}),
                ("groups", {"0 1": GROUP | {"calls": -1}}),
            ]
        ),
    ],
)
def test_a_foreign_state_is_refused(state, words):
    """And changes nothing."""
    training = of_a_run()
    before = saved(training)
    with pytest.raises(ConfigError, match=words):
        training.load_state_dict(state)
    assert str(saved(training)) == str(before)


def test_residuals_of_older_states_are_rounded():
    """They are float32."""
    state, training = saved(of_a_run()), of_two_ranks()
    part_of(state)["residuals"]["a"] = exact = torch.arange(5.0) / 3
    training.load_state_dict(state)
    kept = training.residuals.by_name["a"]
    assert kept.dtype == torch.bfloat16 and torch.equal(kept, exact.bfloat16()) and exact.dtype == torch.float32


def test_residuals_that_are_not_finite_start_at_zero():
    """An earlier version kept such of a fixed rate."""
    training, state = of_two_ranks(), saved(of_a_run())
    part_of(state)["residuals"]["a"][2] = torch.nan
    training.load_state_dict(state)
    assert training.residuals.by_name["a"].tolist() == [0, 1, 0, 3, 4]


def test_fewer_ranks_than_before_write_a_header(tmp_path):
    training = of_two_ranks(statistics={"jsonl": str(tmp_path / "run.jsonl")})
    for ranks in (4, 3):
        training.world_size = ranks
        training.begin(ranks=ranks)
    training.begin(ranks=2)  # a group of some
    headers = [json.loads(line)["ranks"] for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert headers == [4, 3]


def test_a_state_may_be_loaded_twice():
    """What is kept is added up in place, in memory of its own."""
    state, trainings = saved(of_a_run()), [of_two_ranks(), of_two_ranks()]
    for training in trainings:
        training.load_state_dict(state)
        training.residuals.of(ParameterSlice("a", 5), torch.zeros(1)).add_(1)
    for training in trainings:
        assert torch.equal(training.residuals.by_name["a"], torch.arange(5.0) + 1)
    assert torch.equal(part_of(state)["residuals"]["a"], torch.arange(5.0))


def test_a_state_in_memory_that_is_no_copy_is_refused():
    """Steps change what it holds: to go back to it would restore the step, and the residuals of now."""
    training = of_a_run()
    live, copied = training.state_dict(), copy.deepcopy(training.state_dict())
    training.residuals.by_name["a"].add_(1)
    training.step += 1
    for state in (live, training.state_dict()):
        with pytest.raises(ConfigError, match="deepcopy"):
            training.load_state_dict(state)
    training.load_state_dict(copied)
    assert training.step == 9 and torch.equal(training.residuals.by_name["a"], torch.arange(5.0))


def test_what_replaces_a_configuration_is_checked_before_it_does():
    training = of_a_run()
    training.config = {"quantizer": {"value": 2.0}}
    assert training.config.quantizer.value == 2
    with pytest.raises(ConfigError, match="valeu"):
        training.config = {"quantizer": {"valeu": 1.0}}
    assert training.config.quantizer.value == 2


def test_an_alarm_in_one_group_ends_the_step_in_all_of_them():
    """Another group may have a rank that is not in the first, and would pick other sums than these from then on."""
    training = of_two_ranks(guard={"every": 1, "on_alarm": "stop"})
    one, other = (training.of_group(ranks).guard for ranks in (RANKS, (0, 1, 2)))
    for _ in range(3):
        other.picks(0)
    for guard in (one, other):
        guard.findings.append(Finding("weight", 2.0, 0.1, alarm=guard is one))
    with pytest.raises(AccuracyError):
        training.end_step()
    assert not one.findings and not other.findings
    assert other.state_dict()["calls"] == 3


def test_a_group_that_a_state_does_not_know_begins_alike_on_all_ranks():
    """Only the ranks of the smaller group know what that has tightened."""
    for smaller in ([], [RANKS]):
        training = Training()
        training.rank, training.world_size = 0, 3
        for ranks in [(0, 1, 2), *smaller]:
            training.of_group(ranks).guard.tightening = 0.5 / len(ranks[1:])
        training.of_group((0, 1, 2)).guard.tightening = 0.5
        again = of_two_ranks()
        again.load_state_dict(saved(training))
        assert again.of_group(RANKS).guard.tightening == 0.5


def test_what_was_tightened_outlives_two_changes_of_the_number_of_ranks():
    """The run in between made no call, so that it knows of no group."""
    state = saved(of_a_run())
    for ranks in (3, 4):
        training = Training()
        training.rank, training.world_size = 0, ranks
        training.load_state_dict(state)
        state = saved(training)
    assert training.of_group(range(4)).guard.tightening == 0.5


def test_groups_that_meet_anew_begin_from_nothing():
    """Also where one of the ranks has loaded a state and the others have not: they would number calls differently."""
    training = of_two_ranks()
    training.load_state_dict(saved(of_a_run()))
    training.forget_groups()
    assert training.of_group(RANKS).calls == 0


# ------------------------------------------------------------------ torch.distributed.checkpoint


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """Of rank 0 of 2, beside a tensor."""
    monkeypatch.setattr(warnings, "warn", lambda *args, **kwargs: None)  # that there is no process group
    dcp.save({"w": torch.ones(3), "ncz": of_a_run()}, checkpoint_id=tmp_path)
    return tmp_path


def restored(checkpoint, training: Training, **planner) -> Training:
    planner = dcp.DefaultLoadPlanner(**planner) if planner else None
    dcp.load({"w": torch.zeros(3), "ncz": training}, checkpoint_id=checkpoint, planner=planner)
    return training


def test_dcp_restores_all_of_it_in_a_new_process(checkpoint):
    """Whose own state has no residuals and no groups yet: DCP loads into keys that are there."""
    training = restored(checkpoint, of_two_ranks())
    assert str(saved(training)) == str(saved(of_a_run()))


def test_dcp_restores_all_of_it_in_the_same_process(checkpoint):
    training = of_a_run()
    training.residuals.by_name["a"].zero_()
    training.step = 12
    assert str(saved(restored(checkpoint, training))) == str(saved(of_a_run()))


def test_dcp_with_fewer_ranks(checkpoint, capsys):
    training = restored(checkpoint, Training())
    assert training.step == 9 and not training.residuals.by_name
    assert training.of_group([0]).guard.tightening == 0.5
    assert "saved by rank 0 of 2 and is loaded by rank 0 of 1" in capsys.readouterr().err


def test_dcp_with_more_ranks(checkpoint):
    """A key of the new rank's own is in no checkpoint: DCP refuses that, unless it is told not to."""
    training = Training()
    training.rank, training.world_size = 2, 3
    with pytest.raises(dcp.api.CheckpointException, match="Missing key in checkpoint state_dict: ncz.rank 2"):
        restored(checkpoint, training)
    assert training.step == 0
    restored(checkpoint, training, allow_partial_load=True)
    assert training.step == 9 and training.of_group(range(3)).guard.tightening == 0.5


def test_what_dcp_does_not_restore_is_refused(checkpoint, tmp_path):
    """Without a word of its own it gives back the state of the new process."""
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "without")
    with pytest.raises(ConfigError, match='the checkpoint has no "rank 0"'):
        restored(tmp_path / "without", of_two_ranks(), allow_partial_load=True)
    with pytest.raises(ConfigError, match='the checkpoint has no "rank 1"'):  # though the step is there
        restored(checkpoint, of_two_ranks(1), allow_partial_load=True)
    state, planner = {"w": torch.ones(3), "ncz": of_a_run()}, dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, checkpoint_id=tmp_path / "whole", planner=planner)
    with pytest.raises(ConfigError, match="the planner has flatten_state_dict=False"):
        restored(tmp_path / "whole", of_two_ranks(), flatten_state_dict=False)


def test_a_configuration_may_be_replaced_between_steps():
    training = of_a_run()
    training.config = Config(quantizer={"value": 1}, guard={"every": 3})
    assert training.treatment(ParameterSlice("a", 5), torch.float32, None, RANKS).quantizer.value == 0.5
    assert training.of_group(RANKS).guard.settings.every == 3
