"""Safetensors files, read and written byte by byte, and patches between them.

A file is 8 bytes, the size of the header; the header, which is JSON; and the bytes of all tensors, without gaps. Bytes
are never converted to tensors of torch: files may have dtypes that torch lacks, and torch is not imported. Files are
mapped into memory, and tensors that a patch makes are made when they are written: frame by frame, or one at a time if
they are made of parts.
"""

from __future__ import annotations

import json
import math
import mmap
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import BinaryIO, NamedTuple

import numpy as np

from ..core.errors import FrameError, MismatchError, UnsupportedError
from ..kernels.arrays import numpy_dtype
from .apply import Version, assemble, require_base, values_of
from .elements import have_equal_bytes, row_of
from .forms import CODED, SAFETENSORS_BITS, Form, Held, new_held
from .index import FileHeader
from .make import Snapshot, make_patch_of

_METADATA = "__metadata__"  # key of a header that is not a tensor
_SIZE_BYTES = 8  # of the header's size
_ALIGNMENT_BYTES = 8  # of the first tensor, in files that get a new header

# Equal tensors travel once. So that a small patch can't make a file of any size, files may have this many bytes of
# tensors that equal others, besides the bytes of the others.
_MAX_EQUAL_SHARE = 64
_ALWAYS_EQUAL_BYTES = 1 << 16


class WeightFile(NamedTuple):
    """What a safetensors file holds.

    Attributes:
        header: text of the header.
        forms: what the tensors are, by name.
        tensors: the same tensors with their bytes.
    """

    header: str
    forms: Mapping[str, Form]
    tensors: Mapping[str, Held]


