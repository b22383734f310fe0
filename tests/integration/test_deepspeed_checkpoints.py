"""DeepSpeed's checkpoints hold what compression needs to go on as if nothing had happened."""

import contextlib
import hashlib
import io
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

import torch
from on_rank import rank, same_on_all_ranks, start
from scenarios import DEEPSPEED, on_ranks
from small_engine import configuration, engine_of, parameters_sha256, train

import ncz_plugins.deepspeed  # noqa: F401

pytestmark = pytest.mark.slow

STEPS, SAVED = 6, (1, 4)  # a checkpoint within the warm-up, and one between two changes of bounds
COMPRESSION = {
    "quantizer": {"kind": "stochastic", "value": 1.0, "error_feedback": True},
    "steps": {"warmup": 2, "bounds": [{"step": 3, "times": 0.5}, {"step": 5, "times": 2.0}]},
    "transport": {"min_bytes": 0},
}
CASES = {
    "stage 0": configuration(0, COMPRESSION),
    "stage 2": configuration(2, COMPRESSION),
    "stage 3": configuration(3, COMPRESSION),
    "never compressed": configuration(0, None),
}
PARAMETERS = sorted(f"{layer}.{kind}" for layer in (0, 2, 4) for kind in ("weight", "bias"))
ANEW = {"step": 0, "residuals": 0}
HOW = {"launcher": "torch", "seconds": 240, **DEEPSPEED}


# ---------------------------------------------------------------- on each rank


def outcome(engine) -> dict:
    """What two runs must have in common."""
    compression = engine.communication_compression
    residuals = compression.training.residuals.by_name
    digest = hashlib.sha256()
    for name, residual in sorted(residuals.items()):
        digest.update(name.encode())
        digest.update(residual.contiguous().view(torch.uint8).numpy())
    last_steps = list(compression.stats.steps)[-(STEPS - SAVED[-1]) :]
    return {
        "parameters": parameters_sha256(engine),
        "residuals": {"names": sorted(residuals), "sha256": digest.hexdigest()},
        "step": compression.training.step,
        # What the schedule and the warm-up came to, not what it took.
        "last steps": [[s.calls, s.compressed_calls, s.wire_bytes, dict(s.bypasses)] for s in last_steps],
    }


def train_and_save(folder: str) -> dict:
    """A run of each case that is not stopped. Returns the outcomes of those that are compressed."""
    start()
    outcomes = {}
    for name, config in CASES.items():
        engine = engine_of(config)
        for step in range(STEPS):
            if step in SAVED:
                engine.save_checkpoint(f"{folder}/{name}", tag=None if step == SAVED[-1] else f"after {step}")
            train(engine, range(step, step + 1))
        if engine.communication_compression:
            outcomes[name] = outcome(engine)
        engine.destroy()
    return outcomes


def load(engine, *args, **kwargs) -> str:
    """Load a checkpoint. Returns what the plugin printed or raised."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            path, _ = engine.load_checkpoint(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    assert path is not None
    return "".join(line for line in printed.getvalue().splitlines(True) if line.startswith("ncz_plugins"))


def known(engine) -> dict:
    training = engine.communication_compression.training
    return {"step": training.step, "residuals": len(training.residuals.by_name)}


def loaded(config: dict, *args, **kwargs) -> tuple[str, dict]:
    """What the plugin says when a new engine loads a checkpoint, and what compression knows then."""
    engine = engine_of(config)
    said = load(engine, *args, **kwargs)
    found = known(engine)
    engine.destroy()
    return said, found


# ---------------------------------------------------------------- the checkpoints


@dataclass
class Saved:
    """Checkpoints of a run that was not stopped, and its outcome on each rank."""

    folder: Path
    outcomes: list[dict]

    def last(self, name: str) -> Path:
        """The folder of a case's last checkpoint."""
        return self.folder / name / f"global_step{SAVED[-1]}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Saved:
    saved = Saved(tmp_path_factory.mktemp("checkpoints"), [])
    # An earlier run of 3 ranks left a file under the tag of the last checkpoint.
    saved.last("stage 0").mkdir(parents=True)
    (saved.last("stage 0") / "ncz_plugins_rank_00002.pt").write_bytes(b"what a third rank saved")
    saved.outcomes = on_ranks(2, train_and_save, saved.folder, saved.folder, **HOW)
    return saved


def test_files_are_whole_and_hold_nothing_but_plain_data(saved):
    for name in ("stage 0", "stage 3"):  # in one of these more ranks had left theirs
        files = sorted(saved.last(name).glob("ncz_plugins*"))
        assert [file.name for file in files] == ["ncz_plugins_rank_00000.pt", "ncz_plugins_rank_00001.pt"]
        for file in files:
            assert torch.load(file, weights_only=True)["step"] == SAVED[-1]


# ---------------------------------------------------------------- resumed runs


