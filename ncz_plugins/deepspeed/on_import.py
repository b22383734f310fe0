"""Makes every script of a Python environment honour "communication_compression" in its DeepSpeed configuration.

`ncz enable` copies this file into site-packages, and a .pth file there imports the copy whenever Python starts. So it
must import nothing that takes time, and do no harm once ncz_plugins is uninstalled.
"""

import sys

KEY = "communication_compression"


class AfterDeepSpeed:
    """A finder for sys.meta_path that has the plugin imported right after `deepspeed`."""

    def find_spec(self, name, path=None, target=None):
        if name != "deepspeed":
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                import_plugin()

            spec.loader.exec_module = exec_module
        return spec


def import_plugin():
    """Import the plugin. Where that fails, only configurations with our key are refused."""
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


sys.meta_path.insert(0, AfterDeepSpeed())
