"""DeepSpeed engines: several in a process, on some of the ranks only, and dropped. Four ranks run each test."""

import gc
import json
import os
import tempfile
import time
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("deepspeed")

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import groups
from on_rank import raises, rank, same_on_all_ranks, world_size
from scenarios import DEEPSPEED, ranks
from small_engine import configuration, engine_of, train

import ncz_plugins.deepspeed  # noqa: F401
from ncz_plugins import ConfigError, MismatchError, PeerError
from ncz_plugins.deepspeed.compression import configured

pytestmark = pytest.mark.slow
on_four_ranks = ranks(4, **DEEPSPEED)
HALVES = [0, 1], [2, 3]
ON = {"transport": {"min_bytes": 0}}
SOON = 20.0  # seconds for what must not wait for a time-out


class Grid:
    """An mpu of groups that each hold a copy of the model."""

    def __init__(self, *all_ranks: list[int]):
        made = {tuple(ranks): dist.new_group(ranks) for ranks in all_ranks}  # all ranks make all groups
        self.ranks = next((list(ranks) for ranks in made if rank in ranks), [])
        self._group = made.get(tuple(self.ranks))
        self._alone = [dist.new_group([each]) for each in range(world_size)][rank]

    def get_data_parallel_group(self):
        return self._group

    def get_data_parallel_world_size(self):
        return len(self.ranks)

    def get_data_parallel_rank(self):
        return self.ranks.index(rank)

    def get_model_parallel_group(self):
        return self._alone

    def get_model_parallel_world_size(self):
        return 1

    def get_model_parallel_rank(self):
        return 0


def engine(mpu: Grid | None, key, stage: int = 2, **top_level):
    """An engine whose configuration has the key with a value, or no key for None."""
    return engine_of(configuration(stage, key, **top_level), mpu)


def weights(trained) -> list[float]:
    with deepspeed.zero.GatheredParameters(list(trained.module.parameters())):
        return [parameter.double().sum().item() for parameter in trained.module.parameters()]


def same_within(mpu: Grid, value: object) -> None:
    everyone = [None] * len(mpu.ranks)
    dist.all_gather_object(everyone, value, mpu.get_data_parallel_group())
    assert all(each == everyone[0] for each in everyone), everyone


# ---------------------------------------------------------------- all ranks

# These come first: DeepSpeed keeps the first mpu that it sees for engines that come without.


@on_four_ranks
def test_several_engines_of_all_ranks_with_and_without_the_key(group):
    assert groups.mpu is None
    engines = [engine(None, key) for key in (ON, None, ON | {"quantizer": {"value": 0.2}})]
    for trained in engines:
        train(trained)
        same_on_all_ranks(weights(trained), group)
    assert [trained.communication_compression is not None for trained in engines] == [True, False, True]
    for trained in engines:
        trained.destroy()


@on_four_ranks
def test_an_engine_that_is_dropped_or_destroyed_frees_its_connections(group):
    def open_now() -> list[int]:
        gc.collect()
        return [len(os.listdir(f"/proc/self/{folder}")) for folder in ("fd", "task")]

    def used_by_one(stage: int, destroyed: bool) -> list[int]:
        trained = engine(None, ON, stage)
        train(trained)
        used = open_now()
        if destroyed:
            trained.destroy()
        return used

    for stage in range(4):
        train(engine(None, None, stage))  # what DeepSpeed and torch make once
    dist.barrier(group)
    before = open_now()
    for stage in range(4):
        for destroyed in (True, False) if stage == 0 else (True,):  # DeepSpeed keeps one with ZeRO that is only dropped
            used = used_by_one(stage, destroyed)
            assert used > before, (used, before)
            deadline = time.monotonic() + SOON  # threads take a moment to end
            while (left := open_now()) > before and time.monotonic() < deadline:
                time.sleep(0.01)
            assert left <= before, (stage, destroyed, before, used, left)


# ---------------------------------------------------------------- some of the ranks


@on_four_ranks
def test_an_engine_of_some_ranks_needs_nobody_else(group):
    mpu = Grid(*HALVES)
    for half in HALVES:  # one after the other
        for key, stage in ((None, 2), (ON, 2), (None, 0), (ON, 0), (ON, 1)):
            if rank in half:
                live(mpu, key, stage)
        dist.barrier(group)


