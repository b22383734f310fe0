"""Tensors in parts: any cut of the publishers, any cut of the receivers, to the bit, and nothing else is written."""

import subprocess
import sys
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ncz_plugins import (
    FrameError,
    MismatchError,
    PartlyAppliedError,
    TensorPart,
    UnsupportedError,
    apply_patch,
    make_patch,
    stage_patch,
)
from ncz_plugins.weights import boxes
from ncz_plugins.weights.apply import read_patch
from ncz_plugins.weights.boxes import Box, frame_count, frames_of
from ncz_plugins.weights.make import make_patch_of
from ncz_plugins.weights.tensors import held_in

DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int32, torch.complex64, torch.bool]


@pytest.fixture(autouse=True)
def small_frames(monkeypatch):
    monkeypatch.setattr(boxes, "FRAME_ELEMENTS", 64)


def tensor(shape, dtype, seed: int, moved: float = 0.0, share: float = 0.3) -> torch.Tensor:
    """Values of a seed; some of them have moved, this share."""
    random = torch.Generator().manual_seed(seed)
    values = 8 * torch.randn(shape, generator=random, dtype=torch.float64)
    changes = moved * torch.randn(shape, generator=random, dtype=torch.float64)
    return torch.where(torch.rand(shape, generator=random) < share, values + changes, values).to(dtype)


def part(whole: torch.Tensor, cuts: list[int], number: int, dim: int, stride: int = 1) -> TensorPart:
    """The part of a tensor between two cuts of a dimension, in memory of its own; `stride`: of its last dimension."""
    first, end = cuts[number], cuts[number + 1]
    view = whole.narrow(dim, first, end - first)
    memory = torch.zeros(*view.shape[:-1], stride * view.shape[-1], dtype=whole.dtype)[..., ::stride]
    offsets = [first if each == dim else 0 for each in range(whole.dim())]
    return TensorPart(memory.copy_(view), tuple(whole.shape), tuple(offsets))


def patches_of(new: dict, base: dict | None, cuts: list[int], dim: int, number: int | None = None) -> list[bytes]:
    """The patches of ranks that hold these parts of all tensors."""
    ranks = len(cuts) - 1
    return [
        make_patch_of(
            *(
                None if state is None else held_in({name: part(x, cuts, rank, dim) for name, x in state.items()}, "")
                for state in (new, base)
            ),
            rank,
            ranks,
            number=number,
        )
        for rank in range(ranks)
    ]


@st.composite
def cuts(draw, size: int) -> list[int]:
    inside = draw(st.lists(st.integers(1, max(1, size - 1)), max_size=3, unique=True)) if size > 1 else []
    return [0, *sorted(inside), size]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_cuts_of_publishers_and_receivers(data):
    shape = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    dtype = data.draw(st.sampled_from(DTYPES))
    share = data.draw(st.sampled_from([0.3, 0.02]))
    old, new = {"x": tensor(shape, dtype, 0)}, {"x": tensor(shape, dtype, 0, 1.0, share)}
    dim, to_dim = (data.draw(st.integers(0, len(shape) - 1)) for _ in range(2))
    from_cuts, to_cuts = data.draw(cuts(shape[dim])), data.draw(cuts(shape[to_dim]))
    for base in (old, None):
        patches = patches_of(new, base, from_cuts, dim)
        assert torch.equal(apply_patch(patches, base)["x"], new["x"])
        for number in range(len(to_cuts) - 1):
            target = part(old["x"], to_cuts, number, to_dim, stride=data.draw(st.integers(1, 2)))
            stage_patch(patches, {"x": target}, decoded=data.draw(st.booleans())).apply()
            assert torch.equal(target.tensor, part(new["x"], to_cuts, number, to_dim).tensor)


