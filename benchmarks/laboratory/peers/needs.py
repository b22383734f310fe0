"""What a contender needs to be installed."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec


@dataclass(frozen=True)
class Needs:
    """Reason why a contender can't run, for its `missing`: a module that is not installed.

    Attributes:
        module: module that it imports.
        extra: extra of ncz_plugins that installs the module.
    """

    module: str
    extra: str

    def __call__(self) -> str | None:
        if find_spec(self.module):
            return None
        return f"{self.module} is not installed: pip install 'ncz_plugins[{self.extra}]'"
