"""What can't be compressed as asked is an error on every rank: not a plain run, a hang or a wrong result."""

import copy
import os
import pickle

import pytest

pytest.importorskip("horovod")

import horovod.torch as hvd
import torch
from horovod.torch import DistributedOptimizer, allreduce  # before the plugin, which can't replace these names
from horovod.torch.compression import Compressor
from launch import horovodrun, launch
from on_rank import folder, raises, rank, world_size
from scenarios import HOROVOD, ranks
from under_horovod import loss_of, new_model, own_values

import ncz_plugins.horovod
from ncz_plugins import ConfigError, MismatchError, UnsupportedError
from ncz_plugins.horovod import NCZ

pytestmark = pytest.mark.slow

SIZE = 50_000
on_two_ranks = ranks(2, **HOROVOD)


def invalid_file() -> str:
    file = folder() / f"rank{rank}-invalid.yaml"
    file.write_text("quantizer: {valeu: 0.1}\n")
    return str(file)


def from_environment() -> NCZ:
    os.environ["NCZ_CONFIG"] = invalid_file()
    try:
        return NCZ()
    finally:
        del os.environ["NCZ_CONFIG"]


def optimizer(compression, **arguments):
    model = new_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    return model, hvd.DistributedOptimizer(sgd, model.named_parameters(), compression=compression, **arguments)


def optimizer_imported_before() -> None:
    model = new_model()
    named = model.named_parameters()
    DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), named, compression=NCZ)
    loss_of(model, 0).backward()


def reduce_names(names) -> None:
    """Tensors of these names, which differ between ranks, although all their sizes are the same."""
    compressor = NCZ(transport={"min_bytes": 0})
    handles = [ncz_plugins.horovod.allreduce_async(own_values(SIZE), name=n, compression=compressor) for n in names]
    for handle in handles:
        hvd.synchronize(handle)


def reduce_different(*ranks: dict) -> None:
    """One tensor, of which the ranks reduce other kinds."""
    how = {"op": hvd.Sum, "dtype": torch.float32, "compression": NCZ(transport={"min_bytes": 0})} | ranks[rank]
    values = own_values(how.pop("shape", SIZE), dtype=how.pop("dtype"))
    ncz_plugins.horovod.allreduce(values, name="a", **how)


def train_with_different(*ranks: dict) -> None:
    """A step with the defaults, in which all agree, and one with the configuration of each rank."""
    compressor = NCZ()
    model, its_optimizer = optimizer(compressor)
    for settings in ({}, ranks[rank]):
        compressor.config = settings
        its_optimizer.zero_grad()
        loss_of(model, 0).backward()
        its_optimizer.step()


def wait_after_a_failure() -> None:
    compressor = NCZ(quantizer={"value": 0.1 * (1 + rank)})
    handle = ncz_plugins.horovod.allreduce_async(own_values(SIZE), compression=compressor)
    raises(MismatchError, lambda: hvd.synchronize(handle))
    hvd.synchronize(handle)  # must not pass for reduced


