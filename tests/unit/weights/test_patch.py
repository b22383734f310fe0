"""Patches of state dicts: every bit of the new version, and nothing but a whole, fitting patch is believed."""

import json
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ncz_plugins import FrameError, MismatchError, UnsupportedError, apply_patch, make_patch, stage_patch
from ncz_plugins.weights import boxes
from ncz_plugins.weights.apply import read_patch
from ncz_plugins.weights.head import HEAD
from ncz_plugins.weights.make import identity_of
from ncz_plugins.weights.tensors import held_in

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
REFUSED = [
    each
    for each in DTYPES
    if str(each).removeprefix("torch.").lstrip("uq").startswith("int")
    and (str(each).startswith("torch.q") or not str(each).endswith(("8", "16", "32", "64")))
]


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


def identity(state: dict[str, torch.Tensor]) -> int:
    return identity_of(held_in(state, "state"))


def rows(patch: bytes) -> dict:
    """The rows of a patch's index, by name."""
    return {entry.name: entry for entry in read_patch(patch)[0].tensors}


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(
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
    found = rows(patch)
    assert not {"mask", "empty", "eight bits"} & found.keys() and found["steps"].frames == (8,)
    assert found["layer.torch.bfloat16"].from_base and found["layer.torch.float64"].from_base


def test_what_did_not_change_takes_no_bytes_and_no_memory():
    old = {"frozen": torch.randn(100_000), "bias": torch.zeros(3)} | {f"norm.{i}": torch.ones(4) for i in range(2000)}
    new = old | {"bias": torch.ones(3)}
    patch = make_patch(new, old)
    assert len(patch) < 300
    assert apply_patch(patch, old)["frozen"] is old["frozen"]


@pytest.mark.slow
def test_bytes_do_not_grow_with_the_tensors_that_did_not_change():
    rows = torch.ones(90_000, 8, dtype=torch.bfloat16)
    old = {f"layers.{i // 900}.experts.{i % 900}.scale": row for i, row in enumerate(rows)}
    name = "layers.50.experts.7.scale"
    changed = {name: 2 * old[name]}
    alone = make_patch(changed, {name: old[name]})
    # Identities of the versions may have some digits more.
    assert len(make_patch(old | changed, old)) <= len(alone) + 20 < 300


def test_frames_in_which_nothing_changed_take_no_bytes():
    old = {"x": torch.randn(3 << 20).bfloat16()}
    new = {"x": old["x"].clone()}
    new["x"][-1] += 1
    patch = make_patch(new, old)
    first, second, third = read_patch(patch)[0].tensors[0].frames
    assert first == second == 0 < third and same(apply_patch(patch, old), new)


# ---------------------------------------------------------------- dtypes


def bits(dtype: torch.dtype, elements: int, seed: int = 0) -> torch.Tensor:
    """Any bits of a dtype."""
    most = 2 if dtype == torch.bool else 256
    data = np.random.default_rng(seed).integers(0, most, elements * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype)


@pytest.mark.filterwarnings("ignore")  # of complex32 and quantized dtypes
@pytest.mark.parametrize("dtype", [each for each in DTYPES if each not in REFUSED], ids=str)
def test_every_dtype_of_torch(dtype):
    """Whole, and with one element that changed, which takes less than a tenth of the tensor."""
    old, new = ({"x": bits(dtype, 6000).view(60, 100)} for _ in range(2))
    new["x"].view(torch.uint8).view(-1)[777] ^= 1
    assert same(apply_patch(make_patch(new)), new)
    patch = make_patch(new, old)
    assert same(apply_patch(patch, old), new) and len(patch) < 0.1 * new["x"].nbytes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", REFUSED, ids=str)
def test_dtypes_that_are_more_or_less_than_their_bytes_are_refused(dtype):
    with pytest.raises(UnsupportedError, match=f"layer.3: a tensor of {dtype}"):
        make_patch({"layer.3": torch.empty(3, dtype=dtype)})


def peers_bytes(new: torch.Tensor, old: torch.Tensor) -> int:
    """What XOR, a shuffle of bytes and a compressor for files take."""
    changed = (new.view(torch.uint8) ^ old.view(torch.uint8)).view(-1, new.element_size())
    return len(zlib.compress(changed.t().contiguous().numpy().tobytes()))


def with_low_bits_changed(old: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Every element named changes one of its four lowest bits."""
    new, width = old.clone(), old.element_size()
    new.view(torch.uint8).view(-1, width)[at, 0] ^= (1 << at % 4).to(torch.uint8)
    return new


@pytest.mark.parametrize("share", [1e-5, 0.001, 0.01, 0.1])
@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.int8, torch.float8_e4m3fn, torch.int16, torch.int32, torch.int64, torch.float64],
    ids=str,
)
def test_rare_changes_of_any_dtype_take_no_more_than_those_of_others(dtype, share):
    old, random = bits(dtype, 1 << 19), torch.Generator().manual_seed(0)
    new = with_low_bits_changed(old, torch.randperm(1 << 19, generator=random)[: int(share * (1 << 19))])
    patch = make_patch({"x": new}, {"x": old})
    assert same(apply_patch(patch, {"x": old}), {"x": new})
    assert len(patch) < peers_bytes(new, old) + 300  # an index, and what zlib can't see: it repeats 258 bytes at most


def test_one_changed_float64_takes_about_as_few_bytes_as_one_of_bfloat16():
    sizes = []
    for dtype in (torch.float64, torch.bfloat16):
        old = torch.rand(1 << 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
        new = old.clone()
        new[5] *= 1.1
        sizes.append(len(make_patch({"x": new}, {"x": old})))
    assert sizes[0] < 3 * sizes[1]


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [(torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.float64, torch.float32)],
    ids=str,
)
def test_values_of_a_narrower_dtype_are_coded_as_such(wide, narrow):
    """To the bit, also NaN and -0, and as long as the base has such values, too."""
    random = torch.Generator().manual_seed(0)
    old = (0.02 * torch.randn(50_000, generator=random, dtype=torch.float64)).to(narrow)
    new = (old.double() * (1 + 2**-8 * torch.rand(50_000, generator=random, dtype=torch.float64))).to(narrow)
    new[:3] = torch.tensor([torch.nan, -0.0, torch.inf])
    states = [{"x": x.to(wide)} for x in (new, old)]
    patch = make_patch(*states)
    assert same(apply_patch(patch, states[1]), states[0]) and same(apply_patch(make_patch(states[0])), states[0])
    assert len(patch) < len(make_patch({"x": new}, {"x": old})) + 20
    odd = {"x": states[1]["x"].clone()}
    odd["x"].view(torch.uint8)[-wide.itemsize] ^= 1
    assert same(apply_patch(make_patch(states[0], odd), odd), states[0])
    with pytest.raises(MismatchError):
        apply_patch(patch, odd)


def test_what_zlib_packed_is_not_more_than_a_frame():
    """Whatever its checksum says: a few bytes can't ask for memory."""
    old = {"x": torch.zeros(50_000, dtype=torch.int8)}
    new = {"x": old["x"].clone()}
    new["x"][7] = 1
    patch = make_patch(new, old)
    [frame] = read_patch(patch)[1]["x"].frames
    for packed in (zlib.compress(bytes(1 << 24)), zlib.compress(b""), zlib.compress(b"x") + b"x", b"\x78\xda"):
        sizes = {"frames": [len(packed)]}
        other = forged(patch, lambda index, sizes=sizes: index["tensors"][0].update(sizes))
        with pytest.raises(FrameError, match="x: a frame is damaged"):
            apply_patch(other[: -len(frame)] + packed, old)


def test_integers_in_few_bits_are_coded():
    x = torch.randint(0, 16, (100_000,), generator=torch.Generator().manual_seed(0))
    assert len(make_patch({"x": x})) < 0.6 * 100_000  # of 800,000
    assert len(make_patch({"x": x.to(torch.int8)})) < 0.6 * 100_000


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.complex64], ids=str)
def test_what_no_coder_makes_smaller_takes_its_bytes(dtype):
    x = bits(dtype, 4000)
    assert len(make_patch({"x": x})) < x.nbytes + 200


