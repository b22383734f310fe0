"""A state dict as bytes: what has changed since another version of it, or all of it, without loss.

All numbers are little endian. The head:

| offset | size | field | |
|---|---|---|---|
| 0 | 4 | magic | `4E 43 5A 50`, "NCZP" |
| 4 | 4 | format | 1 |
| 8 | 4 | bytes of the contents | |
| 12 | 4 | CRC-32 of the contents | |
| 16 | | contents | JSON: see `Contents` |

Then the frames of every tensor, as the wire format describes them: of what has changed ("Updates"), or SPLIT. Those of
integers and other dtypes are one frame of plain bytes. Nothing in a patch is run or unpickled.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from operator import itemgetter
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from ... import kernels
from ...kernels.backend import Backend
from ...kernels.format import CHUNK, DTYPES, Coding, DamagedFrame
from ...kernels.updates import decode_update, encode_update, max_update_bytes
from ..config import first_problem
from ..errors import FrameError, MismatchError, UnsupportedError
from ..runtime.device import has_memory

_MAGIC, _FORMAT = 0x505A434E, 1  # "NCZP", little endian
_HEAD = struct.Struct("<IIII")
_FRAME = 256 * CHUNK  # elements
_PICOSECONDS_PER_BYTE = 80_000  # 100 Mbit/s: patches are kept and sent far, so bytes count for more than cycles
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *DTYPES,
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    )
}

_Word = Annotated[int, Field(ge=0, lt=1 << 32)]
_Size = Annotated[int, Field(ge=0, lt=1 << 40)]
_MOST_DIMENSIONS = 255


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class Entry(_Strict):
    """A tensor of the new version.

    Attributes:
        dtype: its name in torch.
        kind: "same" has no frames: it is what the base has; "changes" are to be added to what the base has; "whole" is
            the tensor itself.
        digest: of the tensor's bytes, see `Backend.digest`.
        frames: bytes of each.
    """

    name: str
    dtype: str
    shape: Annotated[list[_Size], Field(max_length=_MOST_DIMENSIONS)]
    kind: Literal["same", "changes", "whole"]
    digest: _Word
    frames: list[_Size]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Contents(_Strict):
    """What the head says.

    Attributes:
        base: the identity of the version that the patch is for; None for one that holds everything.
        identity: of the version that it makes, see `identity`.
    """

    base: _Word | None
    identity: _Word
    tensors: list[Entry]


def identity(state: Mapping[str, Tensor]) -> int:
    """What tells versions of a state dict apart: 32 bits of the names, dtypes, shapes and bytes of all tensors.

    Raises UnsupportedError as `make_patch` does.
    """
    backend = kernels.cpu_backend()
    hosted = ((name, on_host(name, tensor)) for name, tensor in state.items())
    return _identity(_described(name, tensor, backend.digest(_bytes(tensor))) for name, tensor in hosted)


def make_patch(new: Mapping[str, Tensor], base: Mapping[str, Tensor] | None = None) -> bytes:
    """What turns `base` into `new`, to the bit; without a base, all of `new`.

    Args:
        new: tensors by name, in host memory or on a GPU.
        base: the same, of the version that the receiver has. A tensor that it has by the same name, dtype and shape is
            held as what has changed.

    Raises UnsupportedError for tensors that are not dense, or of a dtype that no floats or integers of torch have.
    """
    backend = kernels.cpu_backend()
    coding = Coding(costs=backend.costs._replace(link=_PICOSECONDS_PER_BYTE))
    entries, frames = [], []
    for name, tensor in new.items():
        own = on_host(name, tensor)
        before = None if base is None or name not in base else on_host(name, base[name])
        if before is not None and (before.dtype, before.shape) != (own.dtype, own.shape):
            before = None
        if before is not None and torch.equal(_bytes(own), _bytes(before)):
            kind, made = "same", []
        elif before is not None and own.dtype in DTYPES:
            kind, made = "changes", list(_encoded(backend, own, before, coding))
        else:
            kind, made = "whole", list(_encoded(backend, own, None, coding))
        description = _described(name, own, backend.digest(_bytes(own)))
        entries.append(Entry(**description, kind=kind, frames=[len(frame) for frame in made]))
        frames += made
    contents = Contents(
        base=None if base is None else identity(base),
        identity=_identity(map(_description_of, entries)),
        tensors=entries,
    )
    text = contents.model_dump_json().encode()
    return b"".join([_HEAD.pack(_MAGIC, _FORMAT, len(text), zlib.crc32(text)), text, *frames])


def apply_patch(patch: bytes, base: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The version that a patch makes of `base`, in host memory. What has not changed are the tensors of `base`.

    Raises FrameError for a patch that is damaged or none at all, and MismatchError if `base` is not the version that it
    was made for. `base` stays as it is.
    """
    return apply_contents(*read_patch(patch), base)


