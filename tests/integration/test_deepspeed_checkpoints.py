"""DeepSpeed's checkpoints hold what compression needs to go on as if nothing had happened."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from launch import WORKERS, deepspeed_ranks, launch

pytestmark = pytest.mark.slow

STEPS, SAVED = 6, (1, 4)  # as in the worker: a checkpoint within the warm-up, and one between two changes of bounds


def case(stage: int, compression: dict | None) -> dict:
    key = {} if compression is None else {"communication_compression": compression}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        **key,
    }


COMPRESSION = {
    "quantizer": {"kind": "stochastic", "value": 1.0, "error_feedback": True},
    "steps": {"warmup": 2, "bounds": [{"step": 3, "times": 0.5}, {"step": 5, "times": 2.0}]},
    "transport": {"min_bytes": 0},
}
CASES = {
    "stage 0": case(0, COMPRESSION),
    "stage 2": case(2, COMPRESSION),
    "stage 3": case(3, COMPRESSION),
    "never compressed": case(0, None),
}
PARAMETERS = sorted(f"{layer}.{kind}" for layer in (0, 2, 4) for kind in ("weight", "bias"))


class Runs:
    """Launches of the worker that share a folder of checkpoints."""

    def __init__(self, folder):
        self.folder = folder
        self.cases = folder / "cases.json"
        self.cases.write_text(json.dumps(CASES))

    def __call__(self, job: str, ranks: int = 2) -> list[dict]:
        command = deepspeed_ranks(WORKERS / "checkpoints.py", job, self.cases, self.folder, ranks=ranks)
        results = launch(command, self.folder / job, timeout=240).ranks
        assert len(results) == ranks
        return results


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def saved(runs):
    """A run that is not stopped."""
    of_more_ranks(runs.folder).parent.mkdir(parents=True)
    of_more_ranks(runs.folder).write_bytes(b"what a third rank saved")
    return runs("save")


def of_more_ranks(folder):
    """What an earlier run has left under the tag of the last checkpoint, of which 3 ranks go on."""
    return folder / "stage 0" / f"global_step{SAVED[-1]}" / "ncz_plugins_rank_00002.pt"


@pytest.fixture(scope="module")
def resumed(runs, saved):
    for name in ("damaged", "incomplete"):
        shutil.copytree(runs.folder / "stage 0", runs.folder / name)
    (file,) = (runs.folder / "damaged").glob("global_step*/ncz_plugins_rank_00001.pt")
    file.write_bytes(file.read_bytes()[:-1000])
    (file,) = (runs.folder / "incomplete").glob("global_step*/ncz_plugins_rank_00001.pt")
    file.unlink()
    # Saved with compression, and again under the same tag without: our files are of another run.
    stale = runs.folder / "never compressed" / "after 1"
    for file in (runs.folder / "stage 0" / f"global_step{SAVED[-1]}").glob("ncz_plugins_rank_*"):
        shutil.copy(file, stale)
    convert(runs.folder / "stage 2")
    return runs("resume")


def convert(folder) -> None:
    """DeepSpeed's own conversion of the last checkpoint in a folder, and a copy with our files."""
    last, universal = folder / f"global_step{SAVED[-1]}", folder / "universal"
    module = ["-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state", "--num_extract_workers", "1"]
    paths = ["--input_folder", str(last), "--output_folder", str(universal)]
    subprocess.run([sys.executable, *module, *paths], check=True, capture_output=True, timeout=120)
    assert not list(universal.glob("ncz_plugins*"))
    shutil.copytree(universal, folder / "universal with our files")
    for file in last.glob("ncz_plugins_rank_*"):
        shutil.copy(file, folder / "universal with our files")


