"""One training of the suite under DDP, a process for each rank:

    torchrun --nproc-per-node 2 benchmarks/convergence/under_ddp.py CONFIG [--task GPT] [--optimizer Muon] [--seed 0]

CONFIG is "plain", a preset, a file, JSON, or a hook of torch: "fp16", or "powersgd-4" for rank 4, which begins after a
tenth of the steps. Muon trains the layers' matrices. Rank 0 prints the loss, the mean of the last fifth of the steps,
the ratio of fp32's bytes to what was sent, by the statistics of ours, and the bytes that each rank sent for the last
step's gradients through the loopback, which nothing else may use: in a network namespace,

    unshare --net sh -c "ip link set lo up && torchrun ..."

All calls are compressed, for a slow link, so that frames are coded as small as they can be.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext

import torch
import torch.distributed as dist
from optimizers import optimizers, rate
from tasks import TASKS
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from training import LAST, TRANSPORT, identical, plain_average

from ncz_plugins import Config
from ncz_plugins.torch import ddp

from network import SentBytes  # isort: skip  # of examples/, which `tasks` puts on the path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--task", choices=TASKS, default="GPT")
    parser.add_argument("--optimizer", default="Muon", help="as in optimizers.py (default: Muon)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = train(options)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.barrier()  # gloo sometimes aborts if a peer's connection goes while it ends
    dist.destroy_process_group()


def train(options: argparse.Namespace) -> dict[str, float | bool]:
    """Train on every rank, and measure."""
    task, rank, ranks = TASKS[options.task](), dist.get_rank(), dist.get_world_size()
    torch.manual_seed(options.seed)
    model = task.model().to(task.dtype)
    used = optimizers(options.optimizer, dict(model.named_parameters()), task.sgd_rate)
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: rate(step, options.steps)) for each in used]
    # Collectives that PowerSGD starts in callbacks come in another order on each rank if there are several buckets.
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1024 if "powersgd" in options.config else None)
    compression = compressed(wrapped, options.config, options.steps)
    losses, last = [], SentBytes(dist.barrier)
    for step in range(options.steps):
        wrapped.zero_grad()
        loss = task.loss(wrapped, task.training_batch(options.seed, step, rank, ranks))
        with last if step == options.steps - 1 else nullcontext():
            loss.backward()
        if task.clip:
            clip_grad_norm_(model.parameters(), task.clip)
        for each in (*used, *schedules):
            each.step()
        losses.append(loss.detach().float())
    of_steps = plain_average(torch.stack(losses))
    found = {
        "training_loss": of_steps[-max(1, round(LAST * options.steps)) :].mean().item(),
        "replicas_identical": identical(parameters_to_vector(model.parameters())),
        "ratio": 1.0 if compression is None else compression.training.stats.total.ratio,
        "bytes_of_last_step": last.total // ranks,
    }
    for key, value in task.evaluate(model.eval(), rank, ranks).items():
        found[key] = plain_average(torch.tensor(value)).item() * ranks
    return found


def compressed(model: DistributedDataParallel, config: str, steps: int) -> ddp.Compression | None:
    """Have gradients averaged as `config` says. Returns what compresses, if that is ours."""
    if config == "fp16":
        model.register_comm_hook(None, fp16)
    elif config.startswith("powersgd"):
        rank = int(config.partition("-")[2])
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=steps // 10)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif config != "plain":
        given = Config.load(json.loads(config) if config.startswith("{") else config)
        return ddp.compress(model, given.with_transport(**TRANSPORT))
    return None


def fp16(state, bucket):
    """torch's own hook, which DDP refuses by its name where there is no NCCL."""
    return default_hooks.fp16_compress_hook(state, bucket)


if __name__ == "__main__":
    main()
