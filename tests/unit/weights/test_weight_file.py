"""Safetensors files: every dtype of the format, byte by byte, and what is wrong with a file is said."""

import json
import struct
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save

from ncz_plugins import FrameError, MismatchError, UnsupportedError, apply_patch, make_patch
from ncz_plugins.weights.apply import read_patches
from ncz_plugins.weights.files import FileBytes, WeightFile, apply_file_patch, make_file_patch, read_file
from ncz_plugins.weights.index import read_head
from ncz_plugins.weights.make import identity_of, make_patch_of
from ncz_plugins.weights.tensors import held_in

BITS = {
    **dict.fromkeys(["F4"], 4),
    **dict.fromkeys(["F6_E2M3", "F6_E3M2"], 6),
    **dict.fromkeys(["BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"], 8),
    **dict.fromkeys(["I16", "U16", "F16", "BF16"], 16),
    **dict.fromkeys(["I32", "U32", "F32"], 32),
    **dict.fromkeys(["I64", "U64", "F64", "C64"], 64),
}


def file_with(described: dict, data: bytes) -> bytes:
    header = json.dumps(described).encode()
    return len(header).to_bytes(8, "little") + header + data


def file_of_dtype(dtype: str, last: int = 0) -> bytes:
    """4,000 elements, of which the last byte is as told."""
    size = 4000 * BITS[dtype] // 8
    data = bytes(number % 2 for number in range(size - 1)) + bytes([last])
    odd = {"before": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}  # other tensors begin at no multiple of 8
    held = odd | {"x": {"dtype": dtype, "shape": [50, 80], "data_offsets": [3, 3 + size]}}
    return file_with({"__metadata__": {"step": str(last)}} | held, b"abc" + data)


def file_of(version: WeightFile) -> bytes:
    return b"".join(FileBytes(version))


def made(patch: bytes, base: WeightFile | None = None) -> bytes:
    """The file that a patch makes."""
    return file_of(apply_file_patch(read_patches(patch), base))


def through(new: bytes, base: bytes | None = None) -> bytes:
    older = None if base is None else read_file(base)
    return made(make_file_patch(read_file(new), older), older)


@pytest.mark.parametrize("dtype", BITS)
def test_every_dtype_of_the_format(dtype, tmp_path):
    old, new = file_of_dtype(dtype), file_of_dtype(dtype, 1)
    (tmp_path / "new").write_bytes(new)
    with safe_open(tmp_path / "new", "pt") as file:  # it is a valid file
        assert file.get_slice("x").get_dtype() == dtype
    assert through(new) == new and through(new, old) == new
    patch = make_file_patch(read_file(new), read_file(old))
    assert len(patch) < 700 < 0.4 * len(new)


def test_a_dtype_that_the_format_will_have_some_day():
    old, new = (file_of_dtype("U8", last).replace(b'"U8"', b'"F3"') for last in (0, 1))
    assert through(new) == new and through(new, old) == new


def test_dtypes_that_torch_lacks_are_named():
    with pytest.raises(UnsupportedError, match="x: torch .* has no dtype for F6_E2M3; `ncz patch apply`"):
        apply_patch(make_file_patch(read_file(file_of_dtype("F6_E2M3"))))


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="torch 2.6 has no dtype for F4")
def test_fours_are_those_of_torch():
    fours = apply_patch(make_file_patch(read_file(file_of_dtype("F4"))))["x"]
    assert fours.dtype == torch.float4_e2m1fn_x2 and fours.shape == (50, 40)
    again = read_file(made(make_patch({"x": fours})))
    assert again.tensors["x"].form[:2] == ("F4", (50, 80))


def test_files_and_state_dicts_of_the_same_tensors_are_the_same_version():
    state = {"w": torch.randn(30, 4), "n": torch.tensor(3), "c": torch.ones(2, dtype=torch.complex64)}
    found = read_file(save(state)).tensors
    received = apply_patch(make_file_patch(read_file(save(state))))
    assert identity_of(found) == identity_of(held_in(received, "made")) == identity_of(held_in(state, "state"))


def test_a_header_is_not_sent_again():
    state = {f"layer.{number}": torch.full((3,), number) for number in range(2000)}
    old = save(state, {"format": "pt"})
    new = bytearray(old)
    new[-1] ^= 1
    patch = make_file_patch(read_file(bytes(new)), read_file(old))
    assert len(patch) < 400 and made(patch, read_file(old)) == new


def test_a_base_with_another_header_is_refused():
    old, new = file_of_dtype("F32"), bytearray(file_of_dtype("F32"))
    new[-1] ^= 1
    patch = make_file_patch(read_file(bytes(new)), read_file(old))
    other = read_file(old.replace(b'"step": "0"', b'"step": "5"'))
    with pytest.raises(MismatchError, match="another header .metadata, or order of tensors."):
        made(patch, other)


def test_a_header_that_is_not_that_of_its_tensors_is_an_error():
    version = read_file(file_of_dtype("F32"))
    for header in (
        version.header.replace("F32", "I32"),
        version.header[:-1],
        version.header.replace("before", "behind"),
    ):
        with pytest.raises(FrameError, match="file that the patch makes"):
            file_of(version._replace(header=header))


def test_tensors_that_no_file_holds_are_named():
    with pytest.raises(UnsupportedError, match="c: safetensors files have no complex128"):
        made(make_patch({"c": torch.ones(3, dtype=torch.complex128)}))