# name: (what every rank does, the error, what its message must name)
CASES = {
    "unknown section": (lambda: NCZ(quantiser={"value": 0.1}), ConfigError, ["quantiser", "did you mean quantizer"]),
    "impossible value": (lambda: NCZ({"quantizer": {"value": -1}}), ConfigError, ["quantizer.value", "-1", "above 0"]),
    "invalid file": (lambda: NCZ(invalid_file()), ConfigError, ["invalid.yaml", "quantizer.valeu", "quantizer.value"]),
    "missing file": (lambda: NCZ("nowhere/ncclz.yaml"), ConfigError, ["nowhere/ncclz.yaml: no such file"]),
    "file and sections": (lambda: NCZ("ncclz", quantizer={"value": 0.1}), ConfigError, ["not both", "quantizer"]),
    "another type": (lambda: NCZ(0.1), ConfigError, ["0.1 (float) is not a configuration"]),
    "roles that Horovod does not offer": (
        lambda: NCZ(roles=["gradient", "parameter"]),
        ConfigError,
        ["roles", "parameter", '["gradient"]'],
    ),
    "nodes of several ranks": (
        lambda: NCZ(transport={"hierarchy": 2}),
        ConfigError,
        ["transport.hierarchy: 2", "auto, off"],
    ),
    "matrices that are joined": (
        lambda: NCZ("ncclz:muon-ddp"),
        UnsupportedError,
        ["quantizer.rotation", "Horovod", "ncclz:muon"],
    ),
    "invalid file in the environment": (from_environment, ConfigError, ["invalid.yaml", "quantizer.valeu"]),
    "adasum": (lambda: optimizer(NCZ, op=hvd.Adasum), UnsupportedError, ["Adasum", "compression=NCZ"]),
    "adasum with an instance": (
        lambda: optimizer(NCZ(), op=hvd.Adasum),
        UnsupportedError,
        ["Adasum", "compression=NCZ"],
    ),
    "a string": (lambda: optimizer("ncz"), UnsupportedError, ["compression='ncz'", "compression=NCZ"]),
    "a mapping": (
        lambda: hvd.allreduce(own_values(SIZE), compression={"quantizer": {"value": 0.1}}),
        UnsupportedError,
        ["'value': 0.1", "NCZ(...)"],
    ),
    "a function imported before": (
        lambda: allreduce(own_values(SIZE), compression=NCZ),
        UnsupportedError,
        ["imported", "before", "ncz_plugins.horovod first"],
    ),
    "an optimizer imported before": (
        optimizer_imported_before,
        UnsupportedError,
        ["imported", "before", "ncz_plugins.horovod first"],
    ),
    "reducescatter": (
        lambda: hvd.reducescatter(own_values(SIZE), compression=NCZ),
        UnsupportedError,
        ["hvd.reducescatter", "Compression.none"],
    ),
    "grouped reducescatter": (
        lambda: hvd.grouped_reducescatter([own_values(SIZE)], compression=NCZ()),
        UnsupportedError,
        ["hvd.grouped_reducescatter", "Compression.none"],
    ),
    "a sparse tensor": (
        lambda: hvd.allreduce(torch.eye(9).to_sparse(), compression=NCZ),
        UnsupportedError,
        ["torch.sparse_coo", "tensor.to_dense()"],
    ),
    "no tensors": (lambda: hvd.grouped_allreduce([], compression=NCZ), ValueError, ["list of tensors is empty"]),
    "a process set that was not added": (
        lambda: hvd.allreduce(own_values(SIZE), process_set=hvd.ProcessSet([0, 1]), compression=NCZ),
        UnsupportedError,
        ["ranks [0, 1]", "hvd.add_process_set"],
    ),
    # Ranks that differ.
    "other names": (lambda: reduce_names(["a", "bc"[rank]]), MismatchError, ['name is "b" on rank 0, "c" on rank 1']),
    "fewer on one rank": (
        lambda: reduce_names(["a", "b"][rank:]),
        MismatchError,
        ["number of tensors to reduce is 2 on rank 0, 1 on rank 1"],
    ),
    "other dtypes": (
        lambda: reduce_different({"dtype": torch.int32}, {}),
        MismatchError,
        ['a: dtype is "int32" on rank 0, "float32" on rank 1'],
    ),
    "other shapes": (
        lambda: reduce_different({"shape": (SIZE // 2, 2)}, {"shape": (2, SIZE // 2)}),
        MismatchError,
        ["a: shape is [25000, 2] on rank 0, [2, 25000] on rank 1"],
    ),
    "other ops": (
        lambda: reduce_different({"op": hvd.Min}, {}),
        MismatchError,
        ['a: reduce op is "Min" on rank 0, "Sum" on rank 1'],
    ),
    "scale 0 on one rank": (
        lambda: reduce_different({}, {"prescale_factor": 0.0}),
        MismatchError,
        ["a: prescale factor is 1.0 on rank 0, 0.0 on rank 1"],
    ),
    "given up": (wait_after_a_failure, hvd.HorovodInternalError, ["was not reduced: an earlier reduction failed"]),
    "different bounds": (
        lambda: train_with_different({"quantizer": {"value": 0.25}}, {"quantizer": {"value": 0.1}}),
        MismatchError,
        ["quantizer.value is 0.25 on rank 0, 0.1 on rank 1"],
    ),
    "too small on one rank": (
        lambda: train_with_different({"transport": {"min_bytes": 0}}, {"transport": {"min_bytes": "1GiB"}}),
        MismatchError,
        ["transport.min_bytes is 0 on rank 0, 1073741824 on rank 1"],
    ),
    "another schedule": (
        lambda: train_with_different({"transport": {"schedule": "direct"}}, {"transport": {"schedule": "ring"}}),
        MismatchError,
        ['transport.schedule is "direct" on rank 0, "ring" on rank 1'],
    ),
    "changed on one rank": (
        lambda: train_with_different({}, {"entropy": {"coder": "fixed"}}),
        MismatchError,
        ['entropy.coder is "auto" on rank 0, "fixed" on rank 1'],
    ),
}


@pytest.mark.parametrize("name", CASES)
@on_two_ranks
def test_every_rank_refuses_and_says_why(group, name):
    act, error, words = CASES[name]
    raises(error, act, *words)


@on_two_ranks
def test_horovod_still_works_after_them(group):
    assert torch.equal(hvd.allreduce(torch.ones(3), op=hvd.Sum), torch.full((3,), float(world_size)))


@on_two_ranks
def test_it_is_a_compressor_to_whoever_asks(group):
    assert issubclass(NCZ, Compressor) and isinstance(NCZ(), Compressor)


@on_two_ranks
def test_it_can_be_copied_and_sent_to_other_processes(group):
    first = NCZ(quantizer={"value": 0.1})
    for copied in (pickle.loads(pickle.dumps(first)), copy.deepcopy(first)):
        assert copied.config == first.config and copied.training is not first.training
    assert pickle.loads(pickle.dumps(NCZ)) is NCZ
    assert "rms:0.1" in repr(first) and "step 0" in repr(first)


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
