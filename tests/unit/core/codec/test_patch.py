"""Patches of state dicts: every bit of the new version, and nothing but a whole, fitting patch is believed."""

import json
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ncz_plugins import FrameError, MismatchError, UnsupportedError, apply_patch, make_patch
from ncz_plugins.core.codec import patch as module
from ncz_plugins.core.codec.patch import identity, read_patch

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def state(seed: int = 0, scale: float = 0.0) -> dict[str, torch.Tensor]:
    """Tensors of all kinds; those of other scales lie close to those of scale 0."""
    first, moves = torch.Generator().manual_seed(1), torch.Generator().manual_seed(seed)
    made = {}
    for dtype in FLOATS:
        values = torch.randn(70, 91, generator=first, dtype=torch.float64)
        made[f"layer.{dtype}"] = (values + scale * torch.randn(70, 91, generator=moves, dtype=torch.float64)).to(dtype)
    return made | {
        "steps": torch.tensor(7 + seed),
        "mask": torch.ones(5, dtype=torch.bool),
        "empty": torch.empty(0, 3),
        "one": torch.tensor(1.5 + scale, dtype=torch.bfloat16),
        "eight bits": torch.arange(4, dtype=torch.float32).to(torch.float8_e4m3fn),
    }


def same(a, b) -> bool:
    return list(a) == list(b) and all(
        a[name].dtype == b[name].dtype
        and a[name].shape == b[name].shape
        and torch.equal(a[name].reshape(-1).view(torch.uint8), b[name].reshape(-1).view(torch.uint8))
        for name in a
    )


def test_a_whole_version_and_what_changed():
    old, new = state(), state(1, 1e-4)
    assert same(apply_patch(make_patch(old)), old)
    patch = make_patch(new, old)
    assert same(apply_patch(patch, old), new)
    assert len(patch) < 0.8 * len(make_patch(new))
    kinds = {entry.name: entry.kind for entry in read_patch(patch)[0].tensors}
    assert kinds["mask"] == kinds["empty"] == "same" and kinds["steps"] == "whole"
    assert kinds["layer.torch.bfloat16"] == "changes"


def test_what_did_not_change_takes_no_bytes_and_no_memory():
    old = {"frozen": torch.randn(100_000), "bias": torch.zeros(3)}
    new = old | {"bias": torch.ones(3)}
    patch = make_patch(new, old)
    assert len(patch) < 600
    assert apply_patch(patch, old)["frozen"] is old["frozen"]


def test_tensors_come_go_and_change_their_shape():
    old = {"a": torch.ones(4), "b": torch.ones(4)}
    new = {"b": torch.ones(2, 2), "c": torch.zeros(3), "a": torch.ones(4, dtype=torch.float16)}
    assert same(apply_patch(make_patch(new, old), old), new)


def test_strided_tensors_and_parameters():
    old = {"w": torch.nn.Parameter(torch.randn(6, 5)).t()}
    new = {"w": old["w"] * 1.001}
    made = apply_patch(make_patch(new, old), old)
    assert torch.equal(made["w"], new["w"]) and not made["w"].requires_grad


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 99), st.sampled_from(FLOATS), st.lists(st.integers(0, 40), max_size=3), st.floats(0, 1))
def test_any_two_versions(seed, dtype, shape, scale):
    random = torch.Generator().manual_seed(seed)
    old = {"x": torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)}
    new = {"x": (old["x"].double() + scale * torch.randn(shape, generator=random, dtype=torch.float64)).to(dtype)}
    assert same(apply_patch(make_patch(new, old), old), new)
    assert same(apply_patch(make_patch(new)), new)


def test_tensors_of_several_frames(monkeypatch):
    monkeypatch.setattr(module, "_FRAME", 4096)
    old = {"x": torch.randn(10_000).bfloat16()}
    new = {"x": (old["x"].float() * 1.01).bfloat16()}
    patch = make_patch(new, old)
    assert len(read_patch(patch)[0].tensors[0].frames) == 3
    assert same(apply_patch(patch, old), new)


def test_bits_that_compare_as_equal_or_never_do_are_told_apart():
    old = {"x": torch.tensor([0.0, 1.0]), "y": torch.tensor([torch.nan, 1.0])}
    new = {"x": torch.tensor([-0.0, 1.0]), "y": old["y"].clone()}
    patch = make_patch(new, old)
    assert [entry.kind for entry in read_patch(patch)[0].tensors] == ["changes", "same"]
    assert same(apply_patch(patch, old), new)


def test_the_wrong_base_is_named():
    old, new = state(), state(1, 1e-4)
    patch = make_patch(new, old)
    with pytest.raises(
        MismatchError, match=f"for version {identity(old):08x}, and this is version {identity(new):08x}"
    ):
        apply_patch(patch, new)
    with pytest.raises(MismatchError, match="no version to apply them to"):
        apply_patch(patch)


def test_identities_tell_versions_apart():
    versions = [
        {"a": torch.zeros(4)},
        {"b": torch.zeros(4)},
        {"a": torch.zeros(2, 2)},
        {"a": torch.zeros(4, dtype=torch.int32)},
        {"a": torch.tensor([0.0, 0.0, 0.0, -0.0])},
        {},
    ]
    assert len({identity(each) for each in versions}) == len(versions)
    both = {"a": torch.zeros(1), "b": torch.ones(1)}
    assert identity(both) == identity(dict(reversed(both.items())))


