"""Folders of versions: a reader makes a checkpoint that was published, to the bit, or gets an error that names a file.

Also of a folder that is copied, removed, damaged or forged meanwhile.
"""

import errno
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ncz_plugins import (
    FrameError,
    MismatchError,
    NczError,
    PatchKeyError,
    UnsupportedError,
    apply_patch,
    fetch_version,
    publish_version,
    stage_patch,
    verify_versions,
)
from ncz_plugins.weights.folders import patched, verify
from ncz_plugins.weights.folders.verify import list_versions
from ncz_plugins.weights.forms import SAFETENSORS_BITS


def weights(step: int = 0, count: int = 6) -> dict[str, torch.Tensor]:
    """Tensors of a model after some steps. Each step changes a few elements."""
    generator = torch.Generator().manual_seed(0)
    state = {f"layer.{number}": torch.randn(60, 50, generator=generator).bfloat16() for number in range(count)}
    for tensor in state.values():
        tensor.view(-1)[: 10 * step] += 1
    return state | {"norm": torch.full((50,), 1.0 + step), "fixed": torch.ones(70)}


def checkpoint(folder: Path, state: dict, files: int = 2, step: int = 0) -> Path:
    """Save a checkpoint of a number of safetensors files, as Hugging Face does."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"step": step}))
    if files == 1:
        save_file(state, folder / "model.safetensors", {"format": "pt", "step": str(step)})
        return folder
    weight_map = {}
    for number in range(files):
        name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = dict(list(state.items())[number::files])
        save_file(part, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def content(folder: Path) -> dict[str, str]:
    """The files of a checkpoint, by their SHA-256."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.name not in ("version.json", "version.hmac")
    }


@pytest.fixture
def published(tmp_path):
    """The folder `versions` of 6 versions, a whole one every 3; version N is the checkpoint `step-N`."""
    for step in range(1, 7):
        made = checkpoint(tmp_path / f"step-{step}", weights(step), step=step)
        assert publish_version(tmp_path / "versions", made, whole_every=3) == step
    return tmp_path


def whole(folder: Path) -> list[int]:
    return [each.number for each in list_versions(folder) if each.manifest.base is None]


# ------------------------------------------------------------------ there and back


def test_every_version_comes_back_to_the_bit_from_any_other(published):
    versions = published / "versions"
    assert whole(versions) == [1, 4]
    for number in range(1, 7):
        for base in (None, *range(1, number)):
            into = published / f"{number}-from-{base}"
            held = None if base is None else published / f"{base}-from-None"
            assert fetch_version(versions, into, number, held) == number
            assert content(into) == content(published / f"step-{number}")
    assert fetch_version(versions, published / "newest") == 6
    assert verify_versions(versions) == [1, 2, 3, 4, 5, 6] and verify_versions(published / "newest") == [6]


def test_a_whole_version_is_a_plain_checkpoint_and_changes_are_plain_patches(published):
    whole_one, changes = (published / "versions" / f"{number:08d}" for number in (4, 5))
    assert content(whole_one) == content(published / "step-4")
    state = load_file(published / "step-4" / "model-00001-of-00002.safetensors")
    patch = (changes / "model-00001-of-00002.safetensors.patch").read_bytes()
    new = load_file(published / "step-5" / "model-00001-of-00002.safetensors")
    made = apply_patch(patch, state)
    assert made.keys() == new.keys() and all(torch.equal(made[name], new[name]) for name in new)
    stage_patch(patch, state).apply()
    assert all(torch.equal(state[name], new[name]) for name in new)
    assert sum(path.stat().st_size for path in changes.glob("*.patch")) < 2000


def test_a_reader_starts_from_any_checkpoint_that_has_a_versions_files(published):
    """Files are found by their bytes. Those that were changed in place are made again."""
    versions = published / "versions"
    for name in ("plain", "renamed", "mended"):
        fetch_version(versions, published / name, 5)
    (published / "plain" / "version.json").unlink()
    (published / "renamed" / "version.json").unlink()
    file = published / "renamed" / "model-00001-of-00002.safetensors"
    file.rename(file.with_name("other.safetensors"))
    (published / "renamed" / "model.safetensors.index.json").unlink()
    held = bytearray((published / "mended" / file.name).read_bytes())
    held[-1] ^= 1
    (published / "mended" / file.name).write_bytes(held)
    # What they hold is read in place of the files of versions, of which these are gone.
    kept = (versions / "00000004" / file.name).read_bytes()
    (versions / "00000004" / file.name).unlink()
    for base in ("plain", "renamed"):
        assert fetch_version(versions, published / f"from-{base}", 6, published / base) == 6
        assert content(published / f"from-{base}") == content(published / "step-6")
    with pytest.raises(FrameError, match="00000004.*00001-of-00002"):
        fetch_version(versions, published / "from-mended", 6, published / "mended")
    (versions / "00000004" / file.name).write_bytes(kept)
    fetch_version(versions, published / "from-mended", 6, published / "mended")
    assert content(published / "from-mended") == content(published / "step-6")


def test_the_checkpoint_of_before_only_saves_work(published):
    new = checkpoint(published / "step-7", weights(9), step=7)
    for number, base in enumerate(("step-6", "step-2", None)):
        copied = shutil.copytree(published / "versions", published / f"versions-{number}")
        shutil.rmtree(copied / "00000006")
        publish_version(copied, published / "step-6", base and published / base, whole_every=9)
        assert publish_version(copied, new, base and published / base, whole_every=9) == 7
        fetch_version(copied, published / f"made-{number}")
        assert content(published / f"made-{number}") == content(new)


