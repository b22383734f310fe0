"""Writes `patches.npz`: patches that every later version of format 3 must read.

    python tests/unit/golden/make_patches.py

It holds two versions of some tensors ("old/NAME", "new/NAME"; unsigned integers in the shapes that frames have), and
the patches of two ranks, of which each holds half of most tensors: "whole-RANK", "changes-RANK", and "keyed-RANK",
which are changes with a keyed checksum (format 4). "rare-old", "rare-new" and "rare" are a row of bfloat16 of which few
elements change (SPARSE), before and after, and its patch. Run it again only together with a new format in
docs/reference/patch-format.md, and without the file, or for arrays that it lacks: those that it has stay as they are.
The numbers come from a formula.
"""

from __future__ import annotations

import numpy as np
import torch
from make import FOLDER, noise
from torch import Tensor

from ncz_plugins.weights.forms import Held
from ncz_plugins.weights.make import make_patch_of
from ncz_plugins.weights.tensors import TensorPart, held_in

ROWS, COLUMNS = 42, 60
KEY = b"the key of golden patches"
FLOATS = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f64": torch.float64}
INTEGERS = {"i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64}


def versions() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two versions of tensors of many dtypes. A ninth of the elements change."""
    bits = torch.from_numpy(noise(ROWS * COLUMNS).astype(np.int64)).view(ROWS, COLUMNS)
    values = (bits - 2**31).double() / 2**35
    changed = bits % 9 == 0
    moved = torch.where(changed, values * (1 + 2**-9) + 2**-30, values)
    old = {name: values.to(dtype) for name, dtype in FLOATS.items()}
    new = {name: moved.to(dtype) for name, dtype in FLOATS.items()}
    for name, dtype in INTEGERS.items():
        old[name], new[name] = (bits % 100).to(dtype), (bits % 100 + changed).to(dtype)
    # Narrower values, few changes, no change, complex numbers, and values that nothing makes smaller.
    old["bf16 in f32"], new["bf16 in f32"] = old["bf16"].float(), new["bf16"].float()
    old["few"], new["few"] = (torch.zeros(ROWS, 1000, dtype=torch.int8) for _ in range(2))
    new["few"].view(-1)[::1999] = 5
    old["same"] = new["same"] = old["f32"]
    old["c64"], new["c64"] = (torch.complex(x["f32"], x["f32"].flip(1)) for x in (old, new))
    old["random"], new["random"] = bits.to(torch.int32), (bits * 40503 % 2**32 - 2**31).to(torch.int32)
    # Another shape, tied tensors, a tensor that is gone, and a new one.
    old["shape"], new["shape"] = old["f16"], new["f16"].t()[:58].contiguous()
    old["tied"], new["tied"] = old["bf16"], new["bf16"]  # parts of them share memory, too
    old["gone"], new["new"] = old["i16"], new["i64"] * 1000
    return old, new


def rare() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two versions of a row of bfloat16. Some elements in a hundred change, some of them by far."""
    bits = torch.from_numpy(noise(9000).astype(np.int64))
    old = ((bits - 2**31).double() / 2**35).bfloat16()
    steps = torch.where(bits % 97 == 0, bits // 97 % 5 - 2 + 3000 * (bits % 1067 == 0), 0)
    return {"x": old}, {"x": (old.view(torch.int16) + steps.short()).view(torch.bfloat16)}


def part(x: Tensor, rank: int) -> TensorPart:
    """The half of a tensor that a rank holds."""
    rows = x.shape[0] // 2
    return TensorPart(x[rows * rank : rows * (rank + 1)], tuple(x.shape), (rows * rank, *(0 for _ in x.shape[1:])))


def unsigned(held: Held) -> np.ndarray:
    """What a rank holds of a tensor, as unsigned integers."""
    return held.data.view(f"u{held.data.itemsize}")


def main() -> None:
    arrays = {}
    for label, state in zip(("old", "new"), versions()):
        arrays |= {f"{label}/{name}": unsigned(held) for name, held in held_in(state, label).items()}
    for rank in range(2):
        old, new = (held_in({name: part(x, rank) for name, x in state.items()}, "state") for state in versions())
        for kind, base, key in (("whole", None, None), ("changes", old, None), ("keyed", old, KEY)):
            arrays[f"{kind}-{rank}"] = np.frombuffer(make_patch_of(new, base, rank, 2, key=key), np.uint8)
    old, new = (held_in(state, "state") for state in rare())
    arrays |= {"rare-old": unsigned(old["x"]), "rare-new": unsigned(new["x"])}
    arrays["rare"] = np.frombuffer(make_patch_of(new, old), np.uint8)
    path = FOLDER / "patches.npz"
    np.savez_compressed(path, **arrays | (dict(np.load(path)) if path.exists() else {}))


if __name__ == "__main__":
    main()
