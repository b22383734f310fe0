"""Module that `ncz enable` copies into site-packages, so that scripts that don't import ncz_plugins know it.

A .pth file imports the copy at every start of Python. So it must import nothing that takes time, and do no harm after
ncz_plugins has been uninstalled.
"""

import sys

KEY = "communication_compression"


class AfterImport:
    """Finder for sys.meta_path that calls a function right after a module has been imported.

    Args:
        actions: name of a module -> function without arguments.
    """

    def __init__(self, actions):
        self.actions = actions

    def find_spec(self, name, path=None, target=None):
        if name not in self.actions:
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:  # None for a folder without __init__.py
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                self.actions[name]()

            spec.loader.exec_module = exec_module
        return spec


def import_plugin():
    """Import the plugin for DeepSpeed. If that fails, refuse configurations with our key, and only these."""
    try:
        from ncz_plugins.deepspeed import engine

        engine.warns_if_none_compresses = False  # most scripts of an environment use no compression
    except Exception as error:
        refuse_key(error)


def refuse_key(error):
    """Have DeepSpeed raise RuntimeError for a configuration with our key, which would have no effect."""
    from deepspeed.runtime.config import DeepSpeedConfig

    original = DeepSpeedConfig.__init__

    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if KEY in self._param_dict:
            raise RuntimeError(
                f'"{KEY}" can\'t be honoured: {error}. Reinstall ncz_plugins and run `ncz enable`; or remove the key '
                f"from the configuration; or delete {__file__} and the .pth file beside it, and the key is ignored"
            ) from error

    DeepSpeedConfig.__init__ = __init__


def name_backend():
    """Register the name of our backend with torch. The backend itself is imported when it is used."""
    from torch.distributed.distributed_c10d import Backend

    def create(*arguments):
        try:
            from ncz_plugins.torch import backend
        except ImportError as error:
            raise ImportError(
                f'the backend "ncz" can\'t be made: {error}. Reinstall ncz_plugins and run `ncz enable`; or delete '
                f"{__file__} and the .pth file beside it"
            ) from error
        return backend.create(*arguments)

    Backend.register_backend("ncz", create, extended_api=True, devices=["cpu", "cuda"])


sys.meta_path.insert(0, AfterImport({"deepspeed": import_plugin, "torch.distributed.distributed_c10d": name_backend}))
