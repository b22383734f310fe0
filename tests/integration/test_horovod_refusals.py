"""What can't be compressed as asked is an error on every rank: not a plain run, a hang or a wrong result."""

import json

import pytest
from launch import WORKERS, horovod_ranks, horovodrun, launch, needs_horovod

pytestmark = [pytest.mark.slow, needs_horovod]

INVALID = "quantizer: {valeu: 0.1}\n"
# name: the configuration of each rank in the second step; in the first, all have the defaults
DIFFERENT = {
    "different bounds": [{"quantizer": {"value": 0.25}}, {"quantizer": {"value": 0.1}}],
    "too small on one rank": [{"transport": {"min_bytes": 0}}, {"transport": {"min_bytes": "1GiB"}}],
    "another schedule": [{"transport": {"schedule": "direct"}}, {"transport": {"schedule": "ring"}}],
    "changed on one rank": [{}, {"entropy": {"coder": "fixed"}}],
}
# name: (the kind of error, what its message must name)
CASES = {
    "unknown section": ("ConfigError", ["quantiser", "did you mean quantizer"]),
    "impossible value": ("ConfigError", ["quantizer.value", "-1", "above 0"]),
    "invalid file": ("ConfigError", ["invalid.yaml", "quantizer.valeu", "quantizer.value"]),
    "missing file": ("ConfigError", ["nowhere/ncclz.yaml: no such file"]),
    "file and sections": ("ConfigError", ["not both", "quantizer"]),
    "another type": ("ConfigError", ["0.1 (float) is not a configuration"]),
    "roles that Horovod does not offer": ("ConfigError", ["roles", "parameter", '["gradient"]']),
    "nodes of several ranks": ("ConfigError", ["transport.hierarchy: 2", "auto, off"]),
    "invalid file in the environment": ("ConfigError", ["invalid.yaml", "quantizer.valeu"]),
    "adasum": ("UnsupportedError", ["Adasum", "compression=NCZ"]),
    "adasum with an instance": ("UnsupportedError", ["Adasum", "compression=NCZ"]),
    "a string": ("UnsupportedError", ["compression='ncz'", "compression=NCZ"]),
    "a mapping": ("UnsupportedError", ["'value': 0.1", "NCZ(...)"]),
    "a function imported before": ("UnsupportedError", ["imported", "before", "ncz_plugins.horovod first"]),
    "an optimizer imported before": ("UnsupportedError", ["imported", "before", "ncz_plugins.horovod first"]),
    "reducescatter": ("UnsupportedError", ["hvd.reducescatter", "Compression.none"]),
    "grouped reducescatter": ("UnsupportedError", ["hvd.grouped_reducescatter", "Compression.none"]),
    "a sparse tensor": ("UnsupportedError", ["torch.sparse_coo", "tensor.to_dense()"]),
    "no tensors": ("ValueError", ["list of tensors is empty"]),
    "a process set that was not added": ("UnsupportedError", ["ranks [0, 1]", "hvd.add_process_set"]),
    "other names": ("MismatchError", ['name is "b" on rank 0, "c" on rank 1']),
    "fewer on one rank": ("MismatchError", ["number of tensors to reduce is 2 on rank 0, 1 on rank 1"]),
    "other dtypes": ("MismatchError", ['a: dtype is "int32" on rank 0, "float32" on rank 1']),
    "other shapes": ("MismatchError", ["a: shape is [25000, 2] on rank 0, [2, 25000] on rank 1"]),
    "other ops": ("MismatchError", ['a: reduce op is "Min" on rank 0, "Sum" on rank 1']),
    "scale 0 on one rank": ("MismatchError", ["a: prescale factor is 1.0 on rank 0, 0.0 on rank 1"]),
    "given up": ("HorovodInternalError", ["was not reduced: an earlier reduction failed"]),
    "different bounds": ("MismatchError", ["quantizer.value is 0.25 on rank 0, 0.1 on rank 1"]),
    "too small on one rank": ("MismatchError", ["transport.min_bytes is 0 on rank 0, 1073741824 on rank 1"]),
    "another schedule": ("MismatchError", ['transport.schedule is "direct" on rank 0, "ring" on rank 1']),
    "changed on one rank": ("MismatchError", ['entropy.coder is "auto" on rank 0, "fixed" on rank 1']),
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refusals")
    different, invalid = folder / "different.json", folder / "invalid.yaml"
    different.write_text(json.dumps(DIFFERENT))
    invalid.write_text(INVALID)
    outcome = launch(horovod_ranks(WORKERS / "horovod_refusals.py", different, invalid), folder, timeout=90)
    assert len(outcome.ranks) == 2
    return outcome.ranks


@pytest.mark.parametrize("name", CASES)
def test_every_rank_refuses_and_says_why(name, refused):
    kind, named = CASES[name]
    for rank in refused:
        error = rank["errors"][name]
        assert error is not None, "no error"
        assert error["kind"] == kind, error
        for text in named:
            assert text in error["message"]


def test_all_refusals_are_tested(refused):
    assert set(CASES) == set(refused[0]["errors"])


def test_horovod_still_works_after_them(refused):
    assert [rank["still_works"] for rank in refused] == [True, True]


def test_it_is_a_compressor_to_whoever_asks(refused):
    assert [rank["is_compressor"] for rank in refused] == [[True, True]] * 2


def test_it_can_be_copied_and_sent_to_other_processes(refused):
    for rank in refused:
        assert rank["copies"] == [True, True] and rank["class"]
        assert "rms:0.1" in rank["repr"] and "step 0" in rank["repr"]


ALONE = """
import horovod.torch as hvd
import torch
from ncz_plugins.horovod import NCZ

hvd.init()
model = torch.nn.Linear(9, 9)
hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression=NCZ)
"""


def test_one_rank_is_told_that_nothing_is_compressed(tmp_path):
    (program := tmp_path / "alone.py").write_text(ALONE)
    outcome = launch(horovodrun(program, ranks=1), tmp_path, timeout=60)
    assert "nothing is compressed, as one rank has nothing to send" in outcome.output
