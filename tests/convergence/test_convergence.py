"""Compressed training converges: a few short trainings by real processes, and what was committed of the long ones."""

from __future__ import annotations

import json
from statistics import fmean

import frontier
import outcome
import plan
import pytest
import suite
import torch
from tasks import TASKS
from training import TRANSPORT, Job, Setting

from ncz_plugins.cli import loss
from ncz_plugins.core.config import Config
from ncz_plugins.core.training.policy import ParameterSlice, Policies

SECONDS = 240  # for all trainings, on a busy machine
WIDE, FED, RANDOM = (Setting(kind, 2.0, 4096) for kind in ("nearest", "error feedback", "stochastic"))

MLP = [Job("digits MLP", "SGD", setting, 0, 150) for setting in (plan.PLAIN, plan.BALANCED, WIDE, FED, RANDOM)]
CNN = [Job("digits CNN", "SGD", setting, 0, 60) for setting in (plan.PLAIN, plan.BALANCED, WIDE, FED)]
GPT = [
    Job(task, "AdamW", setting, 0, 30)
    for task, settings in (
        ("GPT tiny", (plan.PLAIN, plan.BF16, plan.BALANCED, Setting("error feedback", 0.25, 256), plan.RATES[4])),
        ("GPT tiny bf16", (plan.PLAIN, plan.BALANCED)),
    )
    for setting in settings
]
MUON = [Job("GPT tiny", "Muon", setting, 0, 30) for setting in (plan.PLAIN, plan.NAMED["muon-ddp"])]
REPEATED = MLP[3]


@pytest.fixture(scope="module")
def trained() -> list[dict]:
    """The record of every job, all done by one pair of processes; the last one is a repetition."""
    records = []
    suite.train([*MLP, *CNN, *GPT, *MUON, REPEATED], records.append, SECONDS)
    return records


@pytest.fixture(scope="module")
def runs(trained) -> dict[Job, dict]:
    found = {Job.read(record["job"]): record for record in trained[:-1]}
    assert list(found) == [*MLP, *CNN, *GPT, *MUON]
    return found


def more(runs, job: Job, key: str = "training_loss") -> float:
    """What a run has more than the plain one."""
    return runs[job][key] - runs[job._replace(setting=plan.PLAIN)][key]


def test_compression_is_at_work_and_replicas_are_identical(runs):
    for job, record in runs.items():
        assert record["replicas_identical"], job
        if job.setting.bound:
            treatments = 2 if job.setting.kind == "rotated" else 1
            assert record["calls"] == record["compressed_calls"] == treatments * job.steps, job
            assert record["ratio"] > 3, job


def test_a_run_can_be_repeated_to_the_bit(runs, trained):
    assert trained[-1] | {"seconds": 0} == runs[REPEATED] | {"seconds": 0}


@pytest.mark.parametrize("plain", [MLP[0], CNN[0]], ids=lambda job: job.task)
class TestDigits:
    def test_the_default_bound_learns_as_well(self, runs, plain):
        default = plain._replace(setting=plan.BALANCED)
        assert abs(more(runs, default)) < 0.1 * runs[plain]["training_loss"]
        assert more(runs, default, "accuracy") > -0.03

    def test_a_wide_bound_costs_and_error_feedback_gives_it_back(self, runs, plain):
        wide, fed = (more(runs, plain._replace(setting=setting)) for setting in (WIDE, FED))
        assert wide > 0.2 * runs[plain]["training_loss"]
        assert abs(fed) < wide / 3


def test_a_wide_bound_costs_less_with_random_rounding(runs):
    nearest, random = (more(runs, MLP[0]._replace(setting=setting)) for setting in (WIDE, RANDOM))
    assert abs(random) < nearest / 3


@pytest.mark.parametrize("task", ["GPT tiny", "GPT tiny bf16"])
def test_the_gpt_learns_in_both_precisions(runs, task):
    plain, *compressed = (job for job in GPT if job.task == task)
    assert runs[plain]["training_loss"] < 4.5  # a uniform guess is at 5.5
    for job in compressed:
        assert more(runs, job) < 0.25 and more(runs, job, "validation_loss") < 0.3