# ---------------------------------------------------------------- tensors that are equal


def test_tied_tensors_are_held_once_on_both_ways():
    old = {"wte": torch.randn(5000), "norm": torch.ones(9)}
    old["head"] = old["wte"]
    new = {"wte": old["wte"] * 1.001, "norm": torch.zeros(9)}
    new["head"] = new["wte"]
    alone = {"wte": new["wte"], "norm": new["norm"]}
    assert len(make_patch(new)) < len(make_patch(alone)) + 100
    assert len(make_patch(new, old)) < len(make_patch(alone, {name: old[name] for name in alone})) + 100
    for made in (apply_patch(make_patch(new)), apply_patch(make_patch(new, old), old)):
        assert made["wte"] is made["head"] and same(made, {name: new[name] for name in made})


def test_equal_tensors_have_memory_of_their_own():
    new = {"a": torch.randn(5000)}
    new["b"] = new["a"].clone()
    made = apply_patch(make_patch(new))
    made["b"].zero_()
    assert torch.equal(made["a"], new["a"])


def test_tensors_that_are_tied_from_now_on_or_no_more():
    apart = {"a": torch.randn(5000), "b": torch.randn(5000)}
    tied = {"a": apart["a"] * 1.001}
    tied["b"] = tied["a"]
    for old, new in ((apart, tied), (tied, apart), (tied | {"c": torch.ones(3)}, tied | {"c": torch.zeros(3)})):
        made = apply_patch(make_patch(new, old), old)
        assert same(made, new)


