"""`ncz patch`: files of safetensors or checkpoints in, patches out, and back."""

import errno
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ncz_plugins import TensorPart, apply_patch, make_patch
from ncz_plugins.cli.main import main
from ncz_plugins.weights import apply, keys
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


@pytest.mark.parametrize("base", ["old.safetensors", "link"])
def test_the_base_itself_becomes_the_new_version_also_where_it_cannot_be_replaced(versions, monkeypatch, base):
    """A mount point, say, is overwritten: its tensors move, while unchanged ones are still to be copied."""
    os.symlink("old.safetensors", "link")
    old = load_file("old.safetensors")
    save_file(old | {"a": torch.ones(700)}, "new.safetensors", {"format": "pt"})
    assert main(["patch", "make", "new.safetensors", "v2.patch", "--base", "old.safetensors"]) == 0

    def busy(source: str, target: str) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), target)

    monkeypatch.setattr(os, "replace", busy)
    inode = os.stat("old.safetensors").st_ino
    assert main(["patch", "apply", "v2.patch", "old.safetensors", "--base", base]) == 0
    assert os.stat("old.safetensors").st_ino == inode
    assert Path("old.safetensors").read_bytes() == Path("new.safetensors").read_bytes()


def test_a_patch_that_changes_while_it_is_applied_is_the_one_whose_key_was_compared(versions, monkeypatch):
    """Somebody overwrites the file in place once its checksum has been compared."""
    Path("key").write_bytes(bytes(range(32)))
    assert main(["patch", "make", "new.safetensors", "v2.patch", "--key-file", "key"]) == 0
    patch, compare = Path("v2.patch").read_bytes(), keys.without_tag

    def compare_and_overwrite(*given):
        body = compare(*given)
        with open("v2.patch", "r+b") as file:
            file.write(bytes(len(patch)))
        return body

    monkeypatch.setattr(apply, "without_tag", compare_and_overwrite)
    assert main(["patch", "apply", "v2.patch", "made.safetensors", "--key-file", "key"]) == 0
    assert Path("made.safetensors").read_bytes() == Path("new.safetensors").read_bytes()
    Path("v2.patch").write_bytes(patch)
    assert main(["patch", "show", "v2.patch", "--key-file", "key"]) == 0


def test_patches_with_a_key(versions, capsys):
    """Are made, applied and shown with the same key alone; errors name the option."""
    Path("key").write_bytes(bytes(range(32)))
    Path("other").write_bytes(bytes(32))
    Path("short").write_bytes(b"short\n")
    base = ["--base", "old.safetensors"]
    assert main(["patch", "make", "new.safetensors", "v2.patch", *base, "--key-file", "key"]) == 0
    assert main(["patch", "apply", "v2.patch", "made.safetensors", *base, "--key-file", "key"]) == 0
    assert Path("made.safetensors").read_bytes() == Path("new.safetensors").read_bytes()
    assert main(["patch", "show", "v2.patch", "--key-file", "key"]) == 0
    capsys.readouterr()
    for given, says in (
        ([], "v2.patch: the patch has a keyed checksum"),
        (["--key-file", "other"], "v2.patch: the keyed checksum of the patch is not that of this key"),
        (["--key-file", "short"], "--key-file: 'short': key must be 16 bytes or more, got 6"),
        (
            ["--key-file", "none"],
            "--key-file: 'none' cannot be read: No such file or directory",
        ),
    ):
        for command in (["apply", "v2.patch", "other.safetensors", *base], ["show", "v2.patch"]):
            assert main(["patch", *command, *given]) == 2
            error = " ".join(capsys.readouterr().err.split())
            assert says in error and "--key-file" in error, error
    assert not Path("other.safetensors").exists()


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


ANONYMOUS = """
import sys, threading, torch
from pathlib import Path
from ncz_plugins.cli.main import main

def anonymous():
    return 1024 * int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])

def watch():
    global peak
    while not ended.wait(0.002):
        peak = max(peak, anonymous())

torch.set_num_threads(1)
main(["patch", "make", "old.safetensors", "small.patch"])  # loads the kernels
before = peak = anonymous()
ended = threading.Event()
watching = threading.Thread(target=watch)
watching.start()
status = main(sys.argv[1:])
ended.set()
watching.join()
print(peak - before)
sys.exit(status)
"""


