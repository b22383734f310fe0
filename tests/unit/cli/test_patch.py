"""`ncz patch`: files of safetensors in, patches out, and back."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ncz_plugins import TensorPart, apply_patch, make_patch
from ncz_plugins.cli.main import main
from ncz_plugins.weights.make import make_patch_of
from ncz_plugins.weights.tensors import held_in


@pytest.fixture
def versions(tmp_path, monkeypatch):
    """old.safetensors and new.safetensors in the working directory; returns the new one's tensors."""
    monkeypatch.chdir(tmp_path)
    random = torch.Generator().manual_seed(0)
    old = {"a.weight": 0.02 * torch.randn(200, 100, generator=random), "a.bias": torch.zeros(100)}
    new = {"a.weight": old["a.weight"] + 1e-5, "a.bias": torch.zeros(100)}
    for name, state in (("old", old), ("new", new)):
        save_file({key: value.bfloat16() for key, value in state.items()}, f"{name}.safetensors", {"format": "pt"})
    return load_file("new.safetensors")


def test_there_and_back(versions, capsys, tmp_path):
    assert main(["patch", "make", "new.safetensors", "v2.patch", "--base", "old.safetensors"]) == 0
    assert "times fewer" in capsys.readouterr().out
    assert (tmp_path / "v2.patch").stat().st_size < 0.3 * (tmp_path / "new.safetensors").stat().st_size
    assert main(["patch", "apply", "v2.patch", "made.safetensors", "--base", "old.safetensors"]) == 0
    made = load_file("made.safetensors")
    assert made.keys() == versions.keys() and all(torch.equal(made[name], versions[name]) for name in made)
    assert {path.name for path in tmp_path.iterdir()} == {
        "old.safetensors",
        "new.safetensors",
        "v2.patch",
        "made.safetensors",
    }


def test_files_come_out_byte_by_byte(versions):
    """With metadata, whatever the order of their tensors, and after a chain of patches."""
    save_file(versions, "new.safetensors", {"format": "pt", "step": "7", "of": "ü"})
    save_file(versions | {"b": torch.ones(3, dtype=torch.complex64)}, "newest.safetensors", {"step": "8"})
    assert main(["patch", "make", "new.safetensors", "v2.patch", "--base", "old.safetensors"]) == 0
    assert main(["patch", "apply", "v2.patch", "made.safetensors", "--base", "old.safetensors"]) == 0
    assert Path("made.safetensors").read_bytes() == Path("new.safetensors").read_bytes()
    assert main(["patch", "make", "newest.safetensors", "v3.patch", "--base", "new.safetensors"]) == 0
    assert main(["patch", "apply", "v3.patch", "latest.safetensors", "--base", "made.safetensors"]) == 0
    assert Path("latest.safetensors").read_bytes() == Path("newest.safetensors").read_bytes()


def test_a_patch_of_a_state_dict_makes_a_file(versions):
    Path("v2.patch").write_bytes(make_patch(versions | {"tied": versions["a.weight"]}))
    assert main(["patch", "apply", "v2.patch", "made.safetensors"]) == 0
    made = load_file("made.safetensors")
    assert torch.equal(made["tied"], versions["a.weight"]) and torch.equal(made["a.bias"], versions["a.bias"])


def test_a_state_dict_follows_by_a_patch_of_files(versions):
    assert main(["patch", "make", "new.safetensors", "v2.patch", "--base", "old.safetensors"]) == 0
    made = apply_patch(Path("v2.patch").read_bytes(), load_file("old.safetensors"))
    assert all(torch.equal(made[name], versions[name]) for name in versions)


def test_a_patch_without_a_base_holds_everything(versions, capsys):
    assert main(["patch", "make", "new.safetensors", "v2.patch"]) == 0
    assert main(["patch", "apply", "v2.patch", "made.safetensors"]) == 0
    assert torch.equal(load_file("made.safetensors")["a.weight"], versions["a.weight"])
    capsys.readouterr()
    assert main(["patch", "show", "v2.patch"]) == 0
    shown = capsys.readouterr().out
    assert "holds everything" in shown and "200 x 100" in shown and "whole" in shown


def test_names_are_shown_as_they_are(versions, capsys):
    assert main(["patch", "make", "new.safetensors", "v[2].patch"]) == 0
    assert main(["patch", "show", "v[2].patch"]) == 0
    assert main(["patch", "apply", "v[2].patch", "[red]made.safetensors"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("v[2].patch: ") == 2 and "[red]made.safetensors: 2 tensors" in shown


def test_a_part_is_shown_as_such_and_needs_the_other_ranks(versions, capsys):
    whole = versions["a.weight"]
    part = held_in({"a.weight": TensorPart(whole[50:], tuple(whole.shape), (50, 0))}, "part")
    Path("half.patch").write_bytes(make_patch_of(part, None, 1, 2))
    assert main(["patch", "show", "half.patch"]) == 0
    shown = capsys.readouterr().out
    assert "rank 1 of 2" in shown and "whole, 150 x 100 from 50, 0 on" in shown and "200 x 100" in shown
    assert main(["patch", "apply", "half.patch", "made.safetensors"]) == 2
    assert "half.patch: these are patches of ranks [1] of 2" in capsys.readouterr().err


def test_the_patches_of_all_ranks_make_a_file(versions):
    for rank, rows in enumerate((slice(0, 50), slice(50, 200))):
        parts = {
            name: TensorPart(state["a.weight"][rows], (200, 100), (rows.start, 0))
            for name, state in (("new", versions), ("old", load_file("old.safetensors")))
        }
        new, old = (held_in({"a.weight": parts[name]}, name) for name in ("new", "old"))
        Path(f"{rank}.patch").write_bytes(make_patch_of(new, old, rank, 2))
    assert main(["patch", "apply", "1.patch", "0.patch", "made.safetensors", "--base", "old.safetensors"]) == 0
    assert Path("made.safetensors").read_bytes() == Path("new.safetensors").read_bytes()


MISTAKES = {
    "no such file": (["make", "none.safetensors", "p"], "error: none.safetensors: cannot be read"),
    "no safetensors": (["make", "text", "p"], "error: text: is cut off, or not a safetensors file"),
    "no patch": (["apply", "text", "out.safetensors"], "error: text: 5 bytes are too few for a patch"),
    "no patch to show": (["show", "text"], "error: text: 5 bytes are too few for a patch"),
    "no base": (["apply", "v2.patch", "out.safetensors"], "(--base names the version that it is for)"),
    "another base": (["apply", "v2.patch", "out.safetensors", "--base", "new.safetensors"], "the patch is for version"),
    "a folder": (["make", "new.safetensors", "."], "error: .: cannot be written: is a folder"),
    "no name": (["apply", "v2.patch", "", "--base", "old.safetensors"], "cannot be written: is a folder"),
    "no folder": (["make", "new.safetensors", "none/p"], "none/p: cannot be written"),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_named_and_leave_nothing(versions, capsys, tmp_path, arguments, message):
    (tmp_path / "text").write_text("hello")
    main(["patch", "make", "new.safetensors", "v2.patch", "--base", "old.safetensors"])
    before = {path.name for path in tmp_path.iterdir()}
    assert main(["patch", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == before