@on_four_ranks
def test_disjoint_engines_may_differ_in_the_key_and_in_its_value(group):
    mpu, other = Grid(*HALVES), ON | {"quantizer": {"value": 0.2}}
    for of_each in ([None, ON], [ON, None], [ON, other]):
        live(mpu, of_each[rank // 2], 3)  # for ZeRO 3 DeepSpeed itself needs all ranks at once
        live(mpu, of_each[rank // 2], 2)


def live(mpu: Grid, key, stage: int) -> None:
    trained = engine(mpu, key, stage)
    train(trained)
    same_within(mpu, weights(trained))
    compression = trained.communication_compression
    assert (compression is not None) == (key is not None)
    assert compression is None or compression.stats.total.compressed_calls > 0
    trained.destroy()


@on_four_ranks
def test_a_refused_key_of_one_rank_ends_the_ranks_of_its_engine_only(group):
    mpu = Grid(*HALVES)
    if rank == 2:
        raises(MismatchError, partial(engine, mpu, ON), "valeu", "on rank 3")
    elif rank == 3:
        raises(ConfigError, partial(engine, mpu, {"quantizer": {"valeu": 0.1}}), "did you mean quantizer.value")
    else:
        train(engine(mpu, ON))


@on_four_ranks
def test_the_first_rank_of_an_engine_says_what_is_active_and_writes_its_statistics(group):
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, group=group)
    log = Path(*folder) / "of the second half.jsonl"
    said, mpu = StringIO(), Grid(*HALVES)
    if rank in HALVES[1]:
        with redirect_stdout(said):
            train(engine(mpu, ON | {"statistics": {"jsonl": str(log), "report_every": 1}}))
    dist.barrier(group)
    lines = [line for line in said.getvalue().splitlines() if line.startswith("ncz_plugins")]
    assert [("(ZeRO 2, 2 of 4 ranks)" in line) for line in lines[:1]] == ([True] if rank == 2 else []), lines
    assert sum(": step " in line for line in lines) == (2 if rank == 2 else 0), lines
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert [each["step"] for each in steps if "step" in each] == [1, 2], steps


@on_four_ranks
def test_checkpoints_are_compared_among_the_ranks_of_an_engine(group):
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, group=group)
    folder = Path(*folder) / str(rank // 2)
    mpu = Grid(*HALVES)
    feedback = ON | {"quantizer": {"error_feedback": True}}
    for of_each in ([feedback, None], [feedback, feedback]):  # engines of which one compresses, and of different steps
        key, steps = of_each[rank // 2], 3 - rank // 2
        trained = engine(mpu, key)
        train(trained, range(steps))
        trained.save_checkpoint(folder, tag="t")
        resumed = engine(mpu, key)
        resumed.load_checkpoint(folder, tag="t")
        if key is not None:
            before, after = (each.communication_compression.training for each in (trained, resumed))
            assert before.step == after.step == steps and before.residuals.by_name
            for name, kept in before.residuals.by_name.items():
                assert torch.equal(kept, after.residuals.by_name[name])
        dist.barrier(group)


# ---------------------------------------------------------------- a key on some ranks of an engine


@on_four_ranks
def test_a_rank_that_makes_no_engine_is_named_within_the_time_out(group):
    for comes, late in ((1, 2), (3, 0)):  # the first rank of an engine, and another
        mpu = Grid(sorted((comes, late)))
        if rank == comes:
            key = {"transport": {"timeout_seconds": 0.5}}
            said = f"rank {late} did not say within 0.5 s", "Every rank of this DeepSpeed engine needs"
            raises(PeerError, partial(engine, mpu, key), *said)


@on_four_ranks
def test_a_key_on_some_ranks_only_is_an_error_there_at_once_and_holds_up_no_other(group):
    mpu = Grid(*HALVES)
    started = time.monotonic()
    if rank in (1, 2):  # the second of its engine, and the first
        words = f'"on" on rank {rank}', f'"off" on rank {rank ^ 1}', "Every rank of this DeepSpeed engine needs"
        raises(MismatchError, partial(engine, mpu, ON), *words)
    else:
        without_key = SimpleNamespace(_param_dict={})
        assert configured(without_key, mpu) is None  # all of ours before DeepSpeed's own collectives, which would wait
    assert time.monotonic() - started < SOON


@on_four_ranks
def test_an_engine_without_the_key_does_not_mind_what_of_ours_fails(group):
    assert configured(SimpleNamespace(_param_dict={}), object()) is None
