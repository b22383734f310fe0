"""What must be refused, by every rank; each error is saved, and then the next case is tried.

usage: horovod_refusals.py DIFFERENT.json INVALID.yaml
DIFFERENT.json: {name: [configuration of each rank]}.
"""

import copy
import json
import os
import pickle
import sys
from pathlib import Path

import horovod.torch as hvd
import torch
from horovod.torch import DistributedOptimizer, allreduce  # before the plugin, which can't replace these names
from horovod.torch.compression import Compressor
from horovod_common import loss_of, new_model, own_values, save

import ncz_plugins.horovod
from ncz_plugins.horovod import NCZ

SIZE = 50_000


def optimizer(compression, **arguments):
    model = new_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    return model, hvd.DistributedOptimizer(sgd, model.named_parameters(), compression=compression, **arguments)


def optimizer_imported_before() -> None:
    model = new_model()
    named = model.named_parameters()
    DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), named, compression=NCZ)
    loss_of(model, 0).backward()


def from_environment():
    os.environ["NCZ_CONFIG"] = invalid
    try:
        return NCZ()
    finally:
        del os.environ["NCZ_CONFIG"]


def same_names(names) -> None:
    """A reduction of these, which differ between ranks, although all their sizes are the same."""
    compressor = NCZ(transport={"min_bytes": 0})
    handles = [ncz_plugins.horovod.allreduce_async(own_values(SIZE), name=n, compression=compressor) for n in names]
    for handle in handles:
        hvd.synchronize(handle)


def reduce_different(*ranks: dict) -> None:
    """One tensor, of which the ranks reduce other kinds."""
    how = {"op": hvd.Sum, "dtype": torch.float32, "compression": NCZ(transport={"min_bytes": 0})} | ranks[hvd.rank()]
    values = own_values(how.pop("shape", SIZE), dtype=how.pop("dtype"))
    ncz_plugins.horovod.allreduce(values, name="a", **how)


def train_with_different(config) -> None:
    """One rank's configuration changes after a step in which all agreed."""
    compressor = NCZ()
    model, its_optimizer = optimizer(compressor)
    for settings in ({}, config):
        compressor.config = settings
        its_optimizer.zero_grad()
        loss_of(model, 0).backward()
        its_optimizer.step()


def waited_for_after_a_failure() -> None:
    compressor = NCZ(quantizer={"value": 0.1 * (1 + hvd.rank())})
    handle = ncz_plugins.horovod.allreduce_async(own_values(SIZE), compression=compressor)
    try:
        hvd.synchronize(handle)
    except ncz_plugins.MismatchError:
        hvd.synchronize(handle)  # must not pass for reduced


hvd.init()
different, invalid = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2]
tensor, unknown = own_values(SIZE), hvd.ProcessSet([0, 1])
cases = {
    "unknown section": lambda: NCZ(quantiser={"value": 0.1}),
    "impossible value": lambda: NCZ({"quantizer": {"value": -1}}),
    "invalid file": lambda: NCZ(invalid),
    "missing file": lambda: NCZ("nowhere/ncclz.yaml"),
    "file and sections": lambda: NCZ("ncclz", quantizer={"value": 0.1}),
    "another type": lambda: NCZ(0.1),
    "nodes of several ranks": lambda: NCZ(transport={"hierarchy": 2}),
    "roles that Horovod does not offer": lambda: NCZ(roles=["gradient", "parameter"]),
    "invalid file in the environment": from_environment,
    "adasum": lambda: optimizer(NCZ, op=hvd.Adasum),
    "adasum with an instance": lambda: optimizer(NCZ(), op=hvd.Adasum),
    "a string": lambda: optimizer("ncz"),
    "a mapping": lambda: hvd.allreduce(tensor, compression={"quantizer": {"value": 0.1}}),
    "a function imported before": lambda: allreduce(tensor, compression=NCZ),
    "an optimizer imported before": optimizer_imported_before,
    "reducescatter": lambda: hvd.reducescatter(tensor, compression=NCZ),
    "grouped reducescatter": lambda: hvd.grouped_reducescatter([tensor], compression=NCZ()),
    "a sparse tensor": lambda: hvd.allreduce(torch.eye(9).to_sparse(), compression=NCZ),
    "no tensors": lambda: hvd.grouped_allreduce([], compression=NCZ),
    "a process set that was not added": lambda: hvd.allreduce(tensor, process_set=unknown, compression=NCZ),
    "other names": lambda: same_names(["a", "bc"[hvd.rank()]]),
    "fewer on one rank": lambda: same_names(["a", "b"][hvd.rank() :]),
    "other dtypes": lambda: reduce_different({"dtype": torch.int32}, {}),
    "other shapes": lambda: reduce_different({"shape": (SIZE // 2, 2)}, {"shape": (2, SIZE // 2)}),
    "other ops": lambda: reduce_different({"op": hvd.Min}, {}),
    "scale 0 on one rank": lambda: reduce_different({}, {"prescale_factor": 0.0}),
    "given up": waited_for_after_a_failure,
    **{name: lambda configs=configs: train_with_different(configs[hvd.rank()]) for name, configs in different.items()},
}
errors = {}
for name, case in cases.items():
    try:
        case()
        errors[name] = None
    except Exception as error:
        errors[name] = {"kind": type(error).__name__, "message": str(error)}
first, copied = NCZ(quantizer={"value": 0.1}), [pickle.loads(pickle.dumps(NCZ(quantizer={"value": 0.1})))]
copied.append(copy.deepcopy(first))
save(
    {
        "errors": errors,
        "copies": [each.config == first.config and each.training is not first.training for each in copied],
        "class": pickle.loads(pickle.dumps(NCZ)) is NCZ,
        "repr": repr(first),
        "is_compressor": [issubclass(NCZ, Compressor), isinstance(NCZ(), Compressor)],
        "still_works": torch.equal(hvd.allreduce(torch.ones(3), op=hvd.Sum), torch.full((3,), float(hvd.size()))),
    }
)
