"""Makes scripts that don't import ncz_plugins know it: see enable.py, which copies this file into site-packages.

There a .pth file imports the copy whenever Python starts. So it must import nothing that takes time, and do no harm
once ncz_plugins is uninstalled.
"""

import sys

KEY = "communication_compression"


class AfterImport:
    """A finder for sys.meta_path that has something done right after some modules are imported.

    Args:
        actions: functions by names of modules.
    """

    def __init__(self, actions):
        self.actions = actions

    def find_spec(self, name, path=None, target=None):
        if name not in self.actions:
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:  # a folder of that name has none
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                self.actions[name]()

            spec.loader.exec_module = exec_module
        return spec


def import_plugin():
    """Import the plugin for DeepSpeed. Where that fails, only configurations with our key are refused."""
    try:
        from ncz_plugins.deepspeed import engine

        engine.warns_if_none_compresses = False  # most scripts of an environment need not
    except Exception as error:
        refuse_key(error)


def refuse_key(error):
    """Raise an error where a configuration has our key, which would do nothing."""
    from deepspeed.runtime.config import DeepSpeedConfig

    original = DeepSpeedConfig.__init__

    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if KEY in self._param_dict:
            raise RuntimeError(
                f'"{KEY}" can\'t be honoured: {error}. Install ncz_plugins anew and run `ncz enable`; or take the key '
                f"out of the configuration, which nothing honours once {__file__} and the .pth file beside it are gone"
            ) from error

    DeepSpeedConfig.__init__ = __init__


def name_backend():
    """Make the name of our backend known to torch. The backend itself is imported by whoever uses it."""
    from torch.distributed.distributed_c10d import Backend

    def create(*arguments):
        try:
            from ncz_plugins.torch.backend import CompressedBackend
        except ImportError as error:
            raise ImportError(
                f'the backend "ncz" can\'t be made: {error}. Install ncz_plugins anew and run `ncz enable`; or take '
                f"{__file__} and the .pth file beside it away"
            ) from error
        return CompressedBackend(*arguments)

    Backend.register_backend("ncz", create, devices=["cpu", "cuda"])


sys.meta_path.insert(0, AfterImport({"deepspeed": import_plugin, "torch.distributed.distributed_c10d": name_backend}))
