"""Weights that ZeRO 1 and 2 gather, sent as changes: the bits of plain gathers after every step, in fewer bytes."""

import pytest

pytest.importorskip("deepspeed")

import torch
from on_rank import folder, rank, same_on_all_ranks, world_size
from scenarios import DEEPSPEED, ranks
from small_engine import KEY, configuration, engine_of, parameters_sha256, train

import ncz_plugins.deepspeed  # noqa: F401

pytestmark = pytest.mark.slow

STEPS = 7
CHANGED, SAVED = 3, 5  # the steps before which rank 0 changes weights, and a checkpoint is saved
MOVED = 2  # the step before which weights move to other memory


def case(stage: int, dtype: str = "bf16", *, zero: dict | None = None, **top_level) -> dict:
    """A DeepSpeed configuration whose weights are sent as changes, and whose gradients are compressed by default."""
    how = {
        "gradient_clipping": 1.0,
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {"stage": stage, **(zero or {})},
    }
    key = {"roles": ["gradient", "parameter"], "transport": {"min_bytes": 0}}
    return configuration(stage, key, **how | top_level)


NOTHING_PERSISTS = {"stage3_param_persistence_threshold": 0}  # else small parameters are kept
CASES = {
    **{f"{dtype} stage {stage}": case(stage, dtype) for stage in (1, 2) for dtype in ("fp32", "bf16")},
    "bf16 stage 2 overlapping": case(2, zero={"overlap_comm": True}),
    "bf16 stage 1 accumulating in fp32": case(1, data_types={"grad_accum_dtype": "fp32"}),
    "fp32 stage 3": case(3, "fp32", zero=NOTHING_PERSISTS),
    "bf16 stage 3": case(3, zero=NOTHING_PERSISTS | {"overlap_comm": True}),
    "bf16 stage 3 keeping small parameters": case(3),
}


@pytest.mark.parametrize("name", CASES)
@ranks(2, launcher="torch", **DEEPSPEED)
def test_weights_of_two_ranks_are_those_of_plain_gathers(group, name):
    weights_are_those_of_plain_gathers(name)


@pytest.mark.parametrize("name", ["bf16 stage 2", "bf16 stage 3"])
@ranks(3, launcher="torch", **DEEPSPEED)
def test_weights_of_three_ranks_are_those_of_plain_gathers(group, name):
    weights_are_those_of_plain_gathers(name)


def weights_are_those_of_plain_gathers(name: str) -> None:
    """Train with weights sent as changes, and with plain weights, side by side. Then go on from a checkpoint.

    Gradients are compressed alike, rounded by the same random numbers.
    """
    config = CASES[name]
    ours, plain = engine_of(config), engine_of(config | {KEY: config[KEY] | {"roles": ["gradient"]}})
    compression = ours.communication_compression
    found, gathered = [], []  # after each step: a hash of all weights, and the bytes that weights took so far
    for number in range(STEPS):
        if number == SAVED:
            ours.save_checkpoint(folder() / name)
        if number == MOVED:
            move(ours)
        found.append(weights_after_step(ours, number))
        # Weights are those of plain gathers after every step.
        assert weights_after_step(plain, number) == found[-1]
        gathered.append(compression.stats.total.wire_bytes_by_role["parameter"])
        if number == CHANGED - 1:  # in both runs, before their next gather
            change(ours)
            change(plain)
    assert len(set(found)) == STEPS
    same_on_all_ranks(found)

    # Only the first gather and the one after a change are whole.
    expected = [{}] * STEPS
    if sends_changes(name):
        expected[0], expected[CHANGED] = {"first call": 1}, {"changed in between": 1}
    assert [step.sent_whole for step in compression.stats.steps] == expected

    # Every step counts what it gathers. ZeRO 3 gathers the small parameters that it keeps after the step, and the
    # others before they are used.
    in_each_step = [after - before for before, after in zip([0, *gathered], gathered)]
    assert all(in_each_step)

    # A resumed run goes on with a whole gather and the same bits.
    ours.load_checkpoint(folder() / name)
    assert [weights_after_step(ours, number) for number in range(SAVED, STEPS)] == found[SAVED:]
    first, *later = [step.sent_whole for step in list(compression.stats.steps)[STEPS:]]
    assert bool(first) == sends_changes(name) and not any(later)

    # Fewer bytes travel than in plain gathers, and fewer than in the first one.
    total = compression.stats.total
    assert total.bypasses == {}
    assert in_each_step[1] < in_each_step[0] or not sends_changes(name)
    sent = total.wire_bytes_by_role["parameter"]
    assert sent < (0.8 if "bf16" in name else 1) * total.plain_bytes_by_role["parameter"]

    # The copy to compare with takes a rank's own part.
    copies = sum(each.nbytes for each in compression._baselines.values())
    weights = sum(p.numel() * p.element_size() for p in ours.module.parameters())
    assert copies <= (1.01 * weights / world_size if sends_changes(name) else 0)
    ours.destroy()
    plain.destroy()


def sends_changes(name: str) -> bool:
    """ZeRO 3 frees weights after use, so that there is nothing to compare with."""
    return "stage 3" not in name


def weights_after_step(engine, number: int) -> str:
    train(engine, range(number, number + 1))
    return parameters_sha256(engine)


def change(engine) -> None:
    """A weight that rank 1 updates, which every rank would get from it in the next gather."""
    if rank == 0 and engine.zero_optimization_stage() < 3:
        with torch.no_grad():
            list(engine.module.parameters())[-1].view(-1)[-1] += 1


def move(engine) -> None:
    """As between the phases of reinforcement learning."""
    # DeepSpeed's optimizer for bf16 can't do it, and that of ZeRO 3 only on GPUs.
    if engine.zero_optimization_stage() < 3 and hasattr(engine.optimizer, "offload_states"):
        engine.offload_states()
        engine.reload_states()