class _Place(NamedTuple):
    """What a header says of one tensor. `begin` and `end` are bytes, counted from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def form(self) -> Form:
        return Form.of(self.dtype, self.shape, self.end - self.begin)


# ------------------------------------------------------------------ files


def mapped(file: BinaryIO) -> mmap.mmap | bytes:
    """The bytes of an open file, mapped into memory where that is possible. Raises OSError."""
    try:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError):  # a pipe, or an empty file
        return file.read()


def read_file(data: bytes | mmap.mmap) -> WeightFile:
    """Read a file's bytes. Raises UnsupportedError, saying what is wrong, if this is not a safetensors file.

    The message begins with a verb: put the file's name in front of it.
    """
    # The size of the header, and the header.
    size = int.from_bytes(data[:_SIZE_BYTES], "little")
    if not 2 <= size <= len(data) - _SIZE_BYTES:
        raise UnsupportedError(
            f"is cut off, or not a safetensors file: of {len(data)} bytes, its header would take {size}"
        )
    header, places = _parse_header(data[_SIZE_BYTES : _SIZE_BYTES + size])
    # Tensors follow, up to the end of the file. A tensor keeps a mapped file open.
    is_mapped = isinstance(data, mmap.mmap)
    rest = np.frombuffer(data, np.uint8)[_SIZE_BYTES + size :]
    end = places[-1].end if places else 0
    if end != len(rest):
        raise UnsupportedError(f"is damaged: its tensors take {end} bytes, and {len(rest)} follow its header")
    tensors = {each.name: new_held(each.form, _aligned(each.form, rest[each.begin : each.end])) for each in places}
    forms = {each.name: each.form for each in places}
    return WeightFile(header, forms, _Mapped(forms, tensors, data) if is_mapped else tensors)


class FileBytes:
    """The bytes of a file, in pieces. May be iterated more than once; each time, tensors are made again.

    Iterating raises FrameError if the header does not describe the tensors.
    """

    def __init__(self, file: WeightFile):
        self._file = file
        self._header = file.header.encode()
        try:
            _, self._places = _parse_header(self._header)
        except UnsupportedError as error:
            raise FrameError(f"the file that the patch makes {error}") from None
        if {each.name: each.form for each in self._places} != dict(file.forms):
            raise FrameError("the header of the file that the patch makes does not describe its tensors")

    def __iter__(self) -> Iterator[bytes | memoryview]:
        yield len(self._header).to_bytes(_SIZE_BYTES, "little") + self._header
        tensors, names = self._file.tensors, [each.name for each in self._places]
        if isinstance(tensors, _Made):
            yield from map(memoryview, tensors.values_of(names))
        else:
            yield from (_bytes_of(tensors[name]) for name in names)


def _bytes_of(held: Held) -> memoryview:
    return memoryview(row_of(held.data).view(np.uint8))


# ------------------------------------------------------------------ patches of files


def make_file_patch(new: WeightFile, base: WeightFile | None = None, key: bytes | None = None) -> bytes:
    """Make the patch that turns the file `base` into `new`, byte by byte. Without `base`, it holds all of `new`."""
    text = {"text": new.header}
    if base is not None and base.header == new.header:
        text = {}
    elif (metadata := _metadata_of(new)) is not None:
        text = {"metadata": metadata}
    file = FileHeader(checksum=_checksum(new.header), **text)
    made = Snapshot.of(new.tensors)
    older = None if base is None else dict(base.tensors)
    return make_patch_of(_with_memory(made), older, file=file, key=key, known=made.digests)


def apply_file_patch(version: Version, base: WeightFile | None = None) -> WeightFile:
    """Apply what `read_patches` read to the file `base`. Returns the new file, whose tensors are made when asked for.

    Patches that were made of state dicts make a file with a header of its own. Whether `base` is the right one shows
    in the checksums of what changes: `require_base_file` compares all of it.

    Raises FrameError and MismatchError as `apply_patch` does, and UnsupportedError for dtypes that no safetensors file
    can have.
    """
    older = {} if base is None or version.is_whole else base.forms
    new, gone = {name: sources[0].form for name, sources in version.parts.items()}, version.gone
    forms = {name: form for name, form in older.items() if name not in gone} | new
    # Files hold equal tensors once for each name.
    total_bytes = sum(form.total_bytes for form in forms.values())
    equal_bytes = sum(forms[name].total_bytes for name in version.same_as)
    if not _may_equal(equal_bytes, total_bytes - equal_bytes):
        raise FrameError(f"the patch makes a file of {total_bytes} bytes, of which {equal_bytes} equal others")
    header = _new_header(forms) if version.file is None else _header_after(version.file, base, forms)
    return WeightFile(header, forms, _Made(forms, version, {} if base is None else base.tensors))


def require_base_file(version: Version, base: WeightFile | None) -> None:
    """Raise MismatchError unless a version can be made from the file `base`. Reads all of it."""
    require_base(version, None if base is None else base.tensors)


def with_moved(own: WeightFile | None, moved: Mapping[str, WeightFile]) -> WeightFile | None:
    """The file `own`, if any, with tensors of other files beside its own. Raises FrameError if one is missing."""
    if not moved:
        return own
    for name, file in moved.items():
        if name not in file.forms:
            raise FrameError(f"{name}: is not in the file that it is said to come from; get the patch again")
    own = WeightFile("", {}, {}) if own is None else own
    forms = {**own.forms, **{name: file.forms[name] for name, file in moved.items()}}
    return WeightFile(own.header, forms, _Joined(forms, own, moved))


class _Lazy(Mapping[str, Held]):
    """Tensors of a file. Each is made when it is asked for, and is not kept."""

    def __init__(self, forms: Mapping[str, Form]):
        self._forms = forms

    def __iter__(self) -> Iterator[str]:
        return iter(self._forms)

    def __len__(self) -> int:
        return len(self._forms)

    def __contains__(self, name: object) -> bool:
        return name in self._forms


class _Mapped(_Lazy):
    """Tensors of a mapped file. Reading what is no longer there would end the process (SIGBUS)."""

    def __init__(self, forms: Mapping[str, Form], tensors: Mapping[str, Held], file: mmap.mmap):
        super().__init__(forms)
        self._tensors, self._file = tensors, file

    def __getitem__(self, name: str) -> Held:
        found = self._tensors[name]
        if self._file.size() < len(self._file):  # `size` asks the system
            raise UnsupportedError(
                f"{name}: its file was cut off while it was read, from {len(self._file)} to {self._file.size()} bytes: "
                "write a new file and rename it"
            )
        return found


class _Joined(_Lazy):
    """See `with_moved`."""

    def __init__(self, forms: Mapping[str, Form], own: WeightFile, moved: Mapping[str, WeightFile]):
        super().__init__(forms)
        self._own, self._moved = own, moved

    def __getitem__(self, name: str) -> Held:
        return self._moved.get(name, self._own).tensors[name]


class _Made(_Lazy):
    """Tensors of the file that patches make of another one."""

    def __init__(self, forms: Mapping[str, Form], version: Version, base: Mapping[str, Held]):
        super().__init__(forms)
        self._version, self._base = version, base
        # What is gone is no part of a version of one tensor; to look through it for each would take long.
        contents = tuple(each.model_copy(update={"gone": ()}) for each in version.contents)
        self._of_none = version._replace(contents=contents, parts={}, same_as={})

    def __getitem__(self, name: str) -> Held:
        if name not in self._version.parts:
            return self._base[name]
        # The version of this tensor alone.
        older = {} if self._version.is_whole or name not in self._base else {name: self._base[name]}
        alone = self._of_none._replace(parts={name: self._version.parts[name]})
        return assemble(alone, older, older, _new)[0][name]

    def values_of(self, names: Iterable[str]) -> Iterator[np.ndarray]:
        """The bytes of tensors, in pieces: see `apply.values_of`."""
        return (values.view(np.uint8) for values in values_of(self._version, names, self._base, self))


def _new(name: str, form: Form) -> tuple[Held, Held]:
    return (new_held(form),) * 2


def _may_equal(equal_bytes: int, distinct_bytes: int) -> bool:
    """Whether a file may have `equal_bytes` of tensors that equal others, besides the others."""
    return equal_bytes <= _MAX_EQUAL_SHARE * distinct_bytes + _ALWAYS_EQUAL_BYTES


def _with_memory(version: Snapshot) -> dict[str, Held]:
    """Tensors of a file, of which those with equal bytes count as one in memory, as far as readers allow."""
    first, found = {}, {}
    equal_bytes = distinct_bytes = 0
    for name, held in version.held.items():
        key, size = (held.form, *version.digests[name]), held.form.total_bytes
        # Equal digests don't prove equal bytes.
        is_first = first.setdefault(key, held) is held
        is_equal = not is_first and have_equal_bytes(row_of(first[key].data), row_of(held.data))
        is_equal = is_equal and _may_equal(equal_bytes + size, distinct_bytes)
        equal_bytes, distinct_bytes = equal_bytes + size * is_equal, distinct_bytes + size * (not is_equal)
        found[name] = held._replace(memory=key if size and (is_first or is_equal) else None)
    return found


def _metadata_of(version: WeightFile) -> dict[str, str] | None:
    """The metadata of a file whose header is what `_new_header` makes of it; None: the header is another one."""
    metadata = json.loads(version.header).get(_METADATA, {})
    is_text = all(isinstance(value, str) for value in metadata.values())
    if is_text and _new_header(version.forms, metadata) == version.header:
        return metadata
    return None


def _header_after(header: FileHeader, base: WeightFile | None, forms: Mapping[str, Form]) -> str:
    """The header of the file that a patch makes: the patch has it or its metadata, or it is that of the base."""
    if header.text is not None:
        text = header.text
    elif header.metadata is not None:
        text = _new_header(forms, header.metadata)
    else:
        text = "" if base is None else base.header
        if _checksum(text) != header.checksum:
            raise MismatchError(
                "the base has the tensors that the patch is for, and another header (metadata, or order of tensors) "
                "than the file that the patch was made with; take that file, or apply the patch by apply_patch"
            )
    if _checksum(text) != header.checksum:
        raise FrameError("the header of the file that the patch makes has another checksum than the patch says")
    return text


def _checksum(header: str) -> int:
    return zlib.crc32(header.encode())


# ------------------------------------------------------------------ headers


def _parse_header(header: bytes) -> tuple[str, list[_Place]]:
    """The text of a header, and its tensors in the order of their bytes. Raises UnsupportedError."""
    # The header is a JSON object: metadata, and a description of each tensor.
    try:
        text = bytes(header).decode()
        described = json.loads(text)
        if not isinstance(described, dict):
            raise ValueError("it must be an object")
    except (ValueError, RecursionError) as error:
        raise UnsupportedError(f"is not a safetensors file: its header is invalid JSON: {error}") from None
    metadata = described.pop(_METADATA, {})
    if not isinstance(metadata, dict):
        raise UnsupportedError(f"is damaged: {_METADATA} in its header must map names to strings")
    # Tensors lie one behind the other.
    places = [_place_of(name, value) for name, value in described.items()]
    places.sort(key=lambda place: (place.begin, place.end))
    end = 0
    for each in places:
        if each.begin != end:
            raise UnsupportedError(
                f"is damaged: {each.name} begins at byte {each.begin}, where {end} was expected; tensors of a file lie "
                "one behind the other"
            )
        end = each.end
    return text, places


def _place_of(name: str, value: object) -> _Place:
    """What a header says of one tensor. Raises UnsupportedError."""
    # The description is complete.
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        are_sizes = all(type(each) is int and each >= 0 for each in (*shape, begin, end))
        if not isinstance(dtype, str) or not are_sizes or begin > end:
            raise ValueError
    except (TypeError, KeyError, ValueError):
        raise UnsupportedError(f"is damaged: {ascii(name)} lacks dtype, shape or data_offsets in its header") from None
    # The shape fits the bytes. A dtype of a later version of the format has a size that is not known here.
    if dtype in SAFETENSORS_BITS:
        bits = math.prod(shape) * SAFETENSORS_BITS[dtype]
        if bits != 8 * (end - begin):
            raise UnsupportedError(
                f"is damaged: {name} has {end - begin} bytes, and {list(shape)} elements of {dtype} take {bits / 8:g}"
            )
    elif dtype in CODED:  # torch's name of a dtype that the format has not
        raise UnsupportedError(f"is damaged: {name} has the dtype {dtype}, which safetensors files do not know")
    return _Place(name, dtype, shape, begin, end)


def _new_header(forms: Mapping[str, Form], metadata: Mapping[str, str] | None = None) -> str:
    """The header that safetensors writes. `metadata` None: that of PyTorch. Raises UnsupportedError."""
    for name, form in forms.items():
        if form.dtype != form.dtype.upper():  # a name of torch's: the format's are upper case
            raise UnsupportedError(f"{name}: safetensors files have no {form.dtype}; apply the patch by apply_patch")
    # The widest dtypes come first, so that every tensor is aligned; within a dtype, tensors are sorted by name.
    metadata = {"format": "pt"} if metadata is None else metadata
    described, end = {_METADATA: metadata} if metadata else {}, 0
    for name in sorted(forms, key=lambda name: (-SAFETENSORS_BITS.get(forms[name].dtype, 8), name)):
        form = forms[name]
        begin, end = end, end + form.total_bytes
        described[name] = {"dtype": form.dtype, "shape": list(form.shape), "data_offsets": [begin, end]}
    # Blanks at the end align the first tensor.
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False)
    return text + " " * (-len(text.encode()) % _ALIGNMENT_BYTES)


def _aligned(form: Form, data: np.ndarray) -> np.ndarray:
    """The same bytes at an address where the tensor's elements may begin; a copy only where they are not."""
    return data if data.ctypes.data % numpy_dtype(form.coded).itemsize == 0 else data.copy()