@pytest.mark.parametrize("step", SAVED)
@pytest.mark.parametrize("stage", ["stage 2", "stage 3"])
class TestAResumedRun:
    def test_begins_where_the_other_was(self, stage, step, resumed):
        for rank in resumed:
            result = rank[f"{stage}, {step}"]
            assert result["said"] == ""
            assert result["loaded"] == {"step": step, "residuals": 0 if step < 2 else len(PARAMETERS)}

    def test_ends_with_the_same_bits_as_one_that_was_not_stopped(self, stage, step, saved, resumed):
        for through, again in zip(saved, resumed):
            result = again[f"{stage}, {step}"]
            assert result["parameters"] == through[stage]["parameters"]
            assert result["residuals"] == through[stage]["residuals"]
            assert result["residuals"]["names"] == PARAMETERS
            assert result["step"] == through[stage]["step"] == STEPS
            assert result["last steps"] == through[stage]["last steps"]


def test_every_rank_kept_something_of_its_own(saved):
    for stage in ("stage 2", "stage 3"):
        first, second = (rank[stage]["residuals"]["sha256"] for rank in saved)
        assert first != second


def test_files_are_whole_and_hold_nothing_but_plain_data(runs, saved):
    folder = runs.folder / "stage 3" / f"global_step{SAVED[-1]}"
    files = sorted(file.name for file in folder.glob("ncz_plugins*"))
    assert files == ["ncz_plugins_rank_00000.pt", "ncz_plugins_rank_00001.pt"]
    for file in files:
        assert torch.load(folder / file, weights_only=True)["step"] == SAVED[-1]


def test_what_a_run_of_more_ranks_has_left_under_a_tag_is_removed(runs, saved):
    assert not of_more_ranks(runs.folder).exists()
    assert len(list(of_more_ranks(runs.folder).parent.glob("ncz_plugins_rank_*"))) == 2


def test_without_the_optimizers_state_compression_begins_anew(resumed):
    for rank in resumed:
        for name in ("without optimizer", "module only"):
            assert rank[name] == {"said": "", "step": 0, "residuals": 0}


def test_a_checkpoint_without_compression_is_said_in_one_line_and_begins_anew(resumed):
    first, second = (rank["never compressed"] for rank in resumed)
    assert "was saved without compression: error feedback, warm-up and schedule begin anew" in first["said"]
    assert len(first["said"].splitlines()) == 1
    assert second["said"] == ""
    assert first["step"] == second["step"] == first["residuals"] == second["residuals"] == 0


def test_files_that_another_run_left_under_a_tag_are_not_taken(resumed):
    first, second = (rank["another run's"] for rank in resumed)
    assert "was saved without compression" in first["said"] and second["said"] == ""
    assert first["step"] == second["step"] == first["residuals"] == second["residuals"] == 0


def test_a_universal_checkpoint_has_no_state_of_compression_unless_it_is_copied(resumed):
    first, second = (rank["universal"] for rank in resumed)
    assert "ds_to_universal" in first["said"] and "copy the files ncz_plugins_rank_*" in first["said"]
    assert second["said"] == "" and first["step"] == first["residuals"] == 0
    for rank in resumed:
        found = rank["universal with our files"]
        assert found == {"said": "", "step": SAVED[-1], "residuals": len(PARAMETERS)}


def test_a_damaged_or_missing_file_is_an_error_on_every_rank(resumed):
    first, second = (rank["damaged"]["said"] for rank in resumed)
    assert first.startswith("MismatchError: ") and f"find a damaged file, others step: {SAVED[-1]}" in first
    assert second.startswith("NczError: ") and "what rank 1 saved there about compression can't be read" in second
    for rank in resumed:
        said = rank["incomplete"]["said"]
        assert said.startswith("MismatchError: ") and f"find no file, others step: {SAVED[-1]}" in said
        assert "delete the files ncz_plugins_rank_* in it to begin anew" in said


def test_more_ranks_go_on_with_the_step_but_without_residuals(runs, saved):
    ranks = runs("grow", ranks=3)
    assert [rank["loaded"] for rank in ranks] == [{"step": SAVED[-1], "residuals": 0}] * 3
    assert "saved by rank 0 of 2 and is loaded by rank 0 of 3" in ranks[0]["said"]
    assert [rank["said"] for rank in ranks[1:]] == ["", ""]
    assert all(rank["step"] == STEPS and rank["residuals"]["names"] == PARAMETERS for rank in ranks)
    assert len({rank["parameters"] for rank in ranks}) == 1