# Tensors of two versions, and in how many files they are.
SHARED = torch.randn(300)
CHANGES = {
    "appear": (weights(), 2, weights() | {"more": torch.ones(5)}, 2),
    "vanish": (weights(), 2, dict(list(weights().items())[:3]), 2),
    "all vanish": (weights(), 2, {"other": torch.ones(3), "another": torch.ones(4)}, 2),
    "another shape": (weights(), 2, weights() | {"norm": torch.ones(2, 3)}, 2),
    "another dtype": (weights(), 2, {name: value.float() for name, value in weights(1).items()}, 2),
    "more files": (weights(), 2, weights(1), 5),
    "fewer files": (weights(), 5, weights(1), 2),
    "one file": (weights(), 3, weights(1), 1),
    "no longer one file": (weights(), 1, weights(1), 3),
    "another order": (weights(), 3, dict(reversed(weights(1).items())), 3),
    "untied": ({"a": SHARED, "b": SHARED.clone()}, 1, {"a": SHARED, "b": SHARED + 1}, 1),
    "tied": ({"a": SHARED, "b": SHARED + 1}, 1, {"a": SHARED, "b": SHARED.clone()}, 1),
    "empty": ({"a": torch.empty(0, 3), "b": torch.tensor(1.0)}, 2, {"a": torch.empty(0), "b": torch.tensor(2.0)}, 2),
    "nothing": (weights(1), 2, weights(1), 2),
}


@pytest.mark.parametrize("case", CHANGES)
def test_whatever_changes_between_two_versions(case, tmp_path):
    old, old_files, new, new_files = CHANGES[case]
    for number, (state, files) in enumerate([(old, old_files), (new, new_files), (old, old_files)], 1):
        made = checkpoint(tmp_path / f"{number}", state, files, number)
        publish_version(tmp_path / "versions", made)
    assert whole(tmp_path / "versions") == [1]
    for number in (2, 3):
        fetch_version(tmp_path / "versions", tmp_path / f"made-{number}", number)
        assert content(tmp_path / f"made-{number}") == content(tmp_path / f"{number}")


def test_tensors_that_moved_are_sent_as_changes(tmp_path):
    state = {f"{number}": torch.randn(50_000) for number in range(4)}
    publish_version(tmp_path / "versions", checkpoint(tmp_path / "old", state, 2))
    publish_version(tmp_path / "versions", checkpoint(tmp_path / "new", dict(reversed(state.items())), 3))
    assert list_versions(tmp_path / "versions")[1].stored_bytes < 3000


