"""Train the small GPT on the standard library's source with DistributedDataParallel.

    cd examples
    torchrun --nproc_per_node 2 train_ddp.py --compression ncclz

`--compression` takes none, ncclz, a configuration file for it, or one of torch's own hooks: bf16, powersgd.
"""

import argparse
import hashlib
import json
import time

import torch
import torch.distributed as dist
from data import Corpus
from gpt import GPT, GPTConfig
from network import SentBytes, sent_bytes
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ncz_plugins.torch import ddp


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compression", default="ncclz", metavar="none|bf16|powersgd|ncclz|FILE")
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=12, help="sequences per rank and step")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and of the batches")
    parser.add_argument("--layers", type=int, default=GPTConfig.layers)
    parser.add_argument("--heads", type=int, default=GPTConfig.heads)
    parser.add_argument("--width", type=int, default=GPTConfig.width)
    parser.add_argument("--log-file", metavar="FILE.jsonl", help="where rank 0 writes one JSON line per step")
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


def validation_loss(model, corpus: Corpus, batch: int) -> float:
    """Mean loss in nats per byte over the same held-out text on every rank."""
    model.eval()
    with torch.no_grad():
        batches = corpus.validation_batches(batch, model.config.context, count=16)
        return mean_over_ranks(torch.stack([model(tokens, targets) for tokens, targets in batches]).mean())


def train(model, optimizer, schedule, corpus: Corpus, arguments, compression, write):
    model.train()
    for step in range(arguments.steps):
        started, gradient_traffic = time.perf_counter(), SentBytes(dist.barrier)
        tokens, targets = corpus.batch(
            arguments.batch, model.module.config.context, seed=arguments.seed, step=step, rank=dist.get_rank()
        )
        optimizer.zero_grad()
        loss = model(tokens, targets)
        with gradient_traffic:
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        record = {
            "step": step,
            "seconds": time.perf_counter() - started,
            "loss": mean_over_ranks(loss),
            "interface_bytes": gradient_traffic.total,
            "interface_bytes_so_far": sent_bytes(gradient_traffic.interface),
        }
        if compression is not None:
            record["compression"] = compression.stats.steps[-1].to_dict()
        write(record)


def main():
    arguments = parse_arguments()
    dist.init_process_group("gloo")
    torch.manual_seed(arguments.seed)
    model = GPT(GPTConfig(layers=arguments.layers, heads=arguments.heads, width=arguments.width))
    # The PowerSGD hook starts collectives in callbacks. Those of several buckets come in another order on each rank,
    # and gloo then waits for ever: so it gets one bucket.
    model = DistributedDataParallel(model, bucket_cap_mb=1024 if arguments.compression == "powersgd" else None)
    compression = compressed(model, arguments.compression)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 20))
    log = open(arguments.log_file, "w", buffering=1) if arguments.log_file and dist.get_rank() == 0 else None

    def write(record: dict):
        if log:
            log.write(json.dumps(record) + "\n")
        if dist.get_rank() == 0:
            print(record, flush=True)

    corpus = Corpus()
    train(model, optimizer, schedule, corpus, arguments, compression, write)

    loss = validation_loss(model.module, corpus, arguments.batch)
    parameters = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    digest = torch.frombuffer(bytearray(hashlib.sha256(parameters).digest()), dtype=torch.uint8)
    digests = [torch.empty_like(digest) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, digest)
    hashes = [bytes(each.tolist()).hex() for each in digests]
    final = {"validation_loss": loss, "replicas_identical": len(set(hashes)) == 1, "parameters_sha256": hashes}
    if compression is not None:
        final["compression"] = compression.stats.total.to_dict()
    write(final)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
