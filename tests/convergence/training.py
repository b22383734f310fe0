"""One data-parallel training in plain torch, its gradients reduced by torch.distributed or by a Communicator."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tasks import TASKS
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

from ncz_plugins import Communicator
from ncz_plugins.core.training.policy import ParameterSlice

LAST_STEPS = 20  # the training loss is the mean over this many steps at the end
WARM_UP = 20  # steps over which the learning rate rises
PROBE_EVERY = 25  # steps between looks at how far a reduced gradient is from the exact one

OPTIMIZERS: dict[str, Callable[[list[Tensor], float], torch.optim.Optimizer]] = {
    "AdamW": lambda weights, _: torch.optim.AdamW(weights, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1),
    "SGD": lambda weights, rate: torch.optim.SGD(weights, lr=rate, momentum=0.9),
}


class Setting(NamedTuple):
    """How gradients are averaged.

    Attributes:
        kind: "plain" is torch.distributed's own all_reduce; "nearest", "error feedback" and "stochastic" are ours.
        bound: times the root mean square of a block; 0 for plain.
    """

    kind: str
    bound: float = 0.0

    @property
    def quantizer(self) -> dict[str, Any]:
        """Settings of `quantizer`."""
        kind = "stochastic" if self.kind == "stochastic" else "error_bound"
        return {"kind": kind, "value": self.bound, "error_feedback": self.kind == "error feedback"}


class Job(NamedTuple):
    """One training.

    Attributes:
        task: a key of TASKS.
        optimizer: a key of OPTIMIZERS.
        seed: of the first weights, of the batches, and of random rounding.
    """

    task: str
    optimizer: str
    setting: Setting
    seed: int
    steps: int
    ranks: int = 2

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return self._asdict() | {"setting": self.setting._asdict()}

    @classmethod
    def read(cls, values: dict[str, Any]) -> Job:
        """What `to_dict` gave."""
        return cls(**values | {"setting": Setting(**values["setting"])})


def train(job: Job) -> dict[str, Any]:
    """Train on every rank of the default process group, and measure. All ranks return the same.

    The optimizer holds float32 weights; where the task says bfloat16, model and gradients are bfloat16 copies, reduced
    as such: what DeepSpeed's bf16 does. All gradients of a step are one tensor, as in a bucket of DeepSpeed.
    """
    task, rank = TASKS[job.task](), dist.get_rank()
    torch.manual_seed(job.seed)
    model = task.model().to(task.dtype)
    names, parameters = zip(*model.named_parameters())
    weights = nn.Parameter(parameters_to_vector(parameters).detach().float())
    optimizer = OPTIMIZERS[job.optimizer]([weights], task.sgd_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    average = Average(job, [ParameterSlice(name, p.numel()) for name, p in zip(names, parameters)])
    losses, errors = [], []
    for step in range(job.steps):
        loss = task.loss(model, task.training_batch(job.seed, step, rank, job.ranks))
        model.zero_grad()
        loss.backward()
        gradient = parameters_to_vector([p.grad for p in parameters])
        exact = plain_average(gradient.float()) if step % PROBE_EVERY == 0 else None
        average(gradient)
        weights.grad = gradient.float()
        if exact is not None:
            errors.append(((weights.grad - exact).norm() / exact.norm()).item())
        if task.clip:
            clip_grad_norm_([weights], task.clip)
        optimizer.step()
        schedule.step()
        vector_to_parameters(weights.detach().to(task.dtype), parameters)
        losses.append(loss.detach().float())
    found = {
        "training_loss": plain_average(torch.stack(losses[-LAST_STEPS:]).mean()).item(),
        "gradient_error": fmean(errors),
        "replicas_identical": identical(weights),
        "parameters": weights.numel(),
        **average.close(),
    }
    for key, value in task.evaluate(model.eval(), rank, job.ranks).items():
        found[key] = plain_average(torch.tensor(value)).item() * job.ranks
    return found


class Average:
    """Averages gradients over ranks, in place, as a job asks for. Making one is a collective."""

    def __init__(self, job: Job, parts: list[ParameterSlice]):
        self.parts = parts
        self.communicator = None
        if job.setting.kind != "plain":
            quantizer = job.setting.quantizer | {"seed": job.seed}
            self.communicator = Communicator({"quantizer": quantizer, "transport": {"min_bytes": 0}})

    def __call__(self, gradient: Tensor) -> None:
        if self.communicator is None:
            gradient.copy_(plain_average(gradient))
        else:
            self.communicator.all_reduce(gradient, dist.ReduceOp.AVG, role="gradient", parts=self.parts)
            self.communicator.end_step()

    def close(self) -> dict[str, Any]:
        """What was sent: ratio 1 where torch.distributed did it."""
        if self.communicator is None:
            return {"ratio": 1.0, "calls": 0, "compressed_calls": 0}
        total = self.communicator.stats.total
        self.communicator.close()
        return {"ratio": total.ratio, "calls": total.calls, "compressed_calls": total.compressed_calls}


def plain_average(tensor: Tensor) -> Tensor:
    """The mean over ranks, by torch.distributed, as a tensor of its own."""
    total = tensor.clone()
    dist.all_reduce(total)  # gloo has no AVG
    return total / dist.get_world_size()


def identical(weights: Tensor) -> bool:
    """Whether all ranks hold the same bits."""
    hashes: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(hashes, hashlib.sha256(weights.detach().numpy()).hexdigest())
    return len(set(hashes)) == 1