@given(st.lists(st.integers(0, 40), max_size=4))
def test_frames_of_a_box_are_all_of_it(sizes):
    box = Box(tuple(range(len(sizes))), tuple(sizes))
    frames = list(frames_of(box))
    assert len(frames) == frame_count(tuple(sizes)) and sum(frame.numel for frame in frames) == box.numel
    assert all(0 < frame.numel <= 64 and frame.overlap(box) == frame for frame in frames)
    # Each is a range of the box's elements in memory.
    numbers = torch.arange(box.numel).view(sizes)
    found = [frame.of(numbers, box.offsets).reshape(-1) for frame in frames]
    assert not frames or torch.equal(torch.cat(found), numbers.reshape(-1))


# ---------------------------------------------------------------- what a set of patches is


def versions() -> tuple[dict, dict]:
    old = {"w": tensor((12, 8), torch.bfloat16, 0), "b": tensor((12,), torch.float32, 1)}
    return old, old | {"w": tensor((12, 8), torch.bfloat16, 0, moved=1.0)}


def test_a_missing_rank_is_named():
    old, new = versions()
    first, second, third = patches_of(new, old, [0, 4, 8, 12], 0)
    for patches, found in (([first, third], r"ranks \[0, 2\] of 3"), ([first, first, second], r"\[0, 0, 1\] of 3")):
        with pytest.raises(MismatchError, match=found):
            apply_patch(patches, old)
    with pytest.raises(MismatchError, match=r"ranks \[1\] of 3"):
        stage_patch(second, old)
    assert torch.equal(apply_patch([third, first, second], old)["w"], new["w"])


@pytest.mark.parametrize("is_whole", [True, False])
def test_patches_of_different_versions_are_refused_and_named(is_whole):
    """Whole versions fit any base, and changes of other frames than those that differ fit this one."""
    old, new = versions()
    base = None if is_whole else old
    made = {number: patches_of(new, base, [0, 4, 8, 12], 0, number) for number in (None, 5, 6)}
    for mixed in ([made[5][0], made[6][1], made[5][2]], [made[5][0], made[6][1], made[None][2]]):
        for read in (lambda mixed=mixed: apply_patch(mixed, old), lambda mixed=mixed: stage_patch(mixed, dict(old))):
            with pytest.raises(MismatchError, match=r"versions 5 \(rank.* and 6 \(rank 1\): pass those that all ranks"):
                read()
    # Those without a number are read as ever.
    for patches in (made[None], made[5], [made[5][0], *made[None][1:]]):
        assert torch.equal(apply_patch(patches, old)["w"], new["w"])
    for number in (-1, 1 << 48, 1.0, "5", True):
        with pytest.raises(UnsupportedError, match="number must be an integer from 0 to"):
            make_patch(new, number=number)
    assert torch.equal(apply_patch(make_patch(new, number=7))["w"], new["w"])


def test_what_did_not_change_is_in_no_patch():
    old, new = versions()
    new["w"] = old["w"].clone()
    new["w"][5] += 1
    listed = [[entry.name for entry in read_patch(each)[0].tensors] for each in patches_of(new, old, [0, 4, 8, 12], 0)]
    assert listed == [[], ["w"], []]


def test_equal_tensors_of_several_ranks_are_taken_once_and_different_ones_refused():
    old, new = versions()
    same = [make_patch_of(held_in(new, ""), held_in(old, ""), rank, 2) for rank in range(2)]
    assert torch.equal(apply_patch(same, old)["w"], new["w"])
    other = make_patch_of(held_in(new | {"w": new["w"] + 1}, ""), held_in(old, ""), 1, 2)
    with pytest.raises(FrameError, match="w: two ranks published different values"):
        apply_patch([same[0], other], old)
    overlapping = [
        make_patch_of(held_in({"w": part(new["w"], cut, 0, 0)}, ""), None, rank, 2)
        for rank, cut in enumerate(([0, 7], [6, 12]))
    ]
    with pytest.raises(FrameError, match="w: two ranks published different values"):
        apply_patch(overlapping)