@pytest.mark.parametrize("first", [0, 3], ids=["aligned", "not aligned"])
def test_every_dtype_and_metadata(first, tmp_path):
    for step in (0, 1):
        described, data = {"__metadata__": {"step": str(step), "of": "ü"}}, bytes(first)
        described |= {"first": {"dtype": "U8", "shape": [first], "data_offsets": [0, first]}}
        for dtype, bits in SAFETENSORS_BITS.items():
            held = bytes(number % 2 for number in range(400 * bits // 8 - 1)) + bytes([step])
            offsets = [len(data), len(data) + len(held)]
            described[dtype] = {"dtype": dtype, "shape": [20, 20], "data_offsets": offsets}
            data += held
        header = json.dumps(described).encode()
        (tmp_path / str(step)).mkdir()
        (tmp_path / str(step) / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
        publish_version(tmp_path / "versions", tmp_path / str(step))
    assert list_versions(tmp_path / "versions")[1].stored_bytes < 0.3 * len(data)
    fetch_version(tmp_path / "versions", tmp_path / "made")
    assert content(tmp_path / "made") == content(tmp_path / "1")


def test_other_files_of_a_checkpoint(tmp_path):
    """What belongs to a model comes along, and what has not changed is stored once. Code and pickles are left out."""
    for number in (1, 2):
        made = checkpoint(tmp_path / f"{number}", weights())
        for name in ("tokenizer.model", "chat_template.jinja", "merges.txt"):
            (made / name).write_text("the same")
        (made / "generation_config.json").write_text(json.dumps({"number": number}))
        for name in ("optimizer.pt", "modeling.py", "training_args.bin"):
            (made / name).write_text("no")
        publish_version(tmp_path / "versions", made)
    assert {path.name for path in (tmp_path / "versions" / "00000002").iterdir()} == {
        "generation_config.json",
        "version.json",
    }
    fetch_version(tmp_path / "versions", tmp_path / "made")
    assert content(tmp_path / "made").items() < content(tmp_path / "2").items()
    left_out = content(tmp_path / "2").keys() - content(tmp_path / "made").keys()
    assert left_out == {"optimizer.pt", "modeling.py", "training_args.bin"}


def test_a_whole_version_follows_once_patches_take_more_than_it(tmp_path):
    for number in range(1, 6):
        state = {"x": torch.randn(5000)}
        publish_version(tmp_path / "versions", checkpoint(tmp_path / f"{number}", state, 1))
    patches = [each for each in list_versions(tmp_path / "versions") if each.manifest.base is not None]
    assert 1 in whole(tmp_path / "versions") and len(whole(tmp_path / "versions")) > 1
    assert all(each.stored_bytes < 1.1 * 4 * 5000 for each in patches)


def test_transformers_opens_whole_versions_and_what_was_fetched(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).bfloat16()
    for step in (1, 2):
        with torch.no_grad():
            model.lm_head.weight[:step] += 1
        model.save_pretrained(tmp_path / f"step-{step}", max_shard_size="20KB")
        publish_version(tmp_path / "versions", tmp_path / f"step-{step}")
    fetch_version(tmp_path / "versions", tmp_path / "fetched")
    assert len(list((tmp_path / "fetched").glob("*.safetensors"))) > 1
    for folder, expected in (("versions/00000001", "step-1"), ("fetched", "step-2")):
        made, wanted = (
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / each).state_dict()
            for each in (folder, expected)
        )
        assert made.keys() == wanted.keys() and all(torch.equal(made[name], wanted[name]) for name in made)


# ------------------------------------------------------------------ versions that come and go


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_old_versions_go_and_what_kept_ones_are_made_of_stays(keep, tmp_path):
    versions = tmp_path / "versions"
    for step in range(1, 9):
        publish_version(
            versions, checkpoint(tmp_path / f"step-{step}", weights(step), step=step), whole_every=3, keep=keep
        )
        kept = range(max(1, step - keep + 1), step + 1)
        for number in kept:
            fetch_version(versions, tmp_path / f"{step}-{number}", number)
            assert content(tmp_path / f"{step}-{number}") == content(tmp_path / f"step-{number}")
        # From a whole version on, and no further back.
        first = max(number for number in (1, 4, 7) if number <= kept[0])
        assert sorted(path.name for path in versions.iterdir()) == [
            f"{number:08d}" for number in range(first, step + 1)
        ]


def test_a_version_that_is_not_there_is_named(published):
    for base in (None, "none"):  # which is not even looked at
        with pytest.raises(MismatchError, match="version 9 is not there, or was removed; versions are 1 to 6"):
            fetch_version(published / "versions", published / "into", 9, base)
    assert not (published / "into").exists()


def test_a_version_that_is_removed_while_it_is_read_is_named(published):
    """It goes once reading has begun; at once, as publishers remove versions, as another file may be read meanwhile."""
    versions = published / "versions"

    def remove(done: int, of: int) -> None:
        with suppress(FileNotFoundError):
            (versions / "00000005").rename(published / "removed")

    with pytest.raises(MismatchError, match="00000005.*was removed while it was read: fetch the newest"):
        fetch_version(versions, published / "into", 5, progress=remove)
    assert not (published / "into").exists()


def test_readers_beside_a_publisher(tmp_path):
    """What a reader makes is one of the versions, whatever the publisher adds and removes meanwhile."""
    versions, steps = tmp_path / "versions", 16
    expected = {
        step: content(checkpoint(tmp_path / f"step-{step}", weights(step), step=step)) for step in range(1, steps + 1)
    }
    publish_version(versions, tmp_path / "step-1")
    ended, wrong, fetched = threading.Event(), [], []

    def read(name: str) -> None:
        base, count = None, 0
        while not ended.is_set() or not fetched:
            into, count = tmp_path / f"{name}-{count}", count + 1
            try:
                number = fetch_version(versions, into, base=base)
            except MismatchError as error:
                if "removed" not in str(error):
                    wrong.append(error)
                continue
            fetched.append(number)
            if content(into) != expected[number]:
                wrong.append(number)
            base = into

    readers = [threading.Thread(target=read, args=(f"reader-{number}",)) for number in range(2)]
    for each in readers:
        each.start()
    for step in range(2, steps + 1):
        publish_version(versions, tmp_path / f"step-{step}", tmp_path / f"step-{step - 1}", whole_every=3, keep=1)
    ended.set()
    for each in readers:
        each.join(60)
    assert not wrong and fetched


DYING = """
import os, signal, sys
from ncz_plugins import publish_version

left = int(sys.argv[3])

def progress(done, of):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

publish_version(sys.argv[1], sys.argv[2], progress=progress)
"""


@pytest.mark.processes
@pytest.mark.parametrize("calls", [2, 8])
def test_a_publisher_that_dies_leaves_no_version(calls, published):
    versions, new = published / "versions", checkpoint(published / "step-7", weights(7), step=7)
    run = subprocess.run([sys.executable, "-c", DYING, versions, new, str(calls)], check=False, timeout=120)
    assert run.returncode == -signal.SIGKILL and (versions / ".ncz-00000007").exists()
    assert fetch_version(versions, published / "before") == 6
    assert publish_version(versions, new) == 7
    assert fetch_version(versions, published / "after") == 7
    assert content(published / "after") == content(new)
    assert not [path for path in versions.iterdir() if path.name.startswith(".")]


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it fails
from ncz_plugins.cli.main import main

FILE = "model-00001-of-00002.safetensors"
for command in (
    ["make", "step-1", "new"],
    ["make", "step-2", "new", "--base", "step-1"],
    ["make", "step-3", "new"],
    ["apply", "new", "made"],
    ["verify", "new"],
    ["show", "new"],
    ["verify", "made"],
    ["make", f"other/{FILE}", "whole.patch"],
    ["make", f"other/{FILE}", "changes.patch", "--base", f"step-1/{FILE}"],
    ["show", "changes.patch"],
    ["apply", "whole.patch", "whole.safetensors"],
    ["apply", "changes.patch", "changed.safetensors", "--base", f"step-1/{FILE}"],
):
    assert main(["patch", *command]) == 0, command
"""


@pytest.mark.processes
def test_patches_of_files_need_no_torch(published):
    """Of no dtype, as importing torch takes longer than coding a gigabyte."""
    ramp = torch.arange(9000)
    kinds = {str(each): ramp.to(each) for each in (torch.int8, torch.int32, torch.float16, torch.float64, torch.bool)}
    kinds |= {"wide": torch.randn(9000, generator=torch.Generator().manual_seed(1)), "narrow": ramp.bfloat16().float()}
    new = checkpoint(published / "other", weights(9) | {f"{name} {n}": x for n in (1, 2) for name, x in kinds.items()})
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH], cwd=published, check=True, timeout=120)
    assert content(published / "made") == content(published / "step-3")
    [expected, *_] = sorted(new.glob("*.safetensors"))
    for made in ("whole", "changed"):
        assert (published / f"{made}.safetensors").read_bytes() == expected.read_bytes()


def test_a_second_publisher_is_refused(published):
    new = checkpoint(published / "step-7", weights(7), step=7)
    refused = []

    def publish_too(done: int, of: int) -> None:
        with pytest.raises(UnsupportedError, match="00000007: another process makes it"):
            publish_version(published / "versions", new)
        refused.append(1)

    assert publish_version(published / "versions", new, progress=publish_too) == 7 and refused


def copied_in(order: str, source: Path) -> list[Path]:
    """The files of a folder in the order in which a tool copies them."""
    files = sorted(path for path in source.rglob("*") if path.is_file())
    if order == "chronological":
        files.sort(key=lambda path: path.stat().st_mtime_ns)
    if order == "any":
        random.Random(0).shuffle(files)
    if order == "manifests last":
        files.sort(key=lambda path: path.name == "version.json")
    return files


@pytest.mark.parametrize("order", ["sorted", "chronological", "manifests last", "any"])
def test_a_copy_never_misleads_in_whatever_order_files_arrive(order, published):
    """Tried after every file, and after half of every file."""
    versions, copy = published / "versions", published / "copy"
    newest, expected = 0, {number: content(published / f"step-{number}") for number in range(1, 7)}
    for count, path in enumerate(copied_in(order, versions)):
        target, data = copy / path.relative_to(versions), path.read_bytes()
        target.parent.mkdir(parents=True, exist_ok=True)
        for part in (data[: len(data) // 2], data):
            target.write_bytes(part)
            into = published / f"{count}-{len(part)}"
            try:
                number = fetch_version(copy, into)
            except (FrameError, MismatchError):
                assert newest == 0
                continue
            assert number >= newest and content(into) == expected[number]
            newest = number
    assert newest == 6


def test_a_version_is_published_even_if_old_ones_cannot_go(published, monkeypatch):
    """One of them is gone, so that it is unknown what others are made of; or the system doesn't let it be removed."""
    versions, new = published / "versions", checkpoint(published / "step-7", weights(7), step=7)
    shutil.rmtree(versions / "00000004")
    assert publish_version(versions, new, keep=2) == 7

    rename = os.rename

    def denied(path: Path, to: Path) -> None:
        if ".ncz-removed" in str(to):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        rename(path, to)

    monkeypatch.setattr(os, "rename", denied)
    before = {path.name for path in versions.iterdir()}
    assert publish_version(versions, new, keep=1, whole_every=1) == 8
    assert {path.name for path in versions.iterdir()} == before | {"00000008"}
    monkeypatch.undo()
    assert publish_version(versions, new, keep=1, whole_every=1) == 9 and os.listdir(versions) == ["00000009"]


def test_names_that_are_no_versions(published):
    """A file is none, whatever its name. A folder with the last number leaves none, which is said at once."""
    versions, new = published / "versions", checkpoint(published / "step-7", weights(7), step=7)
    (versions / "20261129").touch()
    (versions / "٠٠٠٠٠٠٠٩").mkdir()
    assert [each.number for each in list_versions(versions)] == verify_versions(versions) == [1, 2, 3, 4, 5, 6]
    assert publish_version(versions, new) == 7
    (versions / "99999999").mkdir()
    calls = []
    with pytest.raises(UnsupportedError, match="99999999 is the last number of a version: remove"):
        publish_version(versions, new, progress=lambda *done: calls.append(done))
    assert not calls


def test_a_version_that_is_removed_while_versions_are_listed_has_no_manifest(published, monkeypatch):
    numbers = verify.numbers_in

    def numbers_and_one_more(folder: Path) -> list[int]:
        return [*numbers(folder), 7]

    monkeypatch.setattr(verify, "numbers_in", numbers_and_one_more)
    gone = list_versions(published / "versions")[-1]
    assert gone.number == 7 and gone.manifest is None and "version 7 is not there, or was removed" in gone.problem


@pytest.mark.parametrize("how", ["in place", "replaced", "cut off", "removed"])
def test_a_checkpoint_that_changes_while_it_is_published_is_refused(how, published):
    """A trainer saves the next one. It would be a version that nobody can fetch."""
    versions = published / "versions"
    new, newer = (checkpoint(published / f"step-{step}", weights(step), step=step) for step in (7, 8))

    def save(done: int, of: int) -> None:
        if how != "in place":  # a file that is mapped and cut off would end the process
            (new / FILE).unlink(missing_ok=True)
        if how != "removed":
            with (new / FILE).open("r+b" if how == "in place" else "wb") as file:
                file.write((newer / FILE).read_bytes()[: 0 if how == "cut off" else None])

    with pytest.raises(UnsupportedError, match=f"{new / FILE}: was changed while it was published"):
        publish_version(versions, new, progress=save)
    shutil.copy(newer / FILE, new / FILE)
    assert publish_version(versions, new) == 7
    fetch_version(versions, published / "into")
    assert content(published / "into") == content(new)


@pytest.fixture
def full_disk():
    """Files may have few bytes only: writing more fails as on a full disk, and names no file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_said_of_the_folder_that_is_written(published, full_disk):
    for folder, call in (
        ("new", lambda folder: publish_version(folder, published / "step-1")),
        ("into", lambda folder: fetch_version(published / "versions", folder)),
    ):
        with pytest.raises(UnsupportedError, match=f"^{published / folder}: File too large"):
            call(published / folder)


def test_a_file_that_can_not_be_read_is_named(published):
    """Reading at 0 of a process's memory is an error of the system, which names no file."""
    new, versions, reading = published / "step-7", published / "versions", ": Input/output error"
    checkpoint(new, weights(7), step=7)
    (new / "vocab.json").symlink_to("/proc/self/mem")
    for call in (
        lambda: publish_version(published / "new", new),
        lambda: publish_version(versions, new),
        lambda: publish_version(versions, published / "step-6", base=new),
        lambda: fetch_version(versions, published / "into", base=new),
    ):
        with pytest.raises(UnsupportedError, match=f"^{new / 'vocab.json'}{reading}"):
            call()


INTERRUPTED = """
import sys
from ncz_plugins import verify_versions

def say(done, of):
    if done == 1 << 20:
        print("reading", flush=True)

verify_versions(sys.argv[1], progress=say)
"""


@pytest.mark.processes
def test_an_interrupt_does_not_wait_for_the_end_of_a_file(tmp_path):
    """The file has holes only, and would be read for a quarter of an hour."""
    directory, nbytes = tmp_path / "00000001", 1 << 40
    directory.mkdir()
    (directory / "model.safetensors").touch()
    os.truncate(directory / "model.safetensors", nbytes)
    row = {"bytes": nbytes, "sha256": "0" * 64, "stored": "file"}
    manifest = {"format": 1, "version": 1, "base": None, "files": {"model.safetensors": row}}
    (directory / "version.json").write_text(json.dumps(manifest))
    reader = subprocess.Popen([sys.executable, "-c", INTERRUPTED, tmp_path], stdout=-1, stderr=-1, text=True)
    try:
        assert reader.stdout.readline() == "reading\n"
        reader.send_signal(signal.SIGINT)
        _, error = reader.communicate(timeout=30)
    finally:
        reader.kill()
        reader.wait()
    assert error.splitlines()[-1] == "KeyboardInterrupt", error


# ------------------------------------------------------------------ damage and forgery


def forged(published: Path, change) -> Path:
    """The folder of versions after a change of the newest manifest, which `change` gets as JSON."""
    path = published / "versions" / "00000006" / "version.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(change(manifest) or manifest))
    return published / "versions"


def rename(to: str):
    return lambda manifest: manifest["files"].update({to: manifest["files"].pop("config.json")})


FILE = "model-00001-of-00002.safetensors"
FORGED = {
    **{name: (rename(name), "version.json") for name in ("../x.json", "/x.json", "a/b", ".x", "..", "", "-x", "x\n")},
    "a moved tensor of elsewhere": (
        lambda manifest: manifest["files"][FILE].update(moved={"norm": "../x"}),
        "version.json",
    ),
    "a moved tensor of no file": (lambda manifest: manifest["files"][FILE].update(moved={"norm": "x"}), "has no x"),
    "a moved tensor that is not there": (
        lambda manifest: manifest["files"][FILE].update(moved={"none": FILE}),
        "none: is not in the file",
    ),
    "itself as its base": (lambda manifest: manifest.update(base=6), "can't be made of version 6"),
    "a base to come": (lambda manifest: manifest.update(base=7), "can't be made of version 7"),
    "no base": (lambda manifest: manifest.update(base=None), "contradicts itself"),
    "another number": (lambda manifest: manifest.update(version=7), "is of version 7"),
    "another format": (lambda manifest: manifest.update(format=2), "format"),
    "a field of some other kind": (lambda manifest: manifest.update(more=1), "more"),
    "an absurd size": (lambda manifest: manifest["files"][FILE].update(bytes=1 << 60), "bytes"),
    "a larger size": (lambda manifest: manifest["files"][FILE].update(bytes=1 << 40), "another SHA-256"),
    "a smaller size": (lambda manifest: manifest["files"][FILE].update(bytes=100), "more than the 100 bytes"),
    "another SHA-256": (lambda manifest: manifest["files"][FILE].update(sha256="0" * 64), "another SHA-256"),
    "no SHA-256": (lambda manifest: manifest["files"][FILE].update(sha256="../x"), "sha256"),
    "a list": (lambda manifest: [1], "version.json"),
    "code": (rename("modeling_x.py"), "modeling_x.py: is no file of a checkpoint"),
    "a pickle": (rename("pytorch_model.bin"), "pytorch_model.bin: is no file of a checkpoint"),
    "a manifest": (rename("version.json"), "version.json: is no file of a checkpoint"),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_manifest_is_an_error_that_names_a_file_and_writes_nothing(case, published):
    change, message = FORGED[case]
    versions = forged(published, change)
    before = sorted(published.rglob("*"))
    with pytest.raises(FrameError, match=message) as caught:
        fetch_version(versions, published / "into", 6)
    assert str(versions) in str(caught.value) and " again" in str(caught.value)
    assert sorted(published.rglob("*")) == before


KEY, OTHER = bytes(range(32)), bytes(32)


@pytest.fixture
def keyed(tmp_path):
    """The folder `versions` of two versions with a key."""
    for step in (1, 2):
        publish_version(tmp_path / "versions", checkpoint(tmp_path / f"step-{step}", weights(step), step=step), key=KEY)
    return tmp_path


def test_versions_with_a_key_come_back_with_the_same_key_alone(keyed):
    versions = keyed / "versions"
    fetch_version(versions, keyed / "made", key=KEY)
    assert content(keyed / "made") == content(keyed / "step-2")
    assert verify_versions(versions, key=KEY) == [1, 2] and verify_versions(keyed / "made", key=KEY) == [2]
    new = checkpoint(keyed / "step-3", weights(3), step=3)
    for key, message in ((OTHER, "not the keyed checksum of this key"), (None, "no key was given")):
        for call in (
            lambda key: fetch_version(versions, keyed / "into", key=key),
            lambda key: fetch_version(versions, keyed / "into", 1, keyed / "made", key=key),
            lambda key: verify_versions(versions, key=key),
            lambda key: verify_versions(keyed / "made", key=key),
            lambda key: publish_version(versions, new, key=key),
        ):
            with pytest.raises(PatchKeyError, match=f"version.hmac: .*{message}"):
                call(key)
        assert "version.hmac" in list_versions(versions, key)[0].problem
    with pytest.raises(PatchKeyError, match="key must be 16 bytes or more"):
        publish_version(versions, new, key=b"short")
    assert publish_version(versions, new, key=KEY) == 3


@pytest.mark.parametrize("number", [1, 2])
def test_a_forged_manifest_is_refused_with_a_key(number, keyed):
    """Also that of a version which the newest is made of."""
    path = keyed / "versions" / f"{number:08d}" / "version.json"
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(PatchKeyError, match=f"{number:08d}/version.hmac: is not the keyed checksum"):
        fetch_version(keyed / "versions", keyed / "into", key=KEY)
    assert not (keyed / "into").exists()


def test_an_old_manifest_is_not_taken_for_a_new_one(keyed):
    versions = keyed / "versions"
    shutil.copytree(versions / "00000001", versions / "00000003")
    with pytest.raises(FrameError, match="00000003: its version.json is of version 1"):
        fetch_version(versions, keyed / "into", 3, key=KEY)


def test_a_key_that_comes_later_begins_with_a_whole_version(published):
    versions, new = published / "versions", checkpoint(published / "step-7", weights(7), step=7)
    with pytest.raises(FrameError, match="version.hmac: is missing, and a key was given: .*pass no key") as caught:
        fetch_version(versions, published / "into", key=KEY)
    assert not isinstance(caught.value, PatchKeyError)  # it may be on its way
    assert publish_version(versions, new, key=KEY) == 7
    assert fetch_version(versions, published / "into", key=KEY) == 7
    assert json.loads((versions / "00000007" / "version.json").read_text())["base"] is None


def test_an_index_that_leads_elsewhere_is_refused(published):
    """By the publisher, and by a reader of a forged folder."""
    made = checkpoint(published / "step-7", weights(7), step=7)
    index = made / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"norm": "../step-1/model-00001-of-00002.safetensors"}}))
    with pytest.raises(UnsupportedError, match=r"index.json: names '../step-1/model.*which the checkpoint lacks"):
        publish_version(published / "versions", made)

    def with_index(manifest: dict) -> None:
        data = index.read_bytes()
        (published / "versions" / "00000006" / index.name).write_bytes(data)
        sha256 = hashlib.sha256(data).hexdigest()
        manifest["files"][index.name] = {"bytes": len(data), "sha256": sha256, "stored": "file"}

    with pytest.raises(FrameError, match="names '../step-1/model"):
        fetch_version(forged(published, with_index), published / "into", 6)
    assert not (published / "into").exists()


