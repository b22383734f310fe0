"""The data for judging the codec: real gradients, simulations, and synthetic arrays with known statistics.

    from benchmarks.data import SETS, load

    for name in SETS:
        x = load(name)

    python -m benchmarks.data    # from the repository's root: makes all sets, in about three minutes on one core

A set is made when it is first asked for and then kept in ``benchmarks/data/cache``. Everything is seeded; the bits
of the gradients and the flow still depend on the machine's arithmetic and on the versions of Python and torch.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import gradients, molecular_dynamics, navier_stokes, synthetic

CACHE = Path(__file__).parent / "cache"


@dataclass(frozen=True)
class DataSet:
    """One array to compress, and how to get it.

    name: unique, also the file's; description: one line; make: returns this set and all others that fall out of the
    same run, by name; version: of ``make``, to be raised when it would return something else.
    """

    name: str
    description: str
    make: Callable[[], dict[str, np.ndarray]]
    version: int

    @property
    def file(self) -> Path:
        return CACHE / f"{self.name}-v{self.version}.npy"


SETS: dict[str, DataSet] = {
    name: DataSet(name, description, module.make, module.VERSION)
    for module in (gradients, navier_stokes, molecular_dynamics, synthetic)
    for name, description in module.DESCRIPTIONS.items()
}


def load(name: str) -> np.ndarray:
    """The set of this name, finite float32, from the cache if it is there; KeyError for an unknown name."""
    wanted = SETS[name]
    if not wanted.file.exists():
        for made, array in wanted.make().items():
            _save(SETS[made].file, array)
    return np.load(wanted.file)


def _save(file: Path, array: np.ndarray) -> None:
    """Write under another name and rename: a run that is cut off leaves no half a file, and two don't mix."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.stem, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as stream:
            np.save(stream, array)
        os.replace(temporary, file)
    except BaseException:
        os.unlink(temporary)
        raise