def test_every_damaged_byte_is_an_error():
    old = {"x": torch.randn(300).bfloat16(), "n": torch.arange(3)}
    new = {"x": (old["x"].float() + 0.01).bfloat16(), "n": torch.arange(1, 4)}
    patch = make_patch(new, old)
    for at in range(len(patch)):
        damaged = bytearray(patch)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(FrameError):
            apply_patch(bytes(damaged), old)
    for length in [*range(0, len(patch), 7), len(patch) - 1]:
        with pytest.raises(FrameError):
            apply_patch(patch[:length], old)
    with pytest.raises(FrameError, match="follow the last frame"):
        apply_patch(patch + b"\0", old)


def forged(patch: bytes, change) -> bytes:
    """A patch whose head says something else, under a valid checksum."""
    size = int.from_bytes(patch[8:12], "little")
    head = json.loads(patch[16 : 16 + size])
    head = change(head) or head
    text = json.dumps(head).encode()
    words = [*patch[:8], *len(text).to_bytes(4, "little"), *zlib.crc32(text).to_bytes(4, "little")]
    return bytes(words) + text + patch[16 + size :]


FORGERIES = {
    "a huge tensor": lambda head: head["tensors"][0].update(shape=[1 << 39, 1 << 39]),
    "a larger tensor": lambda head: head["tensors"][0].update(shape=[100_000]),
    "another number of frames": lambda head: head["tensors"][0].update(frames=[]),
    "negative sizes": lambda head: head["tensors"][0].update(frames=[-1]),
    "an unknown dtype": lambda head: head["tensors"][0].update(dtype="complex64"),
    "an unknown kind": lambda head: head["tensors"][0].update(kind="run"),
    "an unknown key": lambda head: head.update(hook="os.system"),
    "no tensors": lambda head: head.pop("tensors") and None,
    "the same tensor twice": lambda head: head["tensors"].append(head["tensors"][1] | {"kind": "same", "frames": []}),
    "a tensor that the base lacks": lambda head: head["tensors"][1].update(name="y"),
    "changes of integers": lambda head: head["tensors"][1].update(kind="changes"),
    "another identity": lambda head: head.update(identity=1),
    "a list": lambda head: [1],
    "nested too deeply": lambda head: json.loads("[" * 500 + "]" * 500),
}


@pytest.mark.parametrize("change", FORGERIES.values(), ids=FORGERIES)
def test_a_forged_head_is_an_error_and_takes_no_memory(change):
    old = {"x": torch.randn(300).bfloat16(), "n": torch.arange(3)}
    new = {"x": (old["x"].float() + 0.01).bfloat16(), "n": torch.arange(1, 4)}
    with pytest.raises(FrameError):
        apply_patch(forged(make_patch(new, old), change), old)


@pytest.mark.parametrize("kind", ["same", "changes"])
def test_a_whole_version_changes_nothing(kind):
    def change(head):
        head["tensors"][0].update(kind=kind, **({"frames": []} if kind == "same" else {}))

    with pytest.raises(FrameError, match="impossible"):
        read_patch(forged(make_patch({"x": torch.zeros(0 if kind == "same" else 3)}), change))


def test_sparse_tensors_complex_numbers_and_what_has_no_memory_are_refused_by_name():
    for tensor in (torch.eye(3).to_sparse(), torch.zeros(2, dtype=torch.complex64), torch.zeros(2, device="meta")):
        with pytest.raises(UnsupportedError, match="layer.3"):
            make_patch({"layer.3": tensor})


def test_one_element_of_any_stride():
    old = {"w": torch.arange(6.0)[::3][:1]}
    new = {"w": torch.arange(1.0, 7.0)[::3][:1]}
    assert torch.equal(apply_patch(make_patch(new, old), old)["w"], new["w"])
    assert torch.equal(apply_patch(make_patch(new), {})["w"], new["w"])


def negated(values: torch.Tensor) -> torch.Tensor:
    """What torch has not negated in memory yet."""
    view = torch.complex(torch.zeros_like(values), -values).conj().imag
    assert view.is_neg() and torch.equal(view, values)
    return view


def test_a_negated_view():
    values = torch.randn(300)
    assert torch.equal(apply_patch(make_patch({"a": negated(values)}))["a"], values)


@pytest.mark.parametrize("state", [{"\ud800": torch.ones(3)}, {"deep": torch.ones([1] * 256)}], ids=["name", "shape"])
def test_names_and_shapes_that_no_patch_holds(state):
    with pytest.raises(UnsupportedError, match="ud800|deep"):
        make_patch(state)


def with_head(patch: bytes, change) -> bytes:
    """With another head, whose checksum fits."""
    size = module._HEAD.unpack_from(patch)[2]
    head = json.loads(patch[module._HEAD.size :][:size])
    change(head)
    text = json.dumps(head).encode()
    fields = module._HEAD.unpack_from(patch)[:2]
    return module._HEAD.pack(*fields, len(text), zlib.crc32(text)) + text + patch[module._HEAD.size + size :]


@pytest.mark.parametrize(
    "change",
    [
        lambda head: head["tensors"][0].update(shape=[1] * 1_000_000),
        lambda head: head["tensors"][0].update(shape=[2**39] * 255),
        lambda head: head["tensors"][0].update(name="\ud800"),
    ],
    ids=["a million dimensions", "too many elements", "a name that is no text"],
)
def test_hostile_heads_are_refused_at_once(change):
    """In a message that is no longer than a line."""
    with pytest.raises(FrameError) as refused:
        read_patch(with_head(make_patch({"a": torch.ones(3)}), change))
    assert len(str(refused.value).encode()) < 300