LINKS = [f"00000004/{FILE}", "00000004", "00000006/version.json", f"00000006/{FILE}.patch"]


@pytest.mark.parametrize("link", LINKS)
def test_links_are_not_followed(link, published):
    place = published / "versions" / link
    place.rename(published / "elsewhere")
    place.symlink_to(published / "elsewhere")
    with pytest.raises(FrameError, match="can't be read"):
        fetch_version(published / "versions", published / "into", 6)


def test_what_is_no_regular_file_is_an_error_at_once(published):
    place = published / "versions" / "00000006" / f"{FILE}.patch"
    place.unlink()
    os.mkfifo(place)
    with pytest.raises(FrameError, match=r"safetensors.patch: must be a file of"):
        fetch_version(published / "versions", published / "into", 6)


def test_tensors_that_go_back_and_forth_take_no_longer_with_every_version(tmp_path):
    """Each file of a version is made of both files of the one before: 2 ** 40 files, if each were made again."""
    versions, state = tmp_path / "versions", {f"{number}": torch.full((5000,), number) for number in range(4)}
    for version in range(1, 42):
        state = {name: value + 1 for name, value in state.items()}
        order = "0123" if version % 2 else "0213"
        made = checkpoint(tmp_path / f"{version}", {name: state[name] for name in order})
        publish_version(versions, made, tmp_path / f"{version - 1}" if version > 1 else None, whole_every=100)
    assert whole(versions) == [1] and all(
        row.moved for row in list_versions(versions)[-1].manifest.files.values() if row.stored == "patch"
    )
    fetch_version(versions, tmp_path / "into")
    assert content(tmp_path / "into") == content(tmp_path / "41")


