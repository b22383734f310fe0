"""Process groups that users pass."""

from __future__ import annotations

import torch.distributed as dist

from ..errors import UnsupportedError


def require_group(group: dist.ProcessGroup | None, who: str = "Communicator") -> dist.ProcessGroup:
    """The process group that was passed, or the default one.

    Args:
        group: what the user passed; None: the default group.
        who: what the user passed it to: the first word of an error message.

    Raises UnsupportedError if it is not a process group, or this rank is not in it.
    """
    if group is None and not dist.is_initialized():
        raise UnsupportedError(
            f"{who}: torch.distributed has no process group yet: call torch.distributed.init_process_group first"
        )
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise UnsupportedError(
            f"{who}: rank {dist.get_rank()} is not in the group that was passed: make it on the ranks of the group only"
        )
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise UnsupportedError(
            f"{who}: group={group!r} is not a process group: pass what torch.distributed.new_group returns, or "
            "get_group() of a DeviceMesh"
        )
    return group
