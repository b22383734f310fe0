"""Lets tests that know nothing of ncz_plugins compress: every Python that they start imports this first.

NCZ_THIRDPARTY_CONFIG holds the settings as JSON; null: nothing is compressed.
"""

import importlib.abc
import importlib.util
import inspect
import json
import os
import sys
import unittest.mock

sys.modules["mock"] = unittest.mock  # by which name Horovod's tests import it

CONFIG = json.loads(os.environ["NCZ_THIRDPARTY_CONFIG"])


def adapt_deepspeed(deepspeed) -> None:
    """Give every configuration our key."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, for a minute
    if CONFIG is None:
        return
    import ncz_plugins.deepspeed  # noqa: F401

    original = deepspeed.DeepSpeedConfig.__init__

    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self._param_dict.setdefault("communication_compression", CONFIG)

    deepspeed.DeepSpeedConfig.__init__ = __init__


def adapt_horovod(hvd) -> None:
    """Make an NCZ the compression of every reduction that names none."""
    if CONFIG is None:
        return
    import ncz_plugins.horovod as ncz

    shared = ncz.NCZ(CONFIG)

    def with_compression(original, new=lambda: shared):
        def function(*args, **kwargs):
            if "compression" not in inspect.signature(original).bind(*args, **kwargs).arguments:
                kwargs["compression"] = new()
            return original(*args, **kwargs)

        return function

    hvd.allreduce, hvd.grouped_allreduce = with_compression(hvd.allreduce), with_compression(hvd.grouped_allreduce)
    hvd.allreduce_async = with_compression(ncz.allreduce_async)
    hvd.grouped_allreduce_async = with_compression(ncz.grouped_allreduce_async)
    hvd.DistributedOptimizer = with_compression(hvd.DistributedOptimizer, lambda: ncz.NCZ(CONFIG))


ADAPTED = {"deepspeed": adapt_deepspeed, "horovod.torch": adapt_horovod}


class Adapter(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Adapts a module as soon as it is imported."""

    def find_spec(self, name, path=None, target=None):
        if name not in ADAPTED or name in self.finding:
            return None
        self.finding.add(name)
        spec = importlib.util.find_spec(name)
        loader = spec.loader
        execute = loader.exec_module

        def exec_module(module):
            execute(module)
            ADAPTED[name](module)

        loader.exec_module = exec_module
        return spec

    finding: set[str] = set()


sys.meta_path.insert(0, Adapter())
