"""`ncz tune` measures over Horovod's own runtime, and NCZ follows the file that it writes."""

from pathlib import Path

import pytest

pytest.importorskip("horovod")

import horovod.torch as hvd
from launch import horovodrun, launch
from on_rank import folder, raises, same_on_all_ranks, start
from scenarios import HOROVOD, on_ranks
from under_horovod import own_values, sha256

import ncz_plugins.horovod as ncz
from ncz_plugins import ConfigError
from ncz_plugins.core.tuning.tuning_file import Tuning

pytestmark = pytest.mark.slow

OPEN = {"frame_bytes": "auto", "min_bytes": "auto"}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """The file, and what was printed."""
    folder = tmp_path_factory.mktemp("tuning")
    file = folder / "tuned.json"
    command = horovodrun("-m", "ncz_plugins", "tune", "--seconds", "1", "--output", file)
    return file, launch(command, folder / "measure", timeout=200).output


def test_it_measures_over_horovod(tuned):
    file, printed = tuned
    tuning = Tuning.read(file)
    assert tuning.world_size == 2
    assert [trial.schedule for trial in tuning.trials[:2]] == ["direct", "ring"]  # direct is Horovod's ordinary one
    assert printed.count("is written") == 1


def reduce_as_tuned(file: str) -> bool:
    start()
    tuning = Tuning.read(Path(file))
    compressor = ncz.NCZ(transport={"tuning": file, **OPEN})
    tensor = own_values(300_000)
    result = ncz.allreduce(tensor, name="tuned", compression=compressor)
    transport, total = compressor.config.transport, compressor.stats.total
    assert (transport.schedule, transport.frame_bytes) == (tuning.schedule, tuning.frame_bytes)
    assert (transport.min_bytes, transport.link_gbps) == (tuning.min_bytes, tuning.link_gbps)
    if tuning.min_bytes == "never":
        expected = {"link too fast": 1}
    else:
        expected = {"too small": 1} if tensor.nbytes < tuning.min_bytes else {}
    assert total.bypasses == expected and total.calls == 1 and total.compressed_calls == (not expected)
    same_on_all_ranks(sha256([result]))

    # A schedule of host memory is left open on GPUs, also where elastic training has passed on the settings of rank 0.
    halves = folder() / f"halves{hvd.rank()}.json"
    tuning.model_copy(update={"schedule": "halving", "min_bytes": 0}).write(halves)
    compressor = ncz.NCZ(transport={"tuning": str(halves), **OPEN})
    hvd.elastic.TorchState(ncz=compressor).sync()
    ours = compressor.config
    assert (ours.transport.schedule, ours.for_gpus().transport.schedule) == ("halving", "auto")
    same_on_all_ranks(sha256([ncz.allreduce(tensor, name="halved", compression=compressor)]))
    assert compressor.stats.total.compressed_calls == 1

    # Without a file, and with one that is missing.
    remedy = "horovodrun -np N ncz tune --output tuned.json"
    raises(ConfigError, lambda: ncz.NCZ(transport=OPEN), remedy)
    missing = {"tuning": "nowhere.json"}
    raises(ConfigError, lambda: ncz.NCZ(transport=missing), "nowhere.json: cannot be read")
    return True


def test_the_file_is_followed(tuned, tmp_path):
    file, _ = tuned
    assert on_ranks(2, reduce_as_tuned, tmp_path, file, **HOROVOD) == [True, True]
