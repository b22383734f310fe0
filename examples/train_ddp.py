"""Train the small GPT on the standard library's source with DistributedDataParallel.

    cd examples
    torchrun --nproc_per_node 2 train_ddp.py --compression ncclz

`--compression` takes none, ncclz, a configuration file for it, or one of torch's own hooks: bf16, powersgd.
"""

import torch
import torch.distributed as dist
from data import Corpus
from reporting import Report, argument_parser, digest, new_model
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ncz_plugins.torch import ddp


def parse_arguments():
    parser = argument_parser(__doc__)
    parser.add_argument("--compression", default="ncclz", metavar="none|bf16|powersgd|ncclz|FILE")
    parser.add_argument("--batch", type=int, default=12, help="sequences per rank and step")
    return parser.parse_args()


def bf16(state, bucket):
    """torch's own hook, which DDP refuses by its name where there is no NCCL."""
    return default_hooks.bf16_compress_hook(state, bucket)


def compressed(model: DistributedDataParallel, compression: str) -> ddp.Compression | None:
    """Have gradients averaged as `--compression` says."""
    if compression == "bf16":
        model.register_comm_hook(None, bf16)
    elif compression == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif compression != "none":
        return ddp.compress(model, compression)


def mean_over_ranks(value: torch.Tensor) -> float:
    total = value.detach().float().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def clip(model: torch.nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def train(model, optimizer, schedule, corpus: Corpus, arguments, report: Report, clip=clip):
    context = model.module.config.context
    model.train()
    for step in range(arguments.steps):
        report.start_step()
        tokens, targets = corpus.batch(arguments.batch, context, seed=arguments.seed, step=step, rank=dist.get_rank())
        optimizer.zero_grad()
        loss = model(tokens, targets)
        with report.gradient_traffic:
            loss.backward()
        clip(model)
        optimizer.step()
        schedule.step()
        report.end_step(step, loss)


def main():
    arguments = parse_arguments()
    dist.init_process_group("gloo")
    # The PowerSGD hook starts collectives in callbacks. Those of several buckets come in another order on each rank,
    # and gloo then waits for ever: so it gets one bucket.
    bucket_cap_mb = 1024 if arguments.compression == "powersgd" else None
    model = DistributedDataParallel(new_model(arguments), bucket_cap_mb=bucket_cap_mb)
    compression = compressed(model, arguments.compression)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 20))

    corpus = Corpus()
    statistics = compression and compression.stats
    report = Report(arguments.log_file, dist.get_rank(), dist.barrier, mean_over_ranks, statistics)
    train(model, optimizer, schedule, corpus, arguments, report)

    digests = [torch.empty(32, dtype=torch.uint8) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, digest(model.parameters()))
    report.end(model.module, model.module.config.context, corpus, arguments.batch, digests)
    if compression:
        compression.close()
    dist.barrier()  # gloo sometimes aborts if a peer's connection goes while it ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