def test_elements_that_nobody_published_are_missed():
    _, new = versions()
    alone = make_patch_of(held_in({"w": part(new["w"], [0, 6], 0, 0)}, ""))
    with pytest.raises(MismatchError, match="w: the patch has 48 of its 96 elements"):
        apply_patch(alone)
    with pytest.raises(MismatchError, match="w: the patches hold 8 of 32 elements that are needed"):
        stage_patch(alone, {"w": part(new["w"], [5, 9], 0, 0)})
    stage_patch(alone, {"w": part(new["w"], [2, 6], 0, 0)}).apply()


def test_parts_make_no_whole_tensors():
    old, new = versions()
    with pytest.raises(UnsupportedError, match="w: base holds a part of it"):
        apply_patch(make_patch(new, old), {"w": part(old["w"], [0, 6], 0, 0)})


@pytest.mark.parametrize("offsets", [(-1, 0), (7, 0), (0,), (0, 0, 0)], ids=str)
def test_parts_that_do_not_lie_in_their_tensor_are_refused(offsets):
    with pytest.raises(UnsupportedError, match=r"w: a part of shape \[6, 8\] at .* does not lie in .* \[12, 8\]"):
        make_patch({"w": TensorPart(torch.ones(6, 8), (12, 8), offsets)})


def test_a_missed_patch_is_noticed_where_no_digest_tells():
    first, second = versions()
    third = second | {"b": next_floats(second["b"])}
    cut = [0, 5, 12]
    weights = {name: x.clone() for name, x in first.items()}
    held = stage_patch(patches_of(first, None, cut, 0), weights).versions
    to_second, to_third = patches_of(second, first, cut, 0), patches_of(third, second, cut, 0)
    stage_patch(to_third, weights)  # only "b" changes, and "b" is right
    with pytest.raises(MismatchError, match="are for versions .* and the weights are versions .*: apply the patches"):
        stage_patch(to_third, weights, versions=held)
    for patches in (to_second, to_third, patches_of(first, None, [0, 12], 0)):
        staged = stage_patch(patches, weights, versions=held)
        staged.apply()
        held = staged.versions
    assert torch.equal(weights["w"], first["w"])


# ---------------------------------------------------------------- in place


def test_a_subset_of_tensors_is_written_and_nothing_else():
    old, new = versions()
    around = torch.zeros(14, 10, dtype=torch.bfloat16)
    weights = {"w": around[1:-1, 1:-1].copy_(old["w"])}
    pointer = weights["w"].data_ptr()
    stage_patch(make_patch(new, old), weights).apply()
    assert weights["w"].data_ptr() == pointer and torch.equal(weights["w"], new["w"])
    around[1:-1, 1:-1] = 0
    assert not around.any()


def test_parameters_are_written_where_they_are():
    model = torch.nn.Linear(8, 12)
    old = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    new = {name: tensor + 1e-3 for name, tensor in old.items()}
    stage_patch(make_patch(new, old), dict(model.named_parameters())).apply()
    assert all(torch.equal(parameter, new[name]) for name, parameter in model.named_parameters())


def test_tied_tensors_are_written_once_and_may_be_held_one_without_the_other():
    old, new = {"wte": tensor((12, 8), torch.bfloat16, 0)}, {"wte": tensor((12, 8), torch.bfloat16, 0, moved=1.0)}
    old["head"], new["head"] = old["wte"], new["wte"]
    patch = make_patch(new, old)
    for names in (["wte", "head"], ["head", "wte"], ["head"]):
        memory = old["wte"].clone()
        stage_patch(patch, {name: memory for name in names}).apply()
        assert torch.equal(memory, new["wte"])
    apart = {name: x.clone() for name, x in old.items()}
    stage_patch(patch, apart).apply()
    assert torch.equal(apart["head"], new["wte"]) and torch.equal(apart["wte"], new["wte"])


def test_tensors_that_are_tied_here_alone_are_refused():
    old, new = {"a": torch.ones(90), "b": torch.ones(90)}, {"a": torch.zeros(90), "b": torch.full((90,), 2.0)}
    memory = torch.ones(90)
    with pytest.raises(MismatchError, match="b: shares its memory"):
        stage_patch(make_patch(new, old), {"a": memory, "b": memory})
    assert torch.equal(memory, old["a"])