def test_the_preset_for_muon_learns_as_well(runs):
    plain, rotated = MUON
    assert runs[plain]["training_loss"] < 4.5
    assert abs(more(runs, rotated)) < 0.01 * runs[plain]["training_loss"]


@pytest.fixture(scope="module")
def committed() -> dict[Job, dict]:
    return suite.published()


class TestCommittedResults:
    def test_they_are_those_of_the_whole_plan(self, committed):
        assert set(committed) == set(plan.jobs())
        assert {job.task for job in committed} <= set(TASKS)

    def test_every_run_was_sound(self, committed):
        assert all(each.sound for each in outcome.outcomes(committed))

    def test_the_documentation_shows_them(self, committed):
        found = outcome.outcomes(committed)
        assert outcome.markdown(found) in suite.NOTEBOOK.read_text()
        assert all(outcome.presets(found) in page.read_text() for page in (suite.RESULTS, suite.GUIDE))

    def test_the_command_line_says_what_they_say(self, committed):
        """What `ncz check`, `ncz codec` and `ncz report` tell of a bound."""
        found = [
            loss.Measured(
                each.group[1],
                "stochastic" if each.setting.kind.startswith("stochastic") else "error_bound",
                each.setting.block,
                each.setting.bound,
                pytest.approx(fmean(each.added), abs=5e-5),
                pytest.approx(each.mean("gradient_error"), abs=5e-4),
                "bits" if each.setting.is_fixed_rate else "rms",
            )
            for each in outcome.outcomes(committed)
            if each.setting.bound and each.setting.kind != "error feedback"
            if each.group[2] == 2 and len(each.records) > 1
        ]
        found += [
            loss.Measured(
                "Lion",
                "stochastic",
                each.candidate.block,
                each.candidate.step,
                pytest.approx(fmean(each.added), abs=5e-5),
                pytest.approx(fmean(record["gradient_error"] for record in each.records), abs=5e-4),
            )
            for each in frontier.outcomes(frontier.committed())
            if each.group[1] == "Lion" and each.candidate != frontier.PLAIN
        ]
        assert sorted(found, key=lambda each: each[:4]) == sorted(loss.MEASURED, key=lambda each: each[:4])


class TestPresetForDDP:
    """What `under_ddp.py` came to: with these very settings, but for the names of the layers."""

    found = json.loads((suite.NUMBERS.parent / "muon-real-ranks.json").read_text())

    def added(self, task: str) -> list[float]:
        runs = [each for each in self.found["runs"] if each["task"] == task]
        return [each["rotated"]["training_loss"] / each["plain"]["training_loss"] - 1 for each in runs]

    def test_it_treats_each_parameter_as_was_measured(self):
        preset = Config.load("ncclz:muon-ddp").with_transport(**TRANSPORT)
        measured, now = (Policies(each) for each in (Config.load(self.found["config"]), preset))
        for name, parameter in TASKS["GPT"]().model().named_parameters():
            part = ParameterSlice(name, parameter.numel(), shape=tuple(parameter.shape))
            assert measured.treatment(part, torch.float32, "gradient", 0) == now.treatment(
                part, torch.float32, "gradient", 0
            )

    @pytest.mark.parametrize("task", ["GPT", "GPT, 64 sequences"])
    def test_it_is_harmless_at_a_ratio_of_six(self, task):
        added = self.added(task)
        assert len(added) == 5 and fmean(added) + outcome.interval(added) <= outcome.HARMLESS
        assert all(each["rotated"]["ratio"] >= 6 for each in self.found["runs"])
        assert all(each["rotated"]["replicas_identical"] for each in self.found["runs"])
        shown = f"+{100 * fmean(added):.2f} % ± {100 * outcome.interval(added):.2f}"
        assert all(shown in " ".join(page.read_text().split()) for page in (suite.RESULTS, suite.GUIDE))
