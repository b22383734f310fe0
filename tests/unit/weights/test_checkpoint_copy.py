"""The checkpoint that an engine keeps: it follows a trainer, and a patch that does not fit changes nothing."""

import pytest
import torch

from ncz_plugins import FrameError, MismatchError, WeightPublisher
from ncz_plugins.weights.engines.checkpoint import CheckpointCopy


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


def test_it_may_begin_with_a_checkpoint_from_a_disk(versions, patches):
    copy = CheckpointCopy({name: each.clone() for name, each in versions[0].items()})
    copy.apply([patches[1]])
    assert is_at(copy, versions[1])


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
