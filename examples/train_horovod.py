"""Train the small GPT on the standard library's source with Horovod.

    cd examples
    horovodrun -np 2 python train_horovod.py --compression ncz

`--compression` takes none, fp16, ncz, or a configuration file for ncz.
"""

import argparse
import hashlib
import json
import time

import horovod.torch as hvd
import torch
from data import Corpus
from gpt import GPT, GPTConfig
from network import SentBytes, sent_bytes

from ncz_plugins.horovod import NCZ


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compression", default="ncz", metavar="none|fp16|ncz|FILE")
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=12, help="sequences per rank and step")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and of the batches")
    parser.add_argument("--layers", type=int, default=GPTConfig.layers)
    parser.add_argument("--heads", type=int, default=GPTConfig.heads)
    parser.add_argument("--width", type=int, default=GPTConfig.width)
    # Not --log as in train_deepspeed.py: horovodrun would take that for an abbreviation of its own options.
    parser.add_argument("--log-file", metavar="FILE.jsonl", help="where rank 0 writes one JSON line per step")
    return parser.parse_args()


def mean_over_ranks(value: torch.Tensor) -> float:
    return hvd.allreduce(value.detach().float()).item()


def validation_loss(model, corpus: Corpus, batch: int) -> float:
    """Mean loss in nats per byte over the same held-out text on every rank."""
    model.eval()
    with torch.no_grad():
        batches = corpus.validation_batches(batch, model.config.context, count=16)
        return mean_over_ranks(torch.stack([model(tokens, targets) for tokens, targets in batches]).mean())


def train(model, optimizer, schedule, corpus: Corpus, arguments, compression, write):
    model.train()
    for step in range(arguments.steps):
        started, gradient_traffic = time.perf_counter(), SentBytes(hvd.barrier)
        tokens, targets = corpus.batch(
            arguments.batch, model.config.context, seed=arguments.seed, step=step, rank=hvd.rank()
        )
        optimizer.zero_grad()
        loss = model(tokens, targets)
        with gradient_traffic:  # Horovod begins to reduce during backward
            loss.backward()
            optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        schedule.step()
        seconds = time.perf_counter() - started
        record = {
            "step": step,
            "loss": mean_over_ranks(loss),
            "seconds": seconds,
            "interface_bytes": gradient_traffic.total,
            "interface_bytes_so_far": sent_bytes(gradient_traffic.interface),
        }
        if isinstance(compression, NCZ):
            record["compression"] = compression.stats.steps[-1].to_dict()
        write(record)


def main():
    arguments = parse_arguments()
    hvd.init()
    torch.manual_seed(arguments.seed)
    model = GPT(GPTConfig(layers=arguments.layers, heads=arguments.heads, width=arguments.width))
    known = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16, "ncz": NCZ()}
    compression = known.get(arguments.compression) or NCZ(arguments.compression)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 20))
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    log = open(arguments.log_file, "w", buffering=1) if arguments.log_file and hvd.rank() == 0 else None

    def write(record: dict):
        if log:
            log.write(json.dumps(record) + "\n")
        if hvd.rank() == 0:
            print(record, flush=True)

    corpus = Corpus()
    train(model, optimizer, schedule, corpus, arguments, compression, write)

    loss = validation_loss(model, corpus, arguments.batch)
    parameters = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    digest = torch.frombuffer(bytearray(hashlib.sha256(parameters).digest()), dtype=torch.uint8)
    hashes = [bytes(each.tolist()).hex() for each in hvd.allgather(digest[None])]
    final = {"validation_loss": loss, "replicas_identical": len(set(hashes)) == 1, "parameters_sha256": hashes}
    if isinstance(compression, NCZ):
        final["compression"] = compression.stats.total.to_dict()
    write(final)


if __name__ == "__main__":
    main()