def test_views_of_one_memory_are_not_the_same_tensor():
    both = torch.arange(20.0)
    new = {"q": both[:10], "k": both[10:], "t": both[:4].view(2, 2).t(), "u": both[:4].view(2, 2)}
    assert same(apply_patch(make_patch(new)), new)


# ---------------------------------------------------------------- tensors of all kinds


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
    monkeypatch.setattr(boxes, "FRAME_ELEMENTS", 4096)
    old = {"x": torch.randn(10_000).bfloat16()}
    new = {"x": (old["x"].float() * 1.01).bfloat16()}
    patch = make_patch(new, old)
    assert len(read_patch(patch)[0].tensors[0].frames) == 3
    assert same(apply_patch(patch, old), new)


def test_bits_that_compare_as_equal_or_never_do_are_told_apart():
    old = {"x": torch.tensor([0.0, 1.0]), "y": torch.tensor([torch.nan, 1.0])}
    new = {"x": torch.tensor([-0.0, 1.0]), "y": old["y"].clone()}
    patch = make_patch(new, old)
    assert [entry.name for entry in read_patch(patch)[0].tensors] == ["x"]
    assert same(apply_patch(patch, old), new)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_base_with_one_wrong_bit_is_named(monkeypatch, threads):
    """Wherever it is: where bits change, where whole elements are sent, where nothing is."""
    monkeypatch.setattr(boxes, "FRAME_ELEMENTS", 4096)
    old = state() | {"gone": torch.ones(3), "cast": torch.zeros(3), "tied": torch.randn(9000).bfloat16()}
    new = state(1, 1e-4) | {"cast": torch.ones(3, dtype=torch.float64), "tied": old["tied"].clone()}
    new["tied"][0] += 1
    new["mask"] = old["mask"]
    old["tied too"], new["tied too"] = old["tied"], new["tied"]
    patch, before = make_patch(new, old), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert same(apply_patch(patch, old), new)
        for name in old.keys() - {"empty"}:
            wrong = old | {name: old[name].clone()}
            wrong[name].reshape(-1).view(torch.uint8)[-1] ^= 1
            with pytest.raises(MismatchError, match=f"{identity(old):08x}, and this is version {identity(wrong):08x}"):
                apply_patch(patch, wrong)
    finally:
        torch.set_num_threads(before)


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
    """A patch whose index says something else, under a valid checksum."""
    *fields, size, _ = HEAD.unpack_from(patch)
    index = json.loads(zlib.decompress(patch[HEAD.size :][:size]))
    index = change(index) or index
    packed = zlib.compress(json.dumps(index).encode(), 0)
    return HEAD.pack(*fields, len(packed), zlib.crc32(packed)) + packed + patch[HEAD.size + size :]