def test_equal_tensors_of_a_file_are_sent_once():
    w = torch.randn(5000)
    new = save({"wte": w, "head": w.clone()})
    assert len(make_file_patch(read_file(new))) < len(make_file_patch(read_file(save({"wte": w})))) + 200
    assert through(new) == new


@pytest.mark.parametrize("state", [{}, {"empty": torch.empty(0, 3)}, {"number": torch.tensor(1.5)}], ids=str)
def test_files_of_next_to_nothing(state):
    assert through(save(state)) == save(state)


PLACE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DAMAGED = {
    "empty": (b"", "is cut off, or not a safetensors file: of 0 bytes"),
    "cut off in the header": (save({"a": torch.ones(2)})[:20], "of 20 bytes, its header would take"),
    "cut off in a tensor": (save({"a": torch.ones(2)})[:-1], "its tensors take 8 bytes, and 7 follow"),
    "too long": (save({"a": torch.ones(2)}) + b"x", "its tensors take 8 bytes, and 9 follow"),
    "no JSON": (b"\x08" + bytes(7) + b"{nojson}", "its header is invalid JSON"),
    "a list": (file_with([1], b""), "its header is invalid JSON: it must be an object"),
    "no UTF-8": (b"\x08" + bytes(7) + b'{"\xff": 1}', "its header is invalid JSON"),
    "nested too deeply": (file_with(json.loads("[" * 500 + "]" * 500), b""), "invalid JSON"),
    "no dtype": (
        file_with({"a": {"shape": [], "data_offsets": [0, 0]}}, b""),
        "'a' lacks dtype, shape or data_offsets",
    ),
    "a tensor that is a number": (file_with({"a": 1}, b""), "'a' lacks"),
    "one offset": (file_with({"a": PLACE | {"data_offsets": [0]}}, b""), "'a' lacks"),
    "backwards": (file_with({"a": PLACE | {"data_offsets": [8, 0]}}, b""), "'a' lacks"),
    "a negative size": (file_with({"a": PLACE | {"shape": [-2]}}, bytes(8)), "'a' lacks"),
    "a size that is no number": (file_with({"a": PLACE | {"shape": ["2"]}}, bytes(8)), "'a' lacks"),
    "another size": (
        file_with({"a": PLACE | {"shape": [3]}}, bytes(8)),
        "a has 8 bytes, and .3. elements of F32 take 12",
    ),
    "a gap": (
        file_with({"a": PLACE | {"data_offsets": [4, 12]}}, bytes(12)),
        "a begins at byte 4, where 0 was expected",
    ),
    "twice the same bytes": (file_with({"a": PLACE, "b": PLACE}, bytes(8)), "b begins at byte 0, where 8 was expected"),
    "a dtype of torch's": (file_with({"a": PLACE | {"dtype": "complex128"}}, bytes(8)), "a has the dtype complex128"),
    "other metadata": (file_with({"__metadata__": 3}, b""), "__metadata__ in its header must map"),
}


@pytest.mark.parametrize(("data", "message"), DAMAGED.values(), ids=DAMAGED)
def test_what_is_wrong_with_a_file_is_said(data, message):
    with pytest.raises(UnsupportedError, match=message):
        read_file(data)


@given(st.data())
def test_overwritten_bytes_are_refused_or_make_another_file(data):
    file = bytearray(file_of_dtype("U8"))
    for _ in range(data.draw(st.integers(1, 4))):
        file[data.draw(st.integers(0, 200))] = data.draw(st.integers(0, 255))
    try:
        read = read_file(bytes(file))
    except UnsupportedError:
        return
    assert file_of(read) == file


def test_a_forged_header_is_an_error():
    """Its checksum fits, its tensors don't."""
    version = read_file(file_of_dtype("U8"))
    other = version.header.replace("before", "behind")
    patch = make_file_patch(version._replace(header=other))
    with pytest.raises(FrameError, match="does not describe its tensors"):
        made(patch)


def test_a_forged_header_that_is_no_text_is_an_error():
    patch = make_file_patch(read_file(file_of_dtype("U8")))
    contents, start = read_head(memoryview(patch))
    index = json.loads(contents.model_dump_json(exclude_defaults=True)) | {"file": {"checksum": 0, "text": "\ud800"}}
    packed = zlib.compress(json.dumps(index).encode())
    head = struct.pack("<8sII", patch[:8], len(packed), zlib.crc32(packed))
    with pytest.raises(FrameError, match="index of the patch is invalid"):
        made(head + packed + patch[start:])


def test_any_number_of_equal_tensors_comes_back():
    """Once they would make too large a file of so small a patch, they are sent again."""
    file = save({f"x{number}": torch.zeros(1 << 16, dtype=torch.uint8) for number in range(100)})
    patch = make_file_patch(read_file(file))
    assert len(patch) < 3000 and made(patch) == file


def test_a_few_bytes_do_not_make_a_file_of_any_size():
    held = read_file(save({"x": torch.zeros(1 << 16, dtype=torch.uint8)})).tensors["x"]._replace(memory="one")
    patch = make_patch_of({f"x{number}": held for number in range(100)})
    with pytest.raises(FrameError, match="a file of 6553600 bytes, of which 6488064 equal others"):
        made(patch)


def test_metadata_alone_takes_no_header():
    state = {f"layer.{number}": torch.full((3,), number) for number in range(2000)}
    old, new = (save(state, {"format": "pt", "step": step}) for step in "78")
    patch = make_file_patch(read_file(new), read_file(old))
    assert len(patch) < 400 and made(patch, read_file(old)) == new
