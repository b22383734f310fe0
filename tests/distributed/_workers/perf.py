"""What `ncz perf` measures, on every rank: all collectives, the exact answers, and ranks with different jobs."""

import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from common import finish, leave, start

from ncz_plugins.cli.perf import COLLECTIVES, Job, data, rank, verify
from ncz_plugins.cli.perf.contenders import CONTENDERS
from ncz_plugins.cli.perf.measure import Measurement
from ncz_plugins.core.config import Config, QuantizerConfig
from ncz_plugins.core.errors import NczError

SIZES = [1000, 300_000]
JOB = Job("all_reduce", SIZES, ["plain", "ncz", "fp16"], "noise", Config().model_dump(mode="json"), 2, False, 60.0)


def weights() -> list[dict]:
    """The records of two versions of weights that take turns."""
    received = []
    config = Config(roles=("parameter",), quantizer={"kind": "lossless"}).model_dump(mode="json")
    job = replace(JOB, collective="all_gather", peers=["plain", "ncz"], data="weights", config=config, sizes=[1 << 20])
    versions = [data.weights(data.train(steps)) for steps in (0, 1)]
    Measurement(job, versions, received.append).run()
    return [each["result"] for each in received if "result" in each]


def measured() -> dict:
    own, world_size = start()
    found = {"records": {}, "exact": {}, "answers": {}}
    for collective in COLLECTIVES:
        received = []
        Measurement(replace(JOB, collective=collective), [data.noise], received.append).run()
        found["records"][collective] = [each["result"] for each in received if "result" in each]
        found["exact"][collective] = exact(collective, own, world_size)
    found["weights"] = weights()
    found["wrong"] = error_of_a_wrong_result()
    finish(found)


def exact(collective: str, own: int, world_size: int) -> list[bool]:
    """Whether values and bounds are what they should be, by an arithmetic of its own."""
    part, block = 10_000, 4096
    held = [data.values(data.noise, each, part * world_size).double() for each in range(world_size)]
    if collective == "all_gather":
        held = [x[:part] for x in held]
    values = {
        "all_reduce": sum(held),
        "reduce_scatter": sum(held)[own * part : (own + 1) * part],
        "all_gather": torch.cat(held),
        "broadcast": held[0],
    }[collective]

    def bounds(x, pieces) -> torch.Tensor:
        return torch.stack([b.square().mean().sqrt() for piece in x.chunk(pieces) for b in piece.split(block)]) / 8

    if collective == "all_reduce":
        allowed = torch.stack([bounds(x, 1) for x in held]).amax(0) * world_size
    elif collective == "reduce_scatter":
        allowed = torch.stack([bounds(x, world_size) for x in held]).amax(0).chunk(world_size)[own] * world_size
    else:
        allowed = bounds(values, world_size if collective == "all_gather" else 1)
    answer = verify.exact(collective, held[own].float(), QuantizerConfig(mode="rms", value=0.125, block=block))
    return [torch.allclose(answer.values, values), torch.allclose(torch.from_numpy(answer.allowed), allowed)]


def error_of_a_wrong_result() -> str:
    """What is raised where a peer returns something else than the sum, on one rank only."""

    class Wrong(type(CONTENDERS["ncz"].open(context()))):
        def run(self):
            return super().run() + (100.0 if dist.get_rank() == 1 else 0.0)

    CONTENDERS["ncz"] = replace(CONTENDERS["ncz"], start=Wrong)
    try:
        Measurement(JOB, [data.noise], lambda record: None).run()
    except NczError as error:
        return str(error)
    return "nothing"


def context():
    from ncz_plugins.cli.perf.contenders import Context

    return Context(Config(), None, dist.get_world_size(), dist.get_rank(), "all_reduce")


def different() -> None:
    """Rank 1 was told another number of rounds."""
    import os

    try:
        rank.take_part(replace(JOB, repeat=3 if os.environ["RANK"] == "1" else 2), print)
    except NczError as error:
        leave(f"{type(error).__name__}: {error}")


{"measured": measured, "different": different}[sys.argv[1]]()