# Tensors: x has changes, n is plain, t is the same as n.
FORGERIES = {
    "a huge tensor": lambda index: index["tensors"][0].update(shape=[1 << 39, 1 << 39]),
    "a larger tensor": lambda index: index["tensors"][0].update(shape=[1 << 40], frames=[7] * (1 << 19)),
    "a frame larger than its elements": lambda index: index["tensors"][1].update(shape=[2]),
    "more elements than frames hold": lambda index: index["tensors"][0].update(from_base=False, shape=[200_000]),
    "another number of frames": lambda index: index["tensors"][0].update(frames=[]),
    "another number of digests": lambda index: index["tensors"][0].update(digests=[]),
    "another digest": lambda index: index["tensors"][1].update(digests=[1]),
    "negative sizes": lambda index: index["tensors"][0].update(frames=[-1]),
    "an unknown dtype": lambda index: index["tensors"][0].update(dtype="Tensor"),
    "a narrower dtype that has other values": lambda index: index["tensors"][0].update(narrow="F16"),
    "a wider dtype": lambda index: index["tensors"][0].update(narrow="F32"),
    "bytes of its own": lambda index: index["tensors"][0].update(nbytes=600),
    "a part outside": lambda index: index["tensors"][0].update(offsets=[1], sizes=[300]),
    "a part of other dimensions": lambda index: index["tensors"][0].update(offsets=[0, 0], sizes=[300, 1]),
    "a part that is smaller than its frames": lambda index: index["tensors"][0].update(offsets=[0], sizes=[1]),
    "an unknown key": lambda index: index.update(hook="os.system"),
    "no tensors": lambda index: index.pop("tensors") and None,
    "the same tensor twice": lambda index: index["tensors"].append(index["tensors"][1]),
    "a tensor that is gone": lambda index: index.update(gone=["x"]),
    "the same as nothing": lambda index: index["tensors"][2].update(of="u"),
    "the same as itself": lambda index: index["tensors"][2].update(of="t"),
    "the same as another": lambda index: index["tensors"][2].update(of="x"),
    "no other one": lambda index: index["tensors"][2].pop("of") and None,
    "the same with frames": lambda index: index["tensors"][2].update(frames=[1]),
    "changes that are the same": lambda index: index["tensors"][0].update(of="n"),
    "no base": lambda index: index.update(base=None),
    "a rank that is not": lambda index: index.update(rank=1),
    "no ranks": lambda index: index.update(ranks=0),
    "a list": lambda index: [1],
    "nested too deeply": lambda index: json.loads("[" * 500 + "]" * 500),
}


@pytest.mark.parametrize("change", FORGERIES.values(), ids=FORGERIES)
def test_a_forged_index_is_an_error_and_takes_no_memory(change):
    old = {"x": torch.randn(300).bfloat16(), "n": torch.arange(3)}
    new = {"x": (old["x"].float() + 0.01).bfloat16(), "n": torch.arange(1, 4)}
    new["t"], old["t"] = new["n"], old["n"]
    patch = make_patch(new, old)
    assert [(entry.from_base, entry.of) for entry in read_patch(patch)[0].tensors] == [
        (True, None),
        (True, None),
        (False, "n"),
    ]
    assert same(apply_patch(forged(patch, lambda index: None), old), new)
    with pytest.raises(FrameError):
        apply_patch(forged(patch, change), old)


NUMBERS = st.sampled_from([0, 1, 2, 3, 7, 300, 600, 4096, 1 << 20, (1 << 32) - 1, 1 << 40, (1 << 48) - 1])
LISTS = st.lists(NUMBERS, max_size=3)
FIELDS = {
    **dict.fromkeys(["shape", "offsets", "sizes", "frames", "digests"], LISTS),
    **dict.fromkeys(["nbytes"], NUMBERS),
    "dtype": st.sampled_from(["F32", "I8", "C64", "F4", "F6_E2M3", "complex32", "bits8"]),
    "narrow": st.sampled_from(["BF16", "F32"]),
    "from_base": st.booleans(),
    "of": st.sampled_from(["x", "n", "t", "u"]),
}


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_whatever_an_index_says_is_an_error_or_weights(data):
    old = {"x": torch.arange(300).bfloat16(), "n": torch.arange(3)}
    new = {"x": (old["x"].float() * 1.01).bfloat16(), "n": torch.arange(1, 4)}
    new["t"], old["t"] = new["n"], old["n"]

    def change(index):
        for _ in range(data.draw(st.integers(1, 3))):
            field = data.draw(st.sampled_from(sorted(FIELDS)))
            index["tensors"][data.draw(st.integers(0, 2))][field] = data.draw(FIELDS[field])
        index.update(
            base=data.draw(st.sampled_from([index["base"], None])), ranks=data.draw(st.sampled_from([1, 1 << 47]))
        )

    patch = forged(make_patch(new, old), change)
    weights = {name: x.clone() for name, x in old.items()}
    for use in (lambda: apply_patch(patch, old), lambda: stage_patch(patch, weights)):
        try:
            use()
        except (FrameError, MismatchError, UnsupportedError):
            pass
    assert same(weights, old)


