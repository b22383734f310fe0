"""Train the small GPT on the standard library's source with FSDP2.

    cd examples
    torchrun --nproc_per_node 2 train_fsdp.py --compression ncclz

`--compression` takes none, bf16 (FSDP's own reduce_dtype), ncclz, or a configuration file for it.
"""

import torch
import torch.distributed as dist
from data import Corpus
from reporting import Report, argument_parser, digest, new_model
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ncz_plugins.torch import fsdp


def parse_arguments():
    parser = argument_parser(__doc__)
    parser.add_argument("--compression", default="ncclz", metavar="none|bf16|ncclz|FILE")
    parser.add_argument("--keep-weights", action="store_true", help="send of weights what changed, if the file says so")
    parser.add_argument("--batch", type=int, default=12, help="sequences per rank and step")
    return parser.parse_args()


def sharded(model, compression: str):
    """The model, of which each block and the rest are sharded by themselves."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if compression == "bf16" else None)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def mean_over_ranks(value: torch.Tensor) -> float:
    total = value.detach().float().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train(model, optimizer, schedule, corpus: Corpus, arguments, report: Report):
    context = model.config.context
    model.train()
    for step in range(arguments.steps):
        report.start_step()
        tokens, targets = corpus.batch(arguments.batch, context, seed=arguments.seed, step=step, rank=dist.get_rank())
        optimizer.zero_grad()
        loss = model(tokens, targets)
        with report.gradient_traffic:  # backward gathers weights as well
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        report.end_step(step, loss)


def main():
    arguments = parse_arguments()
    dist.init_process_group("gloo")
    model = sharded(new_model(arguments), arguments.compression)
    compresses = arguments.compression not in ("none", "bf16")
    compression = None
    if compresses:
        compression = fsdp.compress(model, arguments.compression, keep_weights=arguments.keep_weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 20))

    corpus = Corpus()
    statistics = compression and compression.stats
    report = Report(arguments.log_file, dist.get_rank(), dist.barrier, mean_over_ranks, statistics)
    train(model, optimizer, schedule, corpus, arguments, report)

    digests = [torch.empty(32, dtype=torch.uint8) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, digest(each.full_tensor() for each in model.parameters()))
    report.end(model, model.config.context, corpus, arguments.batch, digests)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
