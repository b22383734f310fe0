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
import yaml
from tasks import FINE_TUNING, TASKS, held_out_tones
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


class Says(torch.nn.Module):
    """The same for any input."""

    def __init__(self, output: torch.Tensor):
        super().__init__()
        self.output = output

    def forward(self, _):
        return self.output


class TestTones:
    """What the pretrained network is fine-tuned with. Its weights are not needed here."""

    pitch = TASKS[FINE_TUNING]()

    def test_ranks_share_a_batch(self):
        whole, *parts = (self.pitch.training_batch(0, 3, rank, ranks) for rank, ranks in ((0, 1), (0, 2), (1, 2)))
        for each, *of_ranks in zip(whole, *parts):
            assert torch.equal(each, torch.cat(of_ranks))
        sounds, cents = whole
        assert sounds.shape == (self.pitch.batch, 1024) and cents.shape == (self.pitch.batch,)
        assert not torch.equal(sounds, self.pitch.training_batch(0, 4, 0, 1)[0])

    def test_a_tone_repeats_itself_after_its_period(self):
        """Those without much noise, whose pitch hardly swings within two periods."""
        sounds, cents = self.pitch.training_batch(0, 0, 0, 1)
        alike = []
        for sound, pitch in zip(sounds, cents):
            period = round(16000 / (10 * 2 ** (pitch.item() / 1200)))
            first, second = sound[512 - period : 512], sound[512 : 512 + period]
            alike.append(torch.corrcoef(torch.stack([first, second]))[0, 1])
        assert torch.stack(alike).median() > 0.6

    @pytest.mark.parametrize("ranks", [1, 2])
    @pytest.mark.parametrize("off, right", [(0, 1), (45, 1), (55, 0), (-1200, 0)])
    def test_a_pitch_is_right_within_fifty_cents(self, off, right, ranks):
        """A network that says what it should, but for so many cents."""
        _, cents = held_out_tones()
        found = 0.0
        for rank, own in enumerate(cents.tensor_split(ranks)):
            logits = self.pitch.wanted(own + off).logit(1e-6)
            found += self.pitch.evaluate(Says(logits), rank, ranks)["accuracy"]
        assert found == pytest.approx(right, abs=0.01)


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
        for table in (outcome.presets(found), outcome.fixed_rates(found)):
            assert all(table in page.read_text() for page in (suite.RESULTS, suite.GUIDE))
        assert outcome.fine_tuning(found) in suite.RESULTS.read_text()

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
                each.setting.kind in ("error feedback", "rotated"),
                each.setting.kind == "rotated",
            )
            for each in outcome.compared(outcome.outcomes(committed))
            if each.setting.bound
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
        assert sorted(found, key=settings_of) == sorted(loss.MEASURED, key=settings_of)


def settings_of(measured: loss.Measured) -> tuple:
    return *measured[:4], *measured[6:]


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

    def test_the_guide_says_what_it_stands_for(self):
        shown = suite.GUIDE.read_text().split("`ncclz:muon-ddp` stands for:")[1].split("```")[1]
        assert Config.load(yaml.safe_load(shown.removeprefix("yaml"))) == Config.load("ncclz:muon-ddp")

    @pytest.mark.parametrize("task", ["GPT", "GPT, 64 sequences"])
    def test_it_is_harmless_at_a_ratio_of_six(self, task):
        added = self.added(task)
        assert len(added) == 5 and fmean(added) + outcome.interval(added) <= outcome.HARMLESS
        assert all(each["rotated"]["ratio"] >= 6 for each in self.found["runs"])
        assert all(each["rotated"]["replicas_identical"] for each in self.found["runs"])
        shown = f"+{100 * fmean(added):.2f} % ± {100 * outcome.interval(added):.2f}"
        assert all(shown in " ".join(page.read_text().split()) for page in (suite.RESULTS, suite.GUIDE))