@pytest.mark.parametrize("change", [{"name": "y"}, {"dtype": "I32"}, {"shape": [20, 15]}], ids=str)
def test_changes_of_a_tensor_that_the_base_lacks(change):
    old, new = {"x": torch.randn(300)}, {"x": torch.randn(300)}
    patch = forged(make_patch(new, old), lambda index: index["tensors"][0].update(change))
    with pytest.raises(MismatchError, match="the patch has 300 of its 300 elements or changes them"):
        apply_patch(patch, old)


def test_a_tensor_that_is_the_same_as_one_that_is_the_same_as_another():
    """Also where the name of the last one is empty."""
    tied = torch.arange(3)
    patch = make_patch({"": tied, "x": tied, "y": tied})
    with pytest.raises(FrameError, match="y: the patch says"):
        apply_patch(forged(patch, lambda index: index["tensors"][2].update(of="x")))


def test_an_index_that_unpacks_to_more_than_it_may_is_an_error():
    patch = make_patch({"a": torch.ones(3)})
    *fields, size, _ = HEAD.unpack_from(patch)
    bomb = zlib.compress(b" " * (1 << 25) + b"{}")
    with pytest.raises(FrameError, match="cut off, or too long"):
        read_patch(HEAD.pack(*fields, len(bomb), zlib.crc32(bomb)) + bomb)


def test_names_that_compress_without_end_come_back():
    new = {"a" * 100_000 + str(number): torch.tensor(number) for number in range(3)}
    assert same(apply_patch(make_patch(new)), new)


def test_a_whole_version_changes_nothing():
    with pytest.raises(FrameError, match="impossible"):
        read_patch(
            forged(make_patch({"x": torch.zeros(300)}), lambda index: index["tensors"][0].update(from_base=True))
        )


def test_sparse_tensors_and_what_has_no_memory_are_refused_by_name():
    for tensor in (torch.eye(3).to_sparse(), torch.zeros(2, device="meta")):
        with pytest.raises(UnsupportedError, match="layer.3"):
            make_patch({"layer.3": tensor})


NO_STATES = {
    "a module": (torch.nn.Linear(2, 2), "got Linear: pass its state_dict()"),
    "None": (None, "new must be a mapping of names to tensors, got NoneType"),
    "a list": ([torch.ones(2)], "got list"),
    "a value of None": ({"a": None}, "a: must be a tensor, got NoneType: leave it out"),
    "nested": ({"opt": {"b": torch.ones(2)}}, "opt: must be a tensor, got dict: .*'opt.weight'"),
    "a number": ({"step": 3}, "step: must be a tensor, got int: pass torch.as_tensor"),
    "an array": ({"a": np.ones(2)}, "a: must be a tensor, got ndarray: pass torch.as_tensor"),
    "a name that is a number": ({1: torch.ones(2)}, "must be a string that UTF-8 can write, got 1 .int."),
}


@pytest.mark.parametrize(("state", "message"), NO_STATES.values(), ids=NO_STATES)
def test_what_is_no_state_dict_is_told_what_to_pass(state, message):
    with pytest.raises(UnsupportedError, match=message.replace("()", r"\(\)")):
        make_patch(state)


@pytest.mark.parametrize(
    "hold",
    [
        bytearray,
        memoryview,
        lambda patch: np.frombuffer(patch, np.uint8),
        lambda patch: torch.frombuffer(bytearray(patch), dtype=torch.uint8),
    ],
    ids=["bytearray", "memoryview", "numpy", "torch"],
)
def test_whatever_holds_bytes_may_be_a_patch(hold):
    old, new = state(), state(1, 1e-4)
    assert same(apply_patch(hold(make_patch(new, old)), old), new)


@pytest.mark.parametrize("patch", [None, "v2.patch", 5, [1], torch.ones(40), np.zeros(80, np.uint8)[::2]], ids=str)
def test_what_holds_no_bytes_is_told_what_to_pass(patch):
    with pytest.raises(UnsupportedError, match="patch must be bytes"):
        apply_patch(patch)


def test_a_conjugated_view():
    values = torch.complex(torch.randn(300), torch.randn(300))
    assert torch.equal(apply_patch(make_patch({"a": values.conj()}))["a"], values.conj().resolve_conj())


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
        read_patch(forged(make_patch({"a": torch.ones(3)}), change))
    assert len(str(refused.value).encode()) < 300
