"""Train the small GPT on the standard library's source with Horovod.

    cd examples
    horovodrun -np 2 python train_horovod.py --compression ncz

`--compression` takes none, fp16, ncz, or a configuration file for ncz.
"""

import horovod.torch as hvd
import torch
from data import Corpus
from reporting import Report, argument_parser, digest, new_model

from ncz_plugins.horovod import NCZ


def parse_arguments():
    parser = argument_parser(__doc__)
    parser.add_argument("--compression", default="ncz", metavar="none|fp16|ncz|FILE")
    parser.add_argument("--batch", type=int, default=12, help="sequences per rank and step")
    return parser.parse_args()


def mean_over_ranks(value: torch.Tensor) -> float:
    return hvd.allreduce(value.detach().float()).item()


def train(model, optimizer, schedule, corpus: Corpus, arguments, report: Report):
    context = model.config.context
    model.train()
    for step in range(arguments.steps):
        report.start_step()
        tokens, targets = corpus.batch(arguments.batch, context, seed=arguments.seed, step=step, rank=hvd.rank())
        optimizer.zero_grad()
        loss = model(tokens, targets)
        with report.gradient_traffic:  # Horovod begins to reduce during backward
            loss.backward()
            optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        schedule.step()
        report.end_step(step, loss)


def main():
    arguments = parse_arguments()
    hvd.init()
    model = new_model(arguments)
    known = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16, "ncz": NCZ()}
    compression = known.get(arguments.compression) or NCZ(arguments.compression)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 20))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    corpus = Corpus()
    statistics = compression.stats if isinstance(compression, NCZ) else None
    report = Report(arguments.log_file, hvd.rank(), hvd.barrier, mean_over_ranks, statistics)
    train(model, optimizer, schedule, corpus, arguments, report)

    digests = hvd.allgather(digest(model.parameters())[None])
    report.end(model, model.config.context, corpus, arguments.batch, digests)


if __name__ == "__main__":
    main()
