"""What ranks have in common from call to call."""

from ncz_plugins.core.config import Config
from ncz_plugins.core.training.group import GroupState


class Waited:
    """A handle that notes that it was waited for."""

    def __init__(self, success=False):
        self.waits, self.success = 0, success

    def is_success(self):
        return self.success

    def wait(self):
        self.waits += 1


def state(**guard) -> GroupState:
    return GroupState(Config.load({"guard": guard} if guard else None).guard)


def test_the_end_of_a_step_waits_once_for_what_is_pending():
    group, done, pending = state(), Waited(success=True), Waited()
    group.wait_at_end_of_step(done)
    group.wait_at_end_of_step(pending)  # by now the first one needs no more waiting
    for _ in range(2):
        group.wait_for_pending()
    assert (done.waits, pending.waits) == (0, 1)


def test_what_ranks_have_in_common_is_saved_and_restored():
    group, restored = state(), state()
    group.calls = 7
    restored.load_state_dict(group.state_dict())
    assert restored.calls == 7
    assert restored.state_dict().keys() == group.state_dict().keys()
