"""The checkpoint that an engine keeps: it follows a trainer, and a patch that does not fit changes nothing."""

import pytest
import torch
from safetensors.torch import save_file

from ncz_plugins import (
    FrameError,
    MismatchError,
    PartlyAppliedError,
    PatchKeyError,
    StagedPatch,
    UnsupportedError,
    WeightPublisher,
)
from ncz_plugins.weights.engines.checkpoint import CheckpointCopy, read_checkpoint
from ncz_plugins.weights.engines.sglang import load_patches


@pytest.fixture
def versions() -> list[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(0)
    first = {name: torch.randn(300, 40, generator=random).bfloat16() for name in ("a", "b", "c")}
    second = first | {"a": first["a"] * 1.01}
    return [first, second, second | {"b": second["b"] * 1.01, "a": second["a"] + 0.1}]


@pytest.fixture
def patches(versions) -> list[bytes]:
    """The first version whole, and the changes of each other one."""
    publisher, made = WeightPublisher(), []
    for state in versions:
        before = publisher.identity if publisher.version else None
        publisher.publish(state)
        made.append(publisher.patch(before))
    return made


def is_at(copy: CheckpointCopy, state: dict[str, torch.Tensor]) -> bool:
    return copy.weights.keys() == state.keys() and all(torch.equal(copy.weights[name], state[name]) for name in state)


def test_it_has_every_version_and_writes_changes_in_place(versions, patches):
    copy = CheckpointCopy()
    for number, (patch, state) in enumerate(zip(patches, versions)):
        copy.apply([patch])
        assert is_at(copy, state)
        if number == 0:
            places = {name: each.data_ptr() for name, each in copy.weights.items()}
    assert {name: each.data_ptr() for name, each in copy.weights.items()} == places


def test_it_may_begin_with_a_checkpoint_from_a_disk_which_stays_as_it_is(versions, patches, tmp_path):
    save_file({"a": versions[0]["a"]}, tmp_path / "model-00001.safetensors")
    save_file({name: versions[0][name] for name in ("b", "c")}, tmp_path / "model-00002.safetensors")
    copy = CheckpointCopy(read_checkpoint(tmp_path))
    for patch, state in zip(patches[1:], versions[1:]):
        copy.apply([patch])
        assert is_at(copy, state)
    assert is_at(CheckpointCopy(read_checkpoint(tmp_path)), versions[0])
    with pytest.raises(UnsupportedError, match="safetensors"):
        read_checkpoint(tmp_path / "nothing")


def test_a_patch_that_does_not_fit_changes_nothing_and_a_whole_version_helps(versions, patches):
    copy = CheckpointCopy()
    with pytest.raises(MismatchError, match="whole version"):
        copy.apply([patches[1]])
    copy.apply([patches[0]])
    for wrong, error in ((patches[2], MismatchError), (patches[1][:-1], FrameError), (patches[0][:-1], FrameError)):
        with pytest.raises(error):
            copy.apply([wrong])
        assert is_at(copy, versions[0])
    publisher = WeightPublisher()
    publisher.publish(versions[2])
    copy.apply([publisher.patch()])
    assert is_at(copy, versions[2])


def test_a_tensor_that_is_new_is_refused_unless_the_version_is_whole(versions):
    publisher, copy = WeightPublisher(), CheckpointCopy()
    publisher.publish(versions[0])
    copy.apply([publisher.patch()])
    before = publisher.identity
    publisher.publish(versions[0] | {"new": torch.ones(3, dtype=torch.bfloat16)})
    with pytest.raises(MismatchError, match="new"):
        copy.apply([publisher.patch(before)])
    copy.apply([publisher.patch()])
    assert "new" in copy.weights


def test_another_checkpoint_is_refused_also_where_only_unchanged_tensors_differ(versions, patches):
    copy = CheckpointCopy(versions[0] | {"c": versions[0]["c"] + 1})
    with pytest.raises(MismatchError, match="whole version"):
        copy.apply([patches[1]])


def test_after_a_write_that_failed_only_a_whole_version_is_taken(versions, patches, monkeypatch):
    copy = CheckpointCopy()
    copy.apply([patches[0]])

    def fails(staged):
        raise PartlyAppliedError(["a"], "b", OSError("no"))

    with monkeypatch.context() as patched:
        patched.setattr(StagedPatch, "apply", fails)
        with pytest.raises(PartlyAppliedError):
            copy.apply([patches[1]])
    assert copy.identity is None
    with pytest.raises(MismatchError, match="whole version"):
        copy.apply([patches[1]])
    copy.apply([patches[0]])
    assert is_at(copy, versions[0])


KEY = bytes(range(32))


@pytest.mark.parametrize("key", [None, bytes(32)], ids=["none", "another"])
def test_a_patch_with_another_key_changes_nothing(versions, key):
    publisher, copy = WeightPublisher(key=KEY), CheckpointCopy(versions[0], KEY)
    publisher.publish(versions[0])
    other, before = WeightPublisher(key=key), publisher.identity
    for each in (publisher, other):
        each.publish(versions[0])
        each.publish(versions[1])
    with pytest.raises(PatchKeyError):
        copy.apply([other.patch(before)])
    assert is_at(copy, versions[0])
    copy.apply([publisher.patch(before)])
    assert is_at(copy, versions[1])
    with pytest.raises(PatchKeyError):
        CheckpointCopy(key=key).apply([publisher.patch()])


class Model(torch.nn.Module):
    """What SGLang gives to a loader."""

    def load_weights(self, weights):
        self.loaded = dict(weights)


def test_the_loader_of_sglang_takes_the_key_from_the_file_that_the_environment_names(versions, tmp_path, monkeypatch):
    (tmp_path / "key").write_bytes(KEY)
    monkeypatch.setenv("NCZ_KEY_FILE", str(tmp_path / "key"))
    model, publisher, other = Model(), WeightPublisher(key=KEY), WeightPublisher()
    for each in (publisher, other):
        each.publish(versions[0])
    with pytest.raises(PatchKeyError, match="no keyed checksum"):
        load_patches(model, [("patch", torch.frombuffer(bytearray(other.patch()), dtype=torch.uint8))])
    load_patches(model, [("patch", torch.frombuffer(bytearray(publisher.patch()), dtype=torch.uint8))])
    assert torch.equal(model.loaded["a"], versions[0]["a"])
    (tmp_path / "short").write_bytes(b"short")
    for file, error, says in (
        (str(tmp_path / "short"), PatchKeyError, "key must be 16"),
        (str(tmp_path / "none"), UnsupportedError, "cannot be read: No such file"),
        (str(tmp_path), UnsupportedError, "cannot be read: Is a directory"),
        ("", UnsupportedError, "cannot be read: No such file"),
    ):
        monkeypatch.setenv("NCZ_KEY_FILE", file)
        with pytest.raises(error, match=f"^NCZ_KEY_FILE: '{file}':? {says}"):
            load_patches(Model(), [])
