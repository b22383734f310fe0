"""Train the small GPT on the standard library's source with DeepSpeed.

    cd examples
    DS_ACCELERATOR=cpu deepspeed --num_gpus 2 train_deepspeed.py --deepspeed_config deepspeed_ncclz.json

What happens to the gradients is decided by "communication_compression" in the JSON file, and by nothing in here.
"""

import deepspeed
import torch
import torch.distributed as dist
from data import Corpus
from network import SLOW_MBITS, limit_connections
from reporting import Report, argument_parser, digest, new_model

import ncz_plugins.deepspeed  # noqa: F401  the one line that makes "communication_compression" work


def parse_arguments():
    parser = argument_parser(__doc__)
    words = f"the last N steps at {SLOW_MBITS} Mbit/s, between two ranks of one machine (default: 0)"
    parser.add_argument("--slow-steps", metavar="N", type=int, default=0, help=words)
    parser.add_argument("--local_rank", type=int, default=-1, help="filled in by the launcher")
    return deepspeed.add_config_arguments(parser).parse_args()


def mean_over_ranks(value: torch.Tensor) -> float:
    value = value.detach().float().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def digests_of(engine) -> list[torch.Tensor]:
    """One digest of all parameters per rank."""
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):  # ZeRO 3 keeps only a part on each rank
        mine = digest(parameters).to(engine.device)
    digests = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, mine)
    return digests


def train(engine, corpus: Corpus, arguments, report: Report):
    batch, rank = engine.train_micro_batch_size_per_gpu(), dist.get_rank()
    accumulation = engine.gradient_accumulation_steps()
    context = engine.module.config.context
    engine.train()
    for step in range(arguments.steps):
        if step >= arguments.steps - arguments.slow_steps:
            limit_connections(SLOW_MBITS)
        report.start_step()
        loss_sum = 0.0
        for micro_step in range(step * accumulation, (step + 1) * accumulation):
            tokens, targets = corpus.batch(batch, context, seed=arguments.seed, step=micro_step, rank=rank)
            loss = engine(tokens.to(engine.device), targets.to(engine.device))
            with report.gradient_traffic:  # ZeRO 0, 1 and 2 reduce gradients inside backward unless overlap_comm is on
                engine.backward(loss)
            engine.step()
            loss_sum = loss_sum + loss.detach()
        report.end_step(step, loss_sum / accumulation)


def main():
    arguments = parse_arguments()
    if deepspeed.get_accelerator().device_name() == "cpu":
        # At start-up DeepSpeed would compile a shared-memory all-reduce for CPUs, which takes more than a minute and
        # serves inference only.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = new_model(arguments)
    engine, *_ = deepspeed.initialize(args=arguments, model=model, model_parameters=model.parameters())

    corpus = Corpus()
    statistics = engine.communication_compression and engine.communication_compression.stats
    report = Report(arguments.log_file, dist.get_rank(), dist.barrier, mean_over_ranks, statistics)
    train(engine, corpus, arguments, report)

    batch = engine.train_micro_batch_size_per_gpu()
    report.end(engine, model.config.context, corpus, batch, digests_of(engine))

    dist.barrier()  # a rank that leaves early can abort the others
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
