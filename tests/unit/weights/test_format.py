"""The format of patches: golden files, and a reader in plain numpy that two pages of the documentation suffice for."""

from pathlib import Path

import numpy as np
import plain_reader
import pytest
import torch
from repository import GOLDEN

from ncz_plugins import apply_patch, make_patch, stage_patch
from ncz_plugins.kernels.arrays import numpy_dtype
from ncz_plugins.kernels.format import Coder
from ncz_plugins.weights.apply import read_patch, read_patches
from ncz_plugins.weights.tensors import held_in

KEY = b"the key of golden patches"  # in make_patches.py
ARRAYS = dict(np.load(GOLDEN / "patches.npz"))
OLD, NEW = (
    {name.removeprefix(f"{label}/"): x for name, x in ARRAYS.items() if name.startswith(f"{label}/")}
    for label in ("old", "new")
)
DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
]
DTYPES += [torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16, torch.complex128]


def patches(kind: str) -> list[bytes]:
    return [ARRAYS[f"{kind}-{rank}"].tobytes() for rank in range(2)]


def unsigned(state: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Tensors as the plain reader has them."""
    return {name: held.data.view(f"u{held.data.itemsize}") for name, held in held_in(state, "state").items()}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_golden_patches_are_read():
    whole = apply_patch(patches("whole"))
    assert same(unsigned(whole), NEW)
    listed = {entry.name for contents in read_patches(patches("changes")).contents for entry in contents.tensors}
    assert listed == NEW.keys() - {"same"}
    # The old version, in tensors of the same dtypes: one that is written over, and one that is the base.
    old = {name: torch.from_numpy(x.view(f"i{x.itemsize}").copy()) for name, x in OLD.items()}
    dtypes = {name: x.dtype for name, x in whole.items()} | {"shape": torch.float16, "gone": torch.int16}
    old = {
        name: x.view(dtypes[name]) if x.dim() == 2 else torch.view_as_complex(x.view(torch.float32))
        for name, x in old.items()
    }
    assert same(unsigned(apply_patch(patches("changes"), old)), NEW)
    kept = {name: x for name, x in old.items() if name not in ("shape", "gone")}
    stage_patch(patches("changes"), kept).apply()
    assert same(unsigned(kept), {name: NEW[name] for name in kept})


def test_golden_patches_with_a_keyed_checksum_are_read():
    keyed = patches("keyed")
    listed = [read_patch(each, KEY)[0] for each in keyed]
    assert listed == [read_patch(each)[0] for each in patches("changes")]
    assert same(plain_reader.read(keyed, OLD, KEY), NEW)
    with pytest.raises(AssertionError):
        plain_reader.read(keyed, OLD, KEY[1:])


def test_golden_patches_are_read_in_plain_numpy():
    assert same(plain_reader.read(patches("whole"), {}), NEW)
    assert same(plain_reader.read(patches("changes"), OLD), NEW)


def test_golden_changes_that_are_rare_are_read():
    patch, old, new = ARRAYS["rare"].tobytes(), ARRAYS["rare-old"], ARRAYS["rare-new"]
    [source] = read_patches(patch).parts["x"]
    assert source.frames[0][5] == Coder.SPARSE
    weights = {"x": torch.from_numpy(old.view("i2").copy()).view(torch.bfloat16)}
    assert same(unsigned(apply_patch(patch, weights)), {"x": new})
    assert same(plain_reader.read([patch], {"x": old}), {"x": new})


def test_golden_patches_have_every_kind_of_frame():
    kinds = set()
    for kind in ("whole", "changes"):
        for sources in read_patches(patches(kind)).parts.values():
            for source in sources:
                for frame in source.frames:
                    plain = len(frame) == source.box.numel * numpy_dtype(source.elements).itemsize
                    kinds.add("plain" if plain else frame[0] if frame[0] == 0x78 else f"coder {frame[5]}")
    assert kinds >= {"plain", 0x78, "coder 2", "coder 3", "coder 4"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", [1.0, 0.01])
def test_every_dtype_in_plain_numpy(dtype, share):
    random = torch.Generator().manual_seed(0)
    values = 50 * torch.randn(60, 150, generator=random, dtype=torch.float64)
    moved = torch.where(torch.rand(60, 150, generator=random) < share, values + 1, values)
    old, new = {"x": values.to(dtype)}, {"x": moved.to(dtype)}
    assert same(plain_reader.read([make_patch(new, old)], unsigned(old)), unsigned(new))
    assert same(plain_reader.read([make_patch(new)], {}), unsigned(new))


@pytest.mark.parametrize("shape", [(3 << 20,), (1100, 1000), (), (0, 3)], ids=str)
def test_any_shape_in_plain_numpy(shape):
    new = {"x": torch.zeros(shape, dtype=torch.int8)}
    assert same(plain_reader.read([make_patch(new)], {}), unsigned(new))


def test_the_plain_reader_stays_short():
    assert len(Path(plain_reader.__file__).read_text().splitlines()) <= 200