def apply_contents(
    contents: Contents, frames: list[Tensor], base: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """As `apply_patch`, of what `read_patch` returned."""
    backend = kernels.cpu_backend()
    rest = iter(frames)
    if contents.base is not None:
        if base is None:
            raise MismatchError(
                "the patch holds changes, and there is no version to apply them to; ask for a whole one"
            )
        if (found := identity(base)) != contents.base:
            raise MismatchError(
                f"the patch is for version {contents.base:08x}, and this is version {found:08x}; ask for a patch for "
                "that one, or for a whole one"
            )
    return {
        entry.name: _restored(backend, entry, list(islice(rest, len(entry.frames))), base) for entry in contents.tensors
    }


def read_patch(patch: bytes) -> tuple[Contents, list[Tensor]]:
    """What the head of a patch says, and its frames, uint8, none of them decoded. Raises FrameError."""
    if len(patch) < _HEAD.size:
        raise FrameError(f"{len(patch)} bytes are too few for a patch")
    magic, version, size, checksum = _HEAD.unpack_from(patch)
    if magic != _MAGIC:
        raise FrameError(f"magic is {magic:#010x}, not {_MAGIC:#010x}: not a patch")
    if version != _FORMAT:
        raise FrameError(f"the patch has format {version}; this build reads format {_FORMAT}")
    text = patch[_HEAD.size : _HEAD.size + size]
    if len(text) != size or zlib.crc32(text) != checksum:
        raise FrameError("the head of the patch is damaged: its checksum does not fit")
    try:
        contents = Contents.model_validate(json.loads(text))
    except (ValueError, RecursionError) as error:
        problem = first_problem(error) if isinstance(error, ValidationError) else error
        raise FrameError(f"the head of the patch can't be: {problem}") from None
    data = torch.frombuffer(bytearray(patch), dtype=torch.uint8)[_HEAD.size + size :]
    frames = []
    for entry in contents.tensors:
        _check(entry, contents.base is not None)
        for size in entry.frames:
            if size > len(data):
                raise FrameError(f"{entry.name}: a frame of {size} bytes is missing, only {len(data)} are left")
            frames.append(data[:size])
            data = data[size:]
    if len(data):
        raise FrameError(f"{len(data)} bytes follow the last frame of the patch")
    if len({entry.name for entry in contents.tensors}) < len(contents.tensors):
        raise FrameError("a tensor is in the patch twice")
    if _identity(map(_description_of, contents.tensors)) != contents.identity:
        raise FrameError("the head of the patch contradicts itself: its tensors are not those of its version")
    return contents, frames


def _check(entry: Entry, has_base: bool) -> None:
    """Raise FrameError for what no patch says, before memory is taken for it."""
    if not _is_text(entry.name):
        raise FrameError(f"{ascii(entry.name)}: such a name can't be")
    if entry.dtype not in _DTYPES:
        raise FrameError(f"{entry.name}: dtype {entry.dtype} is unknown")
    if math.prod(max(1, size) for size in entry.shape) >= 1 << 62:  # torch multiplies sizes of empty tensors, too
        raise FrameError(
            f"{entry.name}: {len(entry.shape)} sizes of a shape, {max(entry.shape)} among them, are too many"
        )
    dtype, held = _DTYPES[entry.dtype], sum(entry.frames)
    is_float = dtype in DTYPES
    expected = 0 if entry.kind == "same" else -(-entry.numel // _FRAME) if is_float else 1
    if len(entry.frames) != expected or (entry.kind != "whole" and not has_base):
        raise FrameError(f"{entry.name}: {len(entry.frames)} frames are impossible for {entry.kind} of {entry.shape}")
    if entry.kind == "changes" and not is_float:
        raise FrameError(f"{entry.name}: changes of {entry.dtype} are impossible")
    if entry.kind == "whole" and not is_float and held != entry.numel * dtype.itemsize:
        raise FrameError(f"{entry.name}: {held} bytes are not {entry.numel} elements of {entry.dtype}")
    # 16,384 elements take 24 bytes at the least, see container.py.
    if entry.kind != "same" and is_float and entry.numel // 1024 > held:
        raise FrameError(f"{entry.name}: {held} bytes can't hold the {entry.numel} elements that the head says")


def _encoded(backend: Backend, own: Tensor, before: Tensor | None, coding: Coding) -> Iterator[bytes]:
    """The frames of a tensor."""
    if own.dtype not in DTYPES:
        yield _bytes(own).numpy().tobytes()
        return
    room = torch.empty(max_update_bytes(_FRAME, own.element_size()), dtype=torch.uint8)
    for first in range(0, own.numel(), _FRAME):
        x = own.view(-1)[first : first + _FRAME]
        base = None if before is None else before.view(-1)[first : first + _FRAME]
        size = encode_update(backend, x, base, coding, room)
        yield room[:size].numpy().tobytes()


def _restored(backend: Backend, entry: Entry, frames: list[Tensor], base: Mapping[str, Tensor] | None) -> Tensor:
    """A tensor of the new version. Raises FrameError."""
    dtype = _DTYPES[entry.dtype]
    before = None
    if entry.kind != "whole":
        before = base.get(entry.name)
        if before is None or before.dtype != dtype or list(before.shape) != entry.shape:
            raise FrameError(f"{entry.name}: the patch changes a tensor that its base doesn't have so")
        if entry.kind == "same":
            return before
        before = on_host(entry.name, before)
    out = torch.empty(entry.shape, dtype=dtype)
    if dtype not in DTYPES:
        _bytes(out).copy_(frames[0])
    else:
        flat = out.view(-1)
        for number, frame in enumerate(frames):
            elements = slice(number * _FRAME, (number + 1) * _FRAME)
            _decode(backend, entry.name, frame, None if before is None else before.view(-1)[elements], flat[elements])
    if backend.digest(_bytes(out)) != entry.digest:
        raise FrameError(f"{entry.name}: its checksum is not the one that the patch says; get the patch again")
    return out


def _decode(backend: Backend, name: str, frame: Tensor, before: Tensor | None, out: Tensor) -> None:
    try:
        decode_update(backend, frame, before, out)
    except DamagedFrame as damage:
        raise FrameError(f"{name}: a frame is damaged: {damage}; get the patch again") from damage


def _is_text(name: str) -> bool:
    """Whether it can be written as UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def on_host(name: str, tensor: Tensor, copy: bool = False) -> Tensor:
    """A tensor of a version in host memory, contiguous; it or a copy of it. Raises UnsupportedError as `make_patch`."""
    if not isinstance(tensor, Tensor) or not has_memory(tensor) or tensor.is_meta:
        raise UnsupportedError(
            f"{name}: {type(tensor).__name__} is no tensor with memory of its own; leave it out, or of a DTensor pass "
            "full_tensor(), which all ranks must call"
        )
    if not isinstance(name, str) or not _is_text(name) or tensor.dim() > _MOST_DIMENSIONS:
        raise UnsupportedError(
            f"{ascii(name)} of {tensor.dim()} dimensions: patches hold tensors of up to {_MOST_DIMENSIONS}, with names "
            "that can be written as UTF-8: rename or reshape it"
        )
    if tensor.layout != torch.strided or str(tensor.dtype).removeprefix("torch.") not in _DTYPES:
        raise UnsupportedError(
            f"{name}: a tensor of {tensor.dtype}, layout {tensor.layout}; patches hold dense tensors of "
            f"{', '.join(_DTYPES)}: leave it out, or convert it"
        )
    return tensor.detach().to("cpu", copy=copy).resolve_neg().contiguous()


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor on the host."""
    # One element is contiguous whatever its stride is, and is then no array of bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _described(name: str, tensor: Tensor, digest: int) -> dict:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"name": name, "dtype": dtype, "shape": list(tensor.shape), "digest": digest}


def _description_of(entry: Entry) -> dict:
    return {name: getattr(entry, name) for name in ("name", "dtype", "shape", "digest")}


def _identity(described: Iterable[dict]) -> int:
    return zlib.crc32(json.dumps(sorted(described, key=itemgetter("name"))).encode())