def resume(folder: str, through: list[dict]) -> None:
    start()
    for name in ("stage 2", "stage 3"):
        for step, tag in ((SAVED[0], f"after {SAVED[0]}"), (SAVED[1], None)):
            # It begins where the other was. No residual is kept within the warm-up.
            engine = engine_of(CASES[name])
            assert load(engine, f"{folder}/{name}", tag) == ""
            assert known(engine) == {"step": step, "residuals": 0 if step < 2 else len(PARAMETERS)}
            # It ends with the same bits.
            train(engine, range(step, STEPS))
            found = outcome(engine)
            assert found == through[rank][name], (name, step)
            assert found["residuals"]["names"] == PARAMETERS and found["step"] == STEPS
            engine.destroy()


def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(saved):
    for name in ("stage 2", "stage 3"):
        first, second = (each[name]["residuals"]["sha256"] for each in saved.outcomes)
        assert first != second  # each rank keeps something of its own
    on_ranks(2, resume, saved.folder, saved.folder, saved.outcomes, **HOW)


def grow(folder: str) -> None:
    start()
    engine = engine_of(CASES["stage 0"])
    said = load(engine, f"{folder}/stage 0")
    assert "saved by rank 0 of 2 and is loaded by rank 0 of 3" in said if rank == 0 else said == ""
    assert known(engine) == {"step": SAVED[-1], "residuals": 0}
    train(engine, range(SAVED[-1], STEPS))
    found = outcome(engine)
    assert found["step"] == STEPS and found["residuals"]["names"] == PARAMETERS
    same_on_all_ranks(found["parameters"])


def test_more_ranks_go_on_with_the_step_but_without_residuals(saved):
    on_ranks(3, grow, saved.folder, saved.folder, **HOW)


# ---------------------------------------------------------------- checkpoints without what compression needs


def begin_anew(folder: str) -> None:
    start()
    # Without the optimizer's state nothing is said.
    for options in ({"load_optimizer_states": False}, {"load_module_only": True}):
        assert loaded(CASES["stage 2"], f"{folder}/stage 2", **options) == ("", ANEW)

    # A checkpoint without compression is said in one line. Files that another run left under its tag are not taken.
    for tag in (None, "after 1"):
        said, found = loaded(CASES["stage 0"], f"{folder}/never compressed", tag)
        assert found == ANEW
        if rank == 0:
            assert "was saved without compression: error feedback, warm-up and schedule begin anew" in said
        assert len(said.splitlines()) == (1 if rank == 0 else 0)


def test_a_checkpoint_without_state_of_compression_begins_anew(saved):
    # Saved with compression, and again under the same tag without: our files are of another run.
    for file in saved.last("stage 0").glob("ncz_plugins_rank_*"):
        shutil.copy(file, saved.folder / "never compressed" / "after 1")
    on_ranks(2, begin_anew, saved.folder, saved.folder, **HOW)


def load_universal(folder: str) -> None:
    start()
    config = {**CASES["stage 2"], "checkpoint": {"load_universal": True}}
    said, found = loaded(config, f"{folder}/stage 2", "universal")
    assert found == ANEW
    if rank == 0:
        assert "ds_to_universal" in said and "copy the files ncz_plugins_rank_*" in said
    else:
        assert said == ""
    all_of_it = {"step": SAVED[-1], "residuals": len(PARAMETERS)}
    assert loaded(config, f"{folder}/stage 2", "universal with our files") == ("", all_of_it)


def test_a_universal_checkpoint_has_no_state_of_compression_unless_it_is_copied(saved):
    # DeepSpeed's own conversion.
    last, universal = saved.last("stage 2"), saved.folder / "stage 2" / "universal"
    module = ["-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state", "--num_extract_workers", "1"]
    paths = ["--input_folder", str(last), "--output_folder", str(universal)]
    subprocess.run([sys.executable, *module, *paths], check=True, capture_output=True, timeout=120)
    assert not list(universal.glob("ncz_plugins*"))

    # A copy with our files.
    with_files = universal.with_name("universal with our files")
    shutil.copytree(universal, with_files)
    for file in last.glob("ncz_plugins_rank_*"):
        shutil.copy(file, with_files)
    on_ranks(2, load_universal, saved.folder, saved.folder, **HOW)


def load_broken(folder: str) -> None:
    start()
    said, _ = loaded(CASES["stage 0"], f"{folder}/damaged")
    if rank == 0:
        assert said.startswith("MismatchError: ") and f"find a damaged file, others step: {SAVED[-1]}" in said
    else:
        assert said.startswith("NczError: ") and "what rank 1 saved there about compression can't be read" in said
    said, _ = loaded(CASES["stage 0"], f"{folder}/incomplete")
    assert said.startswith("MismatchError: ") and f"find no file, others step: {SAVED[-1]}" in said
    assert "delete the files ncz_plugins_rank_* in it to begin anew" in said


def test_a_damaged_or_missing_file_is_an_error_on_every_rank(saved):
    for name in ("damaged", "incomplete"):
        shutil.copytree(saved.folder / "stage 0", saved.folder / name)
    damaged, missing = (saved.last(name) / "ncz_plugins_rank_00001.pt" for name in ("damaged", "incomplete"))
    damaged.write_bytes(damaged.read_bytes()[:-1000])
    missing.unlink()
    on_ranks(2, load_broken, saved.folder, saved.folder, **HOW)