def next_floats(x: torch.Tensor) -> torch.Tensor:
    """Changes that are coded as changes."""
    return (x.view(torch.int32) + 1).view(torch.float32)


@pytest.mark.parametrize("decoded", [False, True])
def test_nothing_is_written_unless_all_fits(decoded):
    old, new = versions()
    old["b"] = tensor((300,), torch.float32, 1)
    new["b"] = next_floats(old["b"])
    patch = bytearray(make_patch(new, old))
    patch[-1] ^= 1
    weights = {name: x.clone() for name, x in old.items()}
    with pytest.raises(FrameError):
        stage_patch(bytes(patch), weights, decoded)
    others = weights | {"b": old["b"] + 3}
    with pytest.raises(MismatchError, match="b: its values are not those of the version"):
        stage_patch(make_patch(new, old), others, decoded)
    assert torch.equal(weights["w"], old["w"]) and torch.equal(weights["b"], old["b"])


def test_tensors_that_are_gone_or_have_another_form_are_named():
    old, new = versions()
    with pytest.raises(MismatchError, match="b: the new version has no such tensor"):
        stage_patch(make_patch({"w": new["w"]}, old), old)
    with pytest.raises(MismatchError, match="b: the new version has no such tensor"):
        stage_patch(make_patch({"w": new["w"]}), old)
    with pytest.raises(MismatchError, match=r"w: is BF16 \[8, 12\] in the new version, and BF16 \[12, 8\] here"):
        stage_patch(make_patch({"w": new["w"].view(8, 12)}), {"w": old["w"]})


def test_views_that_can_not_be_written_are_refused():
    old = {"c": torch.ones(9, dtype=torch.complex64)}
    with pytest.raises(UnsupportedError, match="c: a conjugated or negated view"):
        stage_patch(make_patch(old), {"c": old["c"].conj()})


@pytest.mark.parametrize("strides", [(0, 1), (1, 0), (1, 1), (3, 1)], ids=str)
def test_elements_that_share_memory_are_not_written_to(strides):
    new, memory = {"w": torch.arange(12.0).view(3, 4)}, torch.zeros(20)
    with pytest.raises(UnsupportedError, match=r"w: elements of strides .* share memory .*: pass a contiguous tensor"):
        stage_patch(make_patch(new), {"w": memory.as_strided((3, 4), strides)})
    for strides in ((4, 1), (5, 1), (1, 3), (2, 6)):  # side by side, with gaps, transposed, both
        weights = {"w": torch.zeros(30).as_strided((3, 4), strides)}
        stage_patch(make_patch(new), weights).apply()
        assert torch.equal(weights["w"], new["w"])


def test_a_backward_pass_that_needs_the_old_values_fails():
    """As after any other write in place. Tensors of inference mode are written to all the same."""
    weight, x = torch.nn.Parameter(torch.ones(4)), torch.ones(4, requires_grad=True)
    total = (weight * x).sum()
    patch = make_patch({"w": torch.full((4,), 5.0)})
    stage_patch(patch, {"w": weight}).apply()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()
    with torch.inference_mode():
        other = torch.ones(4)
    stage_patch(patch, {"w": other}).apply()
    assert weight.tolist() == other.tolist() == [5.0] * 4


@pytest.mark.parametrize("dimensions", [33, 65, 255])
def test_more_dimensions_than_numpy_has_are_written(dimensions):
    new = {"w": torch.arange(3.0).view([1] * (dimensions - 1) + [3])}
    weights = {"w": torch.zeros_like(new["w"])}
    stage_patch(make_patch(new), weights).apply()
    assert torch.equal(weights["w"], new["w"])


