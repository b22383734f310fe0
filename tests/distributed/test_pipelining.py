"""Stages of torch.distributed.pipelining, whose messages the backend `ncz` compresses if `roles` lists activations."""

import os

import pytest
import torch
import torch.distributed as dist
from on_rank import PATIENCE, attempt, digest, folder, leave_alone, rank, start, world_size
from scenarios import ranks, report, run_ranks
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from ncz_plugins.torch import backend

on_two_ranks, on_four_ranks = (ranks(number, start="join") for number in (2, 4))

STEPS, MICRO_BATCHES, ROWS, WIDTH = 3, 4, 128, 48
MESSAGE_BYTES = ROWS * WIDTH * 4
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B, "interleaved 1F1B": ScheduleInterleaved1F1B}
LOSSLESS = "quantizer: {kind: lossless}\n"


def join() -> None:
    os.environ["NCZ_CONFIG"] = str(folder() / f"rank{rank}.yaml")
    start("gloo")


def stages_by(kind: str, settings: str = "", replicas: int = 1) -> dist.ProcessGroup:
    """The group of this rank's pipeline: all ranks, or one of several pipelines side by side.

    Args:
        kind: its backend. Under ncz messages of any size are compressed.
        settings: of ncz.
    """
    with open(os.environ["NCZ_CONFIG"], "w") as file:
        file.write(settings + "transport: {min_bytes: 0}\n")
    pipelines = [list(range(first, world_size, replicas)) for first in range(replicas)]
    return dist.new_subgroups_by_enumeration(pipelines, PATIENCE, backend=kind, group_desc="pp")[0]


def schedule_of(group: dist.ProcessGroup, name: str, stages_per_rank: int):
    """A schedule, and the modules of this rank's stages. They have the same first weights in every call."""
    modules, stages, count = [], [], group.size() * stages_per_rank
    for number in range(group.rank(), count, group.size()):
        torch.manual_seed(number)
        modules.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        stages.append(PipelineStage(modules[-1], number, count, torch.device("cpu"), group=group))
    its_stages = stages if stages_per_rank > 1 else stages[0]
    return SCHEDULES[name](its_stages, MICRO_BATCHES, loss_fn=nn.functional.mse_loss), modules


def run(schedule, group: dist.ProcessGroup, random: torch.Generator) -> list[float]:
    """Forward and backward pass of a step. Returns the losses on the last rank, and nothing on others."""
    inputs, targets = torch.randn(2, MICRO_BATCHES * ROWS, WIDTH, generator=random)
    losses = []
    if group.rank() == group.size() - 1:
        schedule.step(target=targets, losses=losses)
    else:
        schedule.step(*([inputs] if group.rank() == 0 else []))
    return [loss.item() for loss in losses]


def trained(group: dist.ProcessGroup, name: str, stages_per_rank: int = 1) -> tuple[list, list]:
    """The losses of some steps, and digests of this rank's gradients."""
    schedule, modules = schedule_of(group, name, stages_per_rank)
    parameters = [each for module in modules for each in module.parameters()]
    random, losses, gradients = torch.Generator().manual_seed(rank % (world_size // group.size())), [], []
    for _ in range(STEPS):
        losses += run(schedule, group, random)
        gradients.append(digest(torch.cat([each.grad.flatten() for each in parameters])))
        for each in parameters:
            each.data -= 0.05 * each.grad
            each.grad = None
    return losses, gradients


def messages_are_compressed_where_roles_say_so(name: str, stages_per_rank: int = 1, replicas: int = 1) -> None:
    expected, gradients = trained(stages_by("gloo", replicas=replicas), name, stages_per_rank)
    ours = stages_by("ncz", "roles: [activation]\n", replicas)
    losses, changed = trained(ours, name, stages_per_rank)
    is_first, is_last = ours.rank() == 0, ours.rank() == ours.size() - 1
    assert losses == pytest.approx(expected, rel=0.02) and changed != gradients
    assert len(losses) == is_last * STEPS * MICRO_BATCHES and (losses != expected or not is_last)

    # Activations go to the next stage and their gradients to the one before. What stages say of themselves goes plain.
    total, plain = backend.of_group(ours).stats.total, {"dtype", "reduce op"}
    messages = (2 * stages_per_rank - is_first - is_last) * STEPS * MICRO_BATCHES
    assert total.plain_bytes_by_role == {"activation": messages * MESSAGE_BYTES}
    assert 0 < total.wire_bytes_by_role["activation"] < total.plain_bytes_by_role["activation"] / 4
    assert total.compressed_calls == 2 * messages and total.bypasses.keys() <= plain, total

    # Without loss every bit is that of the plain run, with the role and without it.
    for roles in ("[activation]", "[gradient]"):
        exact = stages_by("ncz", f"roles: {roles}\n{LOSSLESS}", replicas)
        assert trained(exact, name, stages_per_rank) == (expected, gradients)
        total = backend.of_group(exact).stats.total
        assert total.compressed_calls == (2 * messages if "activation" in roles else 0), total
        assert ("role not enabled" in total.bypasses) == (roles == "[gradient]")


@on_two_ranks
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_two_stages_send_compressed(group, name):
    messages_are_compressed_where_roles_say_so(name)


@on_two_ranks
def test_stages_that_take_turns_on_a_rank_send_compressed(group):
    messages_are_compressed_where_roles_say_so("interleaved 1F1B", stages_per_rank=2)


@on_four_ranks
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_four_stages_send_compressed(group, name):
    messages_are_compressed_where_roles_say_so(name)


@on_four_ranks
def test_two_pipelines_of_two_stages_send_compressed(group):
    messages_are_compressed_where_roles_say_so("1F1B", replicas=2)


def lose_a_stage() -> None:
    """The stage in the middle dies after a step."""
    join()
    group = stages_by("ncz", "roles: [activation]\n")
    (schedule, _), random = schedule_of(group, "1F1B", 1), torch.Generator().manual_seed(0)
    run(schedule, group, random)
    dist.barrier()
    if rank == 1:
        os._exit(7)
    leave_alone(attempt(lambda: run(schedule, group, random)))


def test_a_dead_stage_is_an_error(tmp_path):
    finished = run_ranks(3, lose_a_stage, tmp_path)
    assert finished[1].returncode == 7, report(finished)
    for each in (finished[0].result, finished[2].result):
        assert each["error"] == "PeerError" and "rank 1" in each["message"], report(finished)
        assert each["seconds"] < PATIENCE.total_seconds() / 2, each
