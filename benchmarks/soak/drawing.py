"""What a soak does: drawn at random from a seed, the same on every rank."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

FLOATS = ("float32", "bfloat16", "float16", "float64")
INTEGERS = ("int32", "int64", "uint8")
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")
SUMS = ("all_reduce", "reduce_scatter", "reduce")
ROLES = ("gradient", "parameter", "activation")
USUAL = 1 << 19  # elements that most calls stay below
TIMEOUT_SECONDS = 300  # of a rank for the others, on a machine that may be busy

_POISONS = (float("nan"), float("inf"), float("-inf"))
# How large the values may be, as powers of ten: sums over ranks stay far from what the dtype can hold.
_SCALES = {"float32": (-6, 6), "bfloat16": (-6, 6), "float16": (-2, 1), "float64": (-9, 9)}


@dataclass(frozen=True)
class Call:
    """One collective.

    Attributes:
        seed: what the values are drawn from.
        length: elements of the tensor, or of one rank's part where there are parts.
        data: the kind of values, see `reference.py`.
        poison: what is put in: (rank in the group, element, value).
        aliased: whether output and input share memory, for collectives with parts.
        root: of a broadcast or reduce, the rank in the group.
        name: what policies and error feedback know the tensor by.
    """

    name: str
    seed: int
    collective: str
    dtype: str
    length: int
    op: str | None
    role: str | None
    data: str
    scale: float
    poison: tuple[tuple[int, int, float], ...] = ()
    asynchronous: bool = True
    aliased: bool = False
    root: int = 0

    @property
    def has_parts(self) -> bool:
        return self.collective in ("reduce_scatter", "all_gather")

    def elements(self, ranks: int) -> int:
        """Of the whole tensor: the larger one of input and output."""
        return self.length * ranks if self.has_parts else self.length


@dataclass(frozen=True)
class Meeting:
    """What some ranks do together.

    Attributes:
        configs: one for each communicator. All of them make all calls, on the same values.
        twins: whether the configurations only differ in what can't change a result.
        batches: calls that are under way at the same time; a step of the training each.
    """

    ranks: tuple[int, ...]
    configs: tuple[dict, ...]
    twins: bool
    batches: tuple[tuple[Call, ...], ...]


def session(seed: int, index: int, world_size: int, largest: int) -> list[Meeting]:
    """Who meets in a session, each rank at most once, and what they do.

    Args:
        largest: elements of the largest tensors; one of them comes first.
    """
    draw = random.Random(f"{seed}/{index}/{world_size}/{largest}")
    everyone = tuple(range(world_size))
    if index == 0:
        calls = [_call(draw, world_size, largest, "all_reduce", "float32")]
        calls += [_call(draw, world_size, largest // 8, collective) for collective in COLLECTIVES[1:]]
        return [_meeting(draw, everyone, [(call,) for call in calls])]
    groups = [everyone]
    if draw.random() < 0.4:
        chosen = [draw.randrange(3) for _ in everyone]  # the third group does nothing
        groups = [tuple(rank for rank in everyone if chosen[rank] == group) for group in range(2)]
    huge = draw.random() < 0.01
    return [_meeting(draw, ranks, _batches(draw, len(ranks), largest, huge)) for ranks in groups if ranks]


def _batches(draw: random.Random, ranks: int, largest: int, huge: bool) -> list[tuple[Call, ...]]:
    batches = []
    for _ in range(draw.randint(1, 6)):
        depth = draw.choice((1, 2, 4, 8))
        batches.append(tuple(_call(draw, ranks, _size(draw, USUAL)) for _ in range(depth)))
        if draw.random() < 0.4:  # again and again, as in a training: error feedback goes on from one to the next
            for _ in range(draw.randint(1, 2)):
                batches.append(tuple(replace(call, seed=draw.getrandbits(32)) for call in batches[-1]))
    if draw.random() < 0.2:
        batches.append((_call(draw, ranks, _size(draw, min(largest, 8 * USUAL), least=USUAL)),))
    if huge:
        batches.append((_call(draw, ranks, _size(draw, largest, least=8 * USUAL)),))
    return batches


def _size(draw: random.Random, largest: int, least: int = 1) -> int:
    """Small sizes are as likely as large ones; where there is no least one, some are 0."""
    if least == 1 and draw.random() < 0.03:
        return 0
    least = min(least, largest)
    return int(least * (largest / least) ** draw.random())


def _call(draw: random.Random, ranks: int, size: int, collective: str | None = None, dtype: str | None = None) -> Call:
    collective = collective or draw.choices(COLLECTIVES, (5, 2, 2, 2, 2))[0]
    summed = collective in SUMS
    dtype = dtype or (draw.choice(FLOATS) if draw.random() < 0.93 else draw.choice(INTEGERS))
    op = draw.choices(("SUM", "AVG", "MAX", "MIN", "PRODUCT"), (12, 6, 1, 1, 1))[0] if summed else None
    if dtype in INTEGERS and op == "AVG":
        op = "SUM"  # there is no average of integers
    kinds = ("normal", "heavy", "sparse", "smooth", "mixed", "normal", "whole", "zero", "constant", "enormous")
    data = draw.choices(kinds, (6, 3, 3, 3, 3, 3, 2, 1, 1, 1))[0]
    if dtype in INTEGERS or op == "PRODUCT":
        data = "whole"
    low, high = _SCALES.get(dtype, (0, 0))
    # A quarter of the size where all parts of several tensors of eight bytes would not fit into the memory at once.
    size = size // 4 if dtype in ("float64", "int64") and size > 32 * USUAL else size
    length = size // ranks if collective in ("reduce_scatter", "all_gather") else size
    root = draw.randrange(ranks)
    poison = ()
    if dtype in FLOATS and op in ("SUM", "AVG", None) and length and draw.random() < 0.06:
        whole = length * ranks if collective == "reduce_scatter" else length
        givers = (root,) if collective == "broadcast" else range(ranks)
        poison = tuple(
            (draw.choice(givers), draw.randrange(whole), draw.choice(_POISONS)) for _ in range(draw.randint(1, 3))
        )
    return Call(
        name=f"layers.{draw.getrandbits(32)}.{draw.choice(('weight', 'bias'))}",
        seed=draw.getrandbits(32),
        collective=collective,
        dtype=dtype,
        length=length,
        op=op,
        role=draw.choices((None, *ROLES), (6, 6, 1, 1))[0],
        data=data,
        scale=1.0 if data == "whole" else 10 ** draw.uniform(low, high),
        poison=poison,
        asynchronous=draw.random() < 0.8,
        aliased=draw.random() < 0.3,
        root=root,
    )


def _meeting(draw: random.Random, ranks: tuple[int, ...], batches: list[tuple[Call, ...]]) -> Meeting:
    config = _config(draw, len(ranks))
    kind = draw.choices(("one", "twins", "two"), (4, 3, 2))[0]
    configs = (config,)
    if kind == "twins":
        other = _config(draw, len(ranks))
        kept = ["min_bytes", "hierarchy"]
        kinds = [
            each.get("kind") for each in (config["quantizer"], *(p.get("quantizer", {}) for p in config["policies"]))
        ]
        # Sums of weights are without loss, too, where their role is compressed.
        if "lossless" in kinds or "parameter" in config["roles"]:
            kept.append("schedule")  # which is the order in which floats are added
        transport = other["transport"] | {key: config["transport"][key] for key in kept}
        configs = (config, config | {"entropy": other["entropy"], "transport": transport})
    elif kind == "two":
        configs = (config, _config(draw, len(ranks)))
    return Meeting(ranks, configs, kind == "twins", tuple(batches))


def _config(draw: random.Random, ranks: int) -> dict:
    kind = draw.choices(("error_bound", "stochastic", "lossless"), (5, 2, 2))[0]
    mode = draw.choice(("rms", "rms", "rel", "range", "abs"))
    least, most = {"rms": (-3, 0.5), "rel": (-6, -0.5), "range": (-6, -0.5), "abs": (-4, 2)}[mode]
    hierarchy = ["off", "auto"] + [size for size in range(2, ranks) if ranks % size == 0] * 2
    return {
        "quantizer": {
            "kind": kind,
            "mode": mode,
            "value": 10 ** draw.uniform(least, most),
            "block": draw.choice((256, 4096, 0, 3 * 256, 3 * 4096, 1 << 16)),
            "seed": draw.getrandbits(64),
            "error_feedback": draw.random() < 0.3,
        },
        "entropy": {
            "coder": draw.choice(("auto", "auto", "auto", "raw", "fixed", "huffman", "rans")),
            "predictor": draw.choice(("auto", "auto", "none", "delta")),
            "checksum": draw.random() < 0.3,
        },
        "transport": {
            "schedule": draw.choice(("ring", "direct", "halving", "auto")),
            "frame_bytes": draw.choice((1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)),
            "min_bytes": draw.choices((0, 4096, 1 << 17, "never"), (10, 4, 4, 1))[0],
            "hierarchy": draw.choice(hierarchy),
            "timeout_seconds": TIMEOUT_SECONDS,
        },
        "roles": draw.sample(ROLES, draw.randint(1, 3)) if draw.random() < 0.5 else ["gradient"],
        "policies": [_policy(draw) for _ in range(draw.choice((0, 0, 0, 1, 2, 3)))],
        "steps": {
            "warmup": draw.choice((0, 0, 0, 0, 1)),
            "bounds": draw.choice(([], [], [{"step": 1, "times": 0.5}, {"step": 3, "times": 0.9}])),
        },
        # Verifies and never raises the alarm.
        "guard": {"every": draw.choice((0, 0, 0, 1, 2)), "max_relative_error": 1e300},
    }


def _policy(draw: random.Random) -> dict:
    fits = {
        "name": lambda: draw.choice(("*.bias", ["*.bias", "*norm*"], "layers.[0-4]*")),
        "min_elements": lambda: int(USUAL ** draw.random()),
        "max_elements": lambda: int(USUAL ** draw.random()),
        "dtype": lambda: draw.choice(FLOATS),
        "role": lambda: draw.choice(ROLES),
    }
    policy = {key: fits[key]() for key in draw.sample(sorted(fits), draw.randint(1, 2))}
    if draw.random() < 0.3:
        return policy | {"action": "skip"}
    changes = {
        "value": 10 ** draw.uniform(-4, -0.5),
        "block": draw.choice((0, 256, 8192)),
        "kind": draw.choice(("error_bound", "stochastic", "lossless")),
        "error_feedback": draw.random() < 0.5,
    }
    return policy | {"quantizer": {key: changes[key] for key in draw.sample(sorted(changes), draw.randint(1, 3))}}