def test_a_failure_in_the_middle_says_what_is_new():
    old = {name: tensor((12, 8), torch.float32, number) for number, name in enumerate("abc")}
    new = {name: next_floats(x) for name, x in old.items()}
    staged = stage_patch(make_patch(new, old), weights := {name: x.clone() for name, x in old.items()})
    weights["b"] += 5  # what was checked changes before it is written
    with pytest.raises(PartlyAppliedError, match="1 tensors are new, b may be partly new, all others are old") as found:
        staged.apply()
    assert (found.value.new, found.value.mixed) == (["a"], "b")
    assert torch.equal(weights["a"], new["a"]) and torch.equal(weights["c"], old["c"])
    with pytest.raises(UnsupportedError, match="applied already"):
        staged.apply()


def test_what_is_decoded_needs_its_base_no_more():
    old, new = versions()
    weights = {name: x.clone() for name, x in old.items()}
    staged = stage_patch(make_patch(new, old), weights, decoded=True)
    weights["w"].zero_()
    staged.apply()
    changed = torch.stack([row != before for row, before in zip(new["w"], old["w"])])
    assert torch.equal(weights["w"][changed], new["w"][changed])


def test_a_whole_version_that_waits_is_written_over_anything():
    """Here over another one, which was staged for the same weights. Both differ from these in few elements."""
    old = torch.arange(1000.0)
    versions = [torch.where(torch.arange(1000) == changed, 7.5, old) for changed in (100, 200)]
    weights = {"w": old.clone()}
    for staged in [stage_patch(make_patch({"w": new}), weights, decoded=True) for new in versions]:
        staged.apply()
    assert torch.equal(weights["w"], versions[1])


@pytest.mark.parametrize("every", [2, 1000])
def test_what_waits_for_a_pause_is_what_changes(every, monkeypatch):
    monkeypatch.undo()  # frames of the usual size
    old = {"w": torch.ones(1 << 20, dtype=torch.bfloat16)}
    new = {"w": torch.where(torch.arange(1 << 20) % every == 0, 2, old["w"])}
    patch, weights = make_patch(new, old), {"w": old["w"].clone()}
    stage_patch(patch, weights, decoded=True)  # now kernels have their working memory
    tracemalloc.start()
    staged = stage_patch(patch, weights, decoded=True)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (held < old["w"].nbytes / 16) == (every == 1000)
    staged.apply()
    assert torch.equal(weights["w"], new["w"])


APPLY = """
import sys, torch
from pathlib import Path
from ncz_plugins import stage_patch

def memory(key):
    return 1024 * int(Path("/proc/self/status").read_text().split(key + ":")[1].split()[0])

torch.set_num_threads(1)
weights = {"w": torch.full((SIZE >> 10, 1024), 0.5, dtype=DTYPE), "b": torch.ones(30, dtype=DTYPE)}
stage_patch(Path(sys.argv[1]).read_bytes(), {"b": weights["b"]}).apply()  # loads the kernels
patch = Path(sys.argv[2]).read_bytes()
Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
before = memory("VmRSS")
stage_patch(patch, {"w": weights["w"]}).apply()
print(memory("VmHWM") - before - 2 * len(patch))
"""


@pytest.mark.processes
@pytest.mark.parametrize(("dtype", "mebibytes"), [(torch.bfloat16, 40), (torch.float64, 80)], ids=str)
def test_extra_memory_does_not_grow_with_the_model(dtype, mebibytes, monkeypatch, tmp_path):
    """In weights of 64 MiB of bfloat16, or 256 MiB of float64."""
    monkeypatch.undo()  # frames of the usual size
    size = 1 << 25
    old = {"w": torch.full((size >> 10, 1024), 0.5, dtype=dtype), "b": torch.ones(30, dtype=dtype)}
    new = {"w": old["w"].clone(), "b": old["b"] + 1}
    new["w"][::3, ::50] += 0.25
    (tmp_path / "b").write_bytes(make_patch({"b": new["b"]}, {"b": old["b"]}))
    (tmp_path / "w").write_bytes(make_patch({"w": new["w"]}, {"w": old["w"]}))
    program = APPLY.replace("SIZE", str(size)).replace("DTYPE", str(dtype))
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "b", tmp_path / "w"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < mebibytes << 20