def test_a_chain_without_an_end_is_refused(published):
    versions = published / "versions"
    for number in range(7, 130):
        (versions / f"{number:08d}").mkdir()
        manifest = json.loads((versions / "00000006" / "version.json").read_text())
        for row in manifest["files"].values():
            row.update(stored="base")
            row.pop("patch", None)
        (versions / f"{number:08d}" / "version.json").write_text(
            json.dumps(manifest | {"version": number, "base": number - 1})
        )
    with pytest.raises(FrameError, match="more than 100 versions"):
        fetch_version(versions, published / "into", 129)


DAMAGES = {"missing": Path.unlink, "cut off": lambda path: os.truncate(path, path.stat().st_size // 2)}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", [f"00000006/{FILE}.patch", f"00000004/{FILE}", "00000006/version.json"])
def test_damaged_and_missing_files_are_named(damage, file, published):
    versions = published / "versions"
    DAMAGES[damage](versions / file)
    for read in (lambda: fetch_version(versions, published / "into", 6), lambda: verify_versions(versions)):
        with pytest.raises(FrameError, match=f"{versions / file}.*copy the folder again"):
            read()
    assert "complete" not in str(list_versions(versions)[-1].problem) and list_versions(versions)[-1].problem
    # The publisher goes on with a whole version, and a reader has the version before until then.
    assert file.startswith("00000004") or fetch_version(versions, published / "before") == 5
    new = checkpoint(published / "step-7", weights(7), step=7)
    publish_version(versions, new, keep=1)
    fetch_version(versions, published / "after")
    assert content(published / "after") == content(new) and 7 in [each.number for each in list_versions(versions)]


def flip(path: Path) -> None:
    """Change one bit of the last byte, which belongs to a tensor."""
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize("file", [f"00000006/{FILE}.patch", f"00000004/{FILE}", "00000005/config.json"])
def test_a_wrong_bit_is_named_where_it_lies_and_nothing_is_built_on_it(file, published):
    """Neither by readers nor by the publisher. Names and sizes are right, so that nothing else tells."""
    versions, new = published / "versions", checkpoint(published / "step-7", weights(7), step=7)
    if file.endswith(".json"):  # which newer versions take as it is
        forged(published, lambda manifest: manifest["files"].update({"config.json": row_of(versions / file)}))
    flip(versions / file)
    calls = [lambda: fetch_version(versions, published / "into", 6), lambda: verify_versions(versions)]
    if not file.endswith(".json"):
        calls.append(lambda: publish_version(versions, new, whole_every=100))
    for call in calls:
        with pytest.raises(FrameError, match=f"^{versions / file}: has another SHA-256.*whole_every=1"):
            call()
    assert not (published / "into").exists() and not (versions / "00000007").exists()
    assert publish_version(versions, new, whole_every=1) == 7
    fetch_version(versions, published / "after")
    assert content(published / "after") == content(new)


@pytest.mark.parametrize("number", [1, 2])
def test_a_version_is_verified_by_itself(number, keyed):
    """What lies in its directory. The key is compared if it has one."""
    version = keyed / "versions" / f"{number:08d}"
    assert verify_versions(version, key=KEY) == [number]
    for key in (None, OTHER):
        with pytest.raises(PatchKeyError, match="version.hmac"):
            verify_versions(version, key=key)
    (version / "version.hmac").unlink()
    with pytest.raises(FrameError, match="version.hmac: is missing, and a key was given"):
        verify_versions(version, key=KEY)
    assert verify_versions(version) == [number]
    file = next(path for path in sorted(version.iterdir()) if FILE in path.name)
    flip(file)
    with pytest.raises(FrameError, match=f"^{file}: has another SHA-256"):
        verify_versions(version)


def test_a_patch_that_is_cut_off_while_it_is_applied_changes_nothing(published, monkeypatch):
    """A mapped file would end the process."""
    versions, apply = published / "versions", patched.apply_file_patch

    def cut_off_and_apply(*given):
        os.truncate(versions / "00000006" / f"{FILE}.patch", 0)
        return apply(*given)

    monkeypatch.setattr(patched, "apply_file_patch", cut_off_and_apply)
    fetch_version(versions, published / "into", 6)
    assert content(published / "into") == content(published / "step-6")


@pytest.mark.parametrize("by", ["fetch", "publish"])
def test_a_base_that_is_cut_off_while_it_is_read_ends_no_process(by, published, monkeypatch):
    """A reader makes the version without it. A publisher says so."""
    versions, base = published / "versions", published / "base"
    fetch_version(versions, base, 5 if by == "fetch" else 6)
    function = "apply_file_patch" if by == "fetch" else "make_file_patch"
    call = getattr(patched, function)

    def cut_off_and_call(*given):
        for path in base.glob("*.safetensors"):
            os.truncate(path, 50)
        return call(*given)

    monkeypatch.setattr(patched, function, cut_off_and_call)
    if by == "fetch":
        fetch_version(versions, published / "into", 6, base)
        assert content(published / "into") == content(published / "step-6")
        return
    new = checkpoint(published / "step-7", weights(7), step=7)
    with pytest.raises(FrameError, match="was cut off while it was read, from .* to 50 bytes: write a new file"):
        publish_version(versions, new, base, whole_every=100)
    assert not (versions / "00000007").exists()


def row_of(path: Path) -> dict:
    """The row of a file that the base has, too."""
    data = path.read_bytes()
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "stored": "base"}


@pytest.mark.parametrize("gone", [f"00000001/{FILE}", "00000001"])
def test_a_publisher_with_the_base_sees_that_readers_lack_a_file(gone, tmp_path):
    """The newest version can't be made any more, although the publisher holds its files: a whole one follows."""
    versions = tmp_path / "versions"
    steps = [checkpoint(tmp_path / f"step-{step}", weights(step), step=step) for step in (1, 2, 3)]
    for step in (1, 2):
        publish_version(versions, steps[step - 1])
    (versions / gone).rename(tmp_path / "gone")
    assert publish_version(versions, steps[2], steps[1]) == 3
    assert fetch_version(versions, tmp_path / "into") == 3
    assert content(tmp_path / "into") == content(steps[2])


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    for step in (1, 2, 3):
        publish_version(folder / "versions", checkpoint(folder / f"step-{step}", weights(step, 2), step=step))
    return folder


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_overwritten_bytes_are_an_error_or_change_nothing(data, small, tmp_path_factory):
    """Of any file. Manifests have no checksum of their own, and what they say is what must come."""
    folder = tmp_path_factory.mktemp("fuzz")
    versions = shutil.copytree(small / "versions", folder / "versions")
    path = data.draw(st.sampled_from(sorted(path for path in versions.rglob("*") if path.is_file())))
    held = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        held[data.draw(st.integers(0, len(held) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(held)
    try:
        number = fetch_version(versions, folder / "into", 3)
    except NczError:
        assert not (folder / "into").exists()
    else:
        said = json.loads((versions / f"{number:08d}" / "version.json").read_text())["files"]
        assert content(folder / "into") == {name: row["sha256"] for name, row in said.items()}
        assert verify_versions(folder / "into") == [number]
    assert sorted(each.name for each in folder.iterdir() if each.name != "into") == ["versions"]
    shutil.rmtree(folder)


MISTAKES = {
    "no checkpoint": (lambda: publish_version("versions", "none"), "none: can't be read: No such file"),
    "no weights": (lambda: publish_version("versions", "versions"), "versions: has no .safetensors file"),
    "no versions": (lambda: fetch_version("none", "into"), "none: can't be read"),
    "a folder that is full": (lambda: fetch_version("versions", "step-1"), "step-1: is there and not empty"),
    "no folder to write to": (lambda: fetch_version("versions", "none/into"), "none/.ncz-into: No such file"),
    "no base": (lambda: fetch_version("versions", "into", base="none"), "none: can't be read"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_named(case, published, monkeypatch):
    monkeypatch.chdir(published)
    call, message = MISTAKES[case]
    before = sorted(published.rglob("*"))
    with pytest.raises(UnsupportedError, match=message):
        call()
    assert sorted(published.rglob("*")) == before


def test_a_checkpoint_that_is_not_complete_is_not_published(published):
    made = checkpoint(published / "step-7", weights(7), step=7)
    (made / FILE).rename(made / "kept")
    with pytest.raises(UnsupportedError, match="index.json: names 'model-00001-of-00002.safetensors', which the"):
        publish_version(published / "versions", made)
    (made / FILE).write_bytes((made / "kept").read_bytes()[:-1])
    with pytest.raises(UnsupportedError, match=f"step-7/{FILE}: is damaged"):
        publish_version(published / "versions", made)
    assert not (published / "versions" / "00000007").exists()
    for wrong in ({"whole_every": 0}, {"whole_every": 101}, {"keep": 0}):
        with pytest.raises(ValueError, match="whole_every must be 1 to 100, and keep 1 or more"):
            publish_version(published / "versions", made, **wrong)


# ------------------------------------------------------------------ memory

MEMORY = """
import sys, torch
from pathlib import Path
from ncz_plugins import fetch_version, publish_version

def memory(name):
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return 1024 * int(line.split()[1])

def peak(call, *arguments, **named):
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = memory("VmRSS")
    call(*arguments, **named)
    return memory("VmHWM") - before

torch.set_num_threads(1)
folder = Path(sys.argv[1])
publish_version(folder / "versions", folder / "step-1")
print(peak(publish_version, folder / "versions", folder / "step-2", folder / "step-1"))
print(peak(publish_version, folder / "versions", folder / "step-3"))
print(peak(fetch_version, folder / "versions", folder / "made"))
print(peak(fetch_version, folder / "versions", folder / "changed", base=folder / "made"))
"""
FEW_FRAMES = 40 << 20  # what docs/guides/weights.md says that decoding takes


@pytest.mark.processes
def test_publishing_and_fetching_take_memory_for_a_few_files_of_a_checkpoint(tmp_path):
    files, rows, generator = 8, 2048, torch.Generator().manual_seed(0)
    state = {
        f"{number}": torch.randint(-2000, 2000, (rows, 2048), generator=generator, dtype=torch.int16)
        for number in range(2 * files)
    }
    for step in (1, 2, 3):
        for each in state.values():
            each.view(-1)[::50] += 1
        checkpoint(tmp_path / f"step-{step}", state, files)
    file_bytes = max(path.stat().st_size for path in (tmp_path / "step-1").iterdir())
    run = subprocess.run(
        [sys.executable, "-c", MEMORY, tmp_path], capture_output=True, text=True, check=False, timeout=300
    )
    assert run.returncode == 0, run.stderr
    peaks = [int(line) for line in run.stdout.split()]
    assert len(peaks) == 4 and max(peaks) < 3 * file_bytes + FEW_FRAMES < files * file_bytes, (peaks, file_bytes)
    assert content(tmp_path / "made") == content(tmp_path / "step-3")
