"""`ncz tune` measures over Horovod's own runtime, and NCZ follows the file that it writes."""

import json

import pytest
from launch import WORKERS, horovodrun, launch, needs_horovod

from ncz_plugins import Config
from ncz_plugins.core.tuning.tuning_file import Tuning

pytestmark = [pytest.mark.slow, needs_horovod]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """The file, what was printed, and what the ranks of a second launch made of it."""
    folder = tmp_path_factory.mktemp("tuning")
    file = folder / "tuned.json"
    command = horovodrun("-m", "ncz_plugins", "tune", "--seconds", "1", "--output", file)
    printed = launch(command, folder / "measure", timeout=200).output
    ranks = launch(horovodrun(WORKERS / "horovod_tuning.py", file), folder / "use", timeout=200).ranks
    assert len(ranks) == 2
    return Tuning.read(file), printed, ranks


def test_it_measures_over_horovod(tuned):
    tuning, printed, _ = tuned
    assert tuning.world_size == 2
    assert [trial.schedule for trial in tuning.trials[:2]] == ["direct", "ring"]  # direct is Horovod's ordinary one
    assert printed.count("is written") == 1


def test_the_file_is_followed(tuned):
    tuning, _, ranks = tuned
    for rank in ranks:
        transport = Config.load(json.loads(rank["config"])).transport
        assert (transport.schedule, transport.frame_bytes) == (tuning.schedule, tuning.frame_bytes)
        assert (transport.min_bytes, transport.link_gbps) == (tuning.min_bytes, tuning.link_gbps)
        expected = {
            "never": {"link too fast": 1},
            True: {"too small": 1},
            False: {},
        }["never" if tuning.min_bytes == "never" else 1_200_000 < tuning.min_bytes]
        assert rank["bypasses"] == expected and rank["calls"] == 1 and rank["compressed"] == (not expected)
        assert rank["sha256"] == ranks[0]["sha256"]


def test_auto_without_a_file_names_the_command(tuned):
    for rank in tuned[2]:
        kind, text = rank["auto"]
        assert kind == "ConfigError" and "horovodrun -np N ncz tune --output tuned.json" in text


def test_a_missing_file_is_an_error(tuned):
    for rank in tuned[2]:
        kind, text = rank["missing"]
        assert kind == "ConfigError" and "nowhere.json: cannot be read" in text
