"""One data-parallel training in plain torch, its gradients reduced by torch.distributed or by a Communicator."""

from __future__ import annotations

import hashlib
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from optimizers import optimizers, rate
from tasks import TASKS
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

from ncz_plugins import Communicator, Config
from ncz_plugins.core.config import PRESETS
from ncz_plugins.core.training.policy import ParameterSlice

LAST = 0.2  # of the steps: the training loss is the mean over these, at the end
PROBE_EVERY = 25  # steps between looks at how far a reduced gradient is from the exact one
CURVE = 100  # points of a loss curve, each the mean over as many steps
# A slow link, so that frames are coded as small as they can be. The loss does not depend on it.
TRANSPORT = {"min_bytes": 0, "link_gbps": 0.1}


class Setting(NamedTuple):
    """How gradients are averaged.

    Attributes:
        kind: "plain" is torch.distributed's own all_reduce, and "bf16" is that of gradients in bfloat16; "nearest",
            "error feedback" and "stochastic" are ours, and so are "bits" and "stochastic bits", at a fixed rate, and
            "rotated", which is the preset ncclz:muon-ddp.
        bound: times the root mean square of a block, or at a fixed rate bits for each value; 0 where nothing is
            quantized. That of the layers' matrices where they are rotated.
        block: elements that share a scale.
    """

    kind: str
    bound: float = 0.0
    block: int = 0

    @classmethod
    def of(cls, config: Config) -> Setting:
        """That of a preset."""
        [quantizer] = [each.quantizer.applied_to(config.quantizer) for each in config.policies] or [config.quantizer]
        nearest = "rotated" if quantizer.rotates else "error feedback" if quantizer.error_feedback else "nearest"
        kind = "stochastic" if quantizer.kind_in_effect == "stochastic" else nearest
        return cls(kind, quantizer.value, quantizer.block_in_effect)

    @property
    def config(self) -> dict[str, Any]:
        """A configuration, without its transport."""
        if self.kind == "rotated":
            return PRESETS["muon-ddp"]
        kind = "stochastic" if self.kind.startswith("stochastic") else "error_bound"
        if self.is_fixed_rate:
            return {"quantizer": {"kind": kind, "mode": "bits", "value": self.bound}}
        quantizer = {"kind": kind, "mode": "rms", "value": self.bound, "block": self.block}
        return {"quantizer": quantizer | {"error_feedback": self.kind == "error feedback"}}

    @property
    def is_fixed_rate(self) -> bool:
        """Whether each value takes the same number of bits."""
        return self.kind.endswith("bits")


class Job(NamedTuple):
    """One training.

    Attributes:
        task: a key of TASKS.
        optimizer: "AdamW", "SGD" or "Muon".
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
    parameters = dict(model.named_parameters())
    weights = {name: nn.Parameter(p.detach().float()) for name, p in parameters.items()}
    used = optimizers(job.optimizer, weights, task.sgd_rate)
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: rate(step, job.steps)) for each in used]
    average = Average(job, [ParameterSlice(name, p.numel(), shape=tuple(p.shape)) for name, p in parameters.items()])
    losses, errors = [], []
    for step in range(job.steps):
        loss = task.loss(model, task.training_batch(job.seed, step, rank, job.ranks))
        model.zero_grad()
        loss.backward()
        gradient = parameters_to_vector([p.grad for p in parameters.values()])
        exact = plain_average(gradient.float()) if step % PROBE_EVERY == 0 else None
        average(gradient)
        gradient = gradient.float()
        if exact is not None:
            errors.append(((gradient - exact).norm() / exact.norm()).item())
        for weight, own in zip(weights.values(), gradient.split([p.numel() for p in weights.values()])):
            weight.grad = own.view_as(weight)
        if task.clip:
            clip_grad_norm_(weights.values(), task.clip)
        for each in (*used, *schedules):
            each.step()
        with torch.no_grad():
            for parameter, weight in zip(parameters.values(), weights.values()):
                parameter.copy_(weight)
        losses.append(loss.detach().float())
    of_steps = plain_average(torch.stack(losses))
    found = {
        "training_loss": of_steps[-max(1, round(LAST * job.steps)) :].mean().item(),
        "gradient_error": fmean(errors),
        "replicas_identical": identical(parameters_to_vector(weights.values())),
        "parameters": sum(p.numel() for p in weights.values()),
        **average.close(),
    }
    if job.steps >= 10 * CURVE:
        found["curve"] = [part.mean().item() for part in of_steps.tensor_split(CURVE)]
    for key, value in task.evaluate(model.eval(), rank, job.ranks).items():
        found[key] = plain_average(torch.tensor(value)).item() * job.ranks
    return found


class Average:
    """Averages gradients over ranks, in place, as a job asks for. Making one is a collective."""

    def __init__(self, job: Job, parts: list[ParameterSlice]):
        self.parts = parts
        self.communicator = None
        self.narrow = job.setting.kind == "bf16"
        if job.setting.bound:
            config = job.setting.config
            quantizer = config["quantizer"] | {"seed": job.seed}
            self.communicator = Communicator(config | {"quantizer": quantizer, "transport": TRANSPORT})

    def __call__(self, gradient: Tensor) -> None:
        if self.communicator is None:
            gradient.copy_(plain_average(gradient.bfloat16() if self.narrow else gradient))
        else:
            self.communicator.all_reduce(gradient, dist.ReduceOp.AVG, role="gradient", parts=self.parts)
            self.communicator.end_step()

    def close(self) -> dict[str, Any]:
        """What was sent: ratio 1 where torch.distributed did it, or 2 in bfloat16."""
        if self.communicator is None:
            return {"ratio": 2.0 if self.narrow else 1.0, "calls": 0, "compressed_calls": 0}
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
