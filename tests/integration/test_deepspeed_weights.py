"""Weights that ZeRO 1 and 2 gather, sent as changes: the bits of plain gathers after every step, in fewer bytes."""

import json

import pytest
from launch import WORKERS, deepspeed_ranks, launch

pytestmark = pytest.mark.slow

STEPS, CHANGED, SAVED = 7, 3, 5  # as in _workers/weights.py


def case(stage: int, dtype: str = "bf16", *, zero: dict | None = None, **top_level) -> dict:
    """A DeepSpeed configuration whose weights are sent as changes, and whose gradients are compressed by default."""
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {"stage": stage, **(zero or {})},
        "communication_compression": {
            "roles": ["gradient", "parameter"],
            "transport": {"min_bytes": 0},
        },
        **top_level,
    }


NOTHING_PERSISTS = {"stage3_param_persistence_threshold": 0}  # else small parameters are kept
CASES = {
    **{f"{dtype} stage {stage}": case(stage, dtype) for stage in (1, 2) for dtype in ("fp32", "bf16")},
    "bf16 stage 2 overlapping": case(2, zero={"overlap_comm": True}),
    "bf16 stage 1 accumulating in fp32": case(1, data_types={"grad_accum_dtype": "fp32"}),
    "fp32 stage 3": case(3, "fp32", zero=NOTHING_PERSISTS),
    "bf16 stage 3": case(3, zero=NOTHING_PERSISTS | {"overlap_comm": True}),
    "bf16 stage 3 keeping small parameters": case(3),
}
THREE_RANKS = ["bf16 stage 2", "bf16 stage 3"]


def run(folder, names, ranks: int) -> list[dict]:
    cases = folder / "cases.json"
    cases.write_text(json.dumps({name: CASES[name] for name in names}))
    outcome = launch(deepspeed_ranks(WORKERS / "weights.py", cases, folder, ranks=ranks), folder, timeout=200)
    assert len(outcome.ranks) == ranks, outcome.output
    return outcome.ranks


@pytest.fixture(
    params=[*((name, 2) for name in CASES), *((name, 3) for name in THREE_RANKS)],
    ids=lambda param: f"{param[0]}-{param[1]}ranks",
)
def found(request):
    """What every rank found."""
    name, ranks = request.param
    results = request.getfixturevalue("two_ranks" if ranks == 2 else "three_ranks")
    return name, [rank[name] for rank in results]


def sends_changes(name: str) -> bool:
    """ZeRO 3 frees weights after use, so that there is nothing to compare with."""
    return "stage 3" not in name


def test_weights_are_those_of_plain_gathers_after_every_step(found):
    _, ranks = found
    for rank in ranks:
        assert rank["ours"] == rank["plain"] and len(set(rank["ours"])) == STEPS
    assert all(rank["ours"] == ranks[0]["ours"] for rank in ranks)


def test_only_the_first_gather_and_the_one_after_a_change_are_whole(found):
    name, ranks = found
    expected = [{}] * STEPS
    if sends_changes(name):
        expected[0], expected[CHANGED] = {"first call": 1}, {"changed in between": 1}
    for rank in ranks:
        assert rank["sent whole"] == expected


def test_a_resumed_run_goes_on_with_a_whole_gather_and_the_same_bits(found):
    name, ranks = found
    for rank in ranks:
        assert rank["resumed"] == rank["ours"][SAVED:]
        first, *later = rank["sent whole after loading"]
        assert bool(first) == sends_changes(name) and not any(later)


def test_fewer_bytes_travel(found):
    name, ranks = found
    for rank in ranks:
        assert rank["gathered"][1] < rank["gathered"][0] or not sends_changes(name)
        assert rank["stats"]["bypasses"] == {}
        plain, sent = (rank["stats"][f"{kind}_bytes_by_role"]["parameter"] for kind in ("plain", "wire"))
        assert sent < (0.8 if "bf16" in name else 1) * plain


def test_every_step_counts_what_it_gathers(found):
    """ZeRO 3 gathers the small parameters that it keeps after the step, and the others before they are used."""
    _, ranks = found
    for rank in ranks:
        assert all(rank["gathered"])


def test_the_copy_takes_a_ranks_own_part(found):
    name, ranks = found
    for rank in ranks:
        assert rank["copies"] <= (1.01 * rank["weights"] / len(ranks) if sends_changes(name) else 0)