@pytest.mark.processes
def test_files_take_memory_for_a_few_tensors_besides_their_mapping(versions, tmp_path):
    state = {f"{number}": torch.full((1 << 22,), number, dtype=torch.bfloat16) for number in range(32)}
    save_file(state, "old-large.safetensors")
    for tensor in state.values():
        tensor[::100] += 1
    save_file(state, "new-large.safetensors")
    nbytes = Path("new-large.safetensors").stat().st_size
    for command in (
        ["make", "new-large.safetensors", "large.patch", "--base", "old-large.safetensors"],
        ["apply", "large.patch", "made.safetensors", "--base", "old-large.safetensors"],
    ):
        run = [sys.executable, "-c", ANONYMOUS, "patch", *command]
        done = subprocess.run(run, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        assert int(done.stdout.splitlines()[-1]) < nbytes / 2, command
    assert Path("made.safetensors").read_bytes() == Path("new-large.safetensors").read_bytes()


@pytest.fixture
def checkpoints(versions, capsys):
    """Folders v1, v2 and v3 with a checkpoint each; `all` is the folder of their versions."""
    for number, source in enumerate(("old", "new", "old"), 1):
        Path(f"v{number}").mkdir()
        (Path(f"v{number}") / "model.safetensors").write_bytes(Path(f"{source}.safetensors").read_bytes())
        (Path(f"v{number}") / "config.json").write_text("{}")
    assert main(["patch", "make", "v1", "all"]) == 0
    assert main(["patch", "make", "v2", "all", "--base", "v1"]) == 0


def test_checkpoints_there_and_back(checkpoints, capsys):
    shown = capsys.readouterr()
    assert "all: version 1, 40." in shown.out and "all: version 2, " in shown.out and "times fewer" in shown.out
    assert shown.err == ""  # no bar, as this is no terminal
    assert main(["patch", "make", "v3", "all", "--whole-every", "2", "--keep", "1"]) == 0
    assert main(["patch", "apply", "all", "made"]) == 0
    assert Path("made/model.safetensors").read_bytes() == Path("v3/model.safetensors").read_bytes()
    assert os.listdir("all") == ["00000003"]
    assert "made: version 3" in capsys.readouterr().out


def test_a_version_by_its_number_from_what_the_reader_holds(checkpoints, capsys):
    assert main(["patch", "apply", "all", "made", "--version", "1"]) == 0
    assert main(["patch", "apply", "all", "next", "--base", "made"]) == 0
    for made, expected in (("made", "v1"), ("next", "v2")):
        for name in ("model.safetensors", "config.json"):
            assert (Path(made) / name).read_bytes() == (Path(expected) / name).read_bytes()


def test_versions_with_a_key(checkpoints, capsys):
    Path("key").write_bytes(bytes(range(32)))
    key = ["--key-file", "key"]
    assert main(["patch", "make", "v1", "safe", *key]) == 0
    assert main(["patch", "make", "v2", "safe", "--base", "v1", *key]) == 0
    assert main(["patch", "apply", "safe", "made", *key]) == 0 and main(["patch", "verify", "safe", *key]) == 0
    assert Path("made/model.safetensors").read_bytes() == Path("v2/model.safetensors").read_bytes()
    capsys.readouterr()
    for command in (["apply", "safe", "other"], ["verify", "safe"], ["make", "v3", "safe"]):
        assert main(["patch", *command]) == 2
        assert "version.hmac: is a keyed checksum, and no key was given" in capsys.readouterr().err
    assert main(["patch", "show", "safe", *key]) == 0
    assert capsys.readouterr().out.count("complete") == 2


def test_versions_are_shown_and_verified(checkpoints, capsys):
    assert main(["patch", "apply", "all", "made"]) == 0
    capsys.readouterr()
    assert main(["patch", "show", "all"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1][:2] == ["1", "everything"] and rows[2][:4] == ["2", "changes", "of", "1"]
    assert all(row[-1] == "complete" for row in rows[1:])
    for folder, said in (("all", "all: 2 versions, 1 to 2: every file"), ("made", "made: version 2: every file")):
        assert main(["patch", "verify", folder]) == 0
        assert said in capsys.readouterr().out
    weights = Path("all/00000001/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert main(["patch", "verify", "all"]) == 2
    assert "all/00000001/model.safetensors: has another SHA-256" in capsys.readouterr().err
    weights.unlink()
    assert main(["patch", "show", "all"]) == 0
    assert capsys.readouterr().out.count("all/00000001/model.safetensors: can't be read: No such file") == 2


@pytest.mark.processes
def test_a_terminal_shows_a_bar(checkpoints):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "ncz_plugins", "patch", "apply", "all", "made"]
    done = subprocess.run(command, stderr=theirs, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    os.close(theirs)
    assert done.stdout == "made: version 2\n" and b"making" in os.read(ours, 1 << 16)
    os.close(ours)


MISTAKES = {
    "no such file": (["make", "none.safetensors", "p"], "error: none.safetensors: cannot be read"),
    "no safetensors": (["make", "text", "p"], "error: text: is cut off, or not a safetensors file"),
    "no patch": (["apply", "text", "out.safetensors"], "error: text: 5 bytes are too few for a patch"),
    "no patch to show": (["show", "text"], "error: text: 5 bytes are too few for a patch"),
    "no base": (["apply", "v2.patch", "out.safetensors"], "(--base names the version that it is for)"),
    "another base": (["apply", "v2.patch", "out.safetensors", "--base", "new.safetensors"], "the patch is for version"),
    "a folder": (["make", "new.safetensors", "."], "error: .: cannot be written: is a folder"),
    "a folder without weights": (["make", "empty", "all"], "empty: has no .safetensors file"),
    "a folder without versions": (["apply", "empty", "made"], "empty: holds no version yet"),
    "nothing to show": (["show", "empty"], "empty: holds no version: `ncz patch make` adds one"),
    "nothing to verify": (["verify", "empty"], "empty: holds no version: publish_version, or `ncz patch make`"),
    "nothing there": (["verify", "none"], "none: can't be read"),
    "a folder and a patch": (["apply", "empty", "v2.patch", "made"], "empty is a folder of versions: give it alone"),
    "no whole versions": (["make", ".", "all", "--whole-every", "0"], "--whole-every, --keep: whole_every must be 1"),
    "no name": (["apply", "v2.patch", "", "--base", "old.safetensors"], "cannot be written: is a folder"),
    "no folder": (["make", "new.safetensors", "none/p"], "none/p: cannot be written"),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_named_and_leave_nothing(versions, capsys, tmp_path, arguments, message):
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").mkdir()
    main(["patch", "make", "new.safetensors", "v2.patch", "--base", "old.safetensors"])
    before = {path.name for path in tmp_path.iterdir()}
    assert main(["patch", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == before
