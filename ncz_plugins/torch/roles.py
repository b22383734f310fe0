"""What the backend `ncz` takes a tensor for: a gradient, a weight or an activation.

A process group sees tensors without names. The first of these that applies says what a tensor is:

1. `with role("gradient"):` around the call, on the same thread;
2. the group's name: NCZ_ROLES="dp_*=gradient,tp=activation", or a usual name of a group that carries activations;
3. the tensor itself, if it is a parameter, or belongs to a graph of autograd or to a forward pass that is run again;
4. whether a backward pass makes the call, or a method known for reducing gradients after it: a gradient if so, else a
   weight.

All ranks must come to the same role. If some would compress a call and others keep it exact, all raise MismatchError.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase

from torch import Tensor, nn

from ..core.errors import ConfigError
from . import private

ROLES = ("gradient", "parameter", "activation")
ENVIRONMENT = "NCZ_ROLES"
# Groups that carry activations, in the usual names of mesh dimensions and in Megatron-Core's descriptions of groups.
_ACTIVATION_GROUPS = (
    *("tp", "cp", "sp", "ep", "etp", "pp"),
    *("*tensor*", "*context_parallel*", "*sequence*", "*pipeline*", "expert_model*"),
)

_said = threading.local()


@contextmanager
def role(name: str) -> Iterator[None]:
    """Say what the backend `ncz` reduces in this context: calls that this thread makes.

    Gradients are compressed wherever the call is made. Parameters and activations are exact, unless the setting `roles`
    lists them.

    Args:
        name: "gradient", "parameter" or "activation".

    Raises ValueError for another name.
    """
    if name not in ROLES:
        raise ValueError(f"role must be one of {', '.join(ROLES)}, got {name!r}")
    before, _said.role = getattr(_said, "role", None), name
    try:
        yield
    finally:
        _said.role = before


def said() -> str | None:
    """The role that the innermost `with role(...)` of this thread says; None outside of any."""
    return getattr(_said, "role", None)


def of_group(description: str, source: str | None = None) -> str | None:
    """The role that a group's name says; None if it says nothing.

    Args:
        description: torch's description of the group. Device meshes describe a dimension "tp" as "mesh_tp".
        source: the rules, "PATTERN=ROLE,..."; None: those of the environment.

    Raises ConfigError for rules that can't be read.
    """
    name = description.lower().removeprefix("mesh_")
    for pattern, its_role in _rules(os.environ.get(ENVIRONMENT, "") if source is None else source):
        if fnmatchcase(name, pattern):
            return its_role
    return "activation" if any(fnmatchcase(name, pattern) for pattern in _ACTIVATION_GROUPS) else None


def seems(tensors: Sequence[Tensor]) -> str | None:
    """The role that tensors seem to have if that isn't "gradient"; None if nothing speaks against it."""
    if any(isinstance(tensor, nn.Parameter) for tensor in tensors):
        return "parameter"
    # Gradients have no graph of their own, unless they are differentiated again.
    if any(tensor.grad_fn is not None for tensor in tensors) or private.runs_forward_again():
        return "activation"
    return None


def _rules(source: str) -> list[tuple[str, str]]:
    """The patterns of group names with their roles, in the order in which they are tried."""
    rules = []
    for rule in filter(None, (each.strip() for each in source.split(","))):
        pattern, _, its_role = (each.strip() for each in rule.partition("="))
        if not pattern or its_role not in ROLES:
            raise ConfigError(
                f'{ENVIRONMENT}: each rule must be PATTERN=ROLE with one of the roles {", ".join(ROLES)}, got "{rule}"'
            )
        rules.append((pattern.lower(), its_role))
    return rules
