"""Train the small GPT on the standard library's source with DeepSpeed.

    cd examples
    DS_ACCELERATOR=cpu deepspeed --num_gpus 2 train_deepspeed.py --deepspeed_config deepspeed_ncclz.json

What happens to the gradients is decided by "communication_compression" in the JSON file, and by nothing in here.
"""

import argparse
import hashlib
import json
import time

import deepspeed
import torch
import torch.distributed as dist
from data import Corpus
from gpt import GPT, GPTConfig
from network import SentBytes, sent_bytes

import ncz_plugins.deepspeed  # noqa: F401  the one line that makes "communication_compression" work


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and of the batches")
    parser.add_argument("--layers", type=int, default=GPTConfig.layers)
    parser.add_argument("--heads", type=int, default=GPTConfig.heads)
    parser.add_argument("--width", type=int, default=GPTConfig.width)
    parser.add_argument("--log", metavar="FILE.jsonl", help="where rank 0 writes one JSON line per step")
    parser.add_argument("--local_rank", type=int, default=-1, help="filled in by the launcher")
    return deepspeed.add_config_arguments(parser).parse_args()


def mean_over_ranks(value: torch.Tensor) -> float:
    value = value.detach().float().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def validation_loss(engine, corpus: Corpus, batch: int) -> float:
    """Mean loss in nats per byte over the same held-out text on every rank."""
    engine.eval()
    with torch.no_grad():
        batches = corpus.validation_batches(batch, engine.module.config.context, count=16)
        losses = [engine(tokens.to(engine.device), targets.to(engine.device)) for tokens, targets in batches]
    return mean_over_ranks(torch.stack(losses).mean())


def parameters_sha256(engine) -> list[str]:
    """One hash of all parameters per rank; equal hashes mean bit-identical replicas."""
    digest = hashlib.sha256()
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):  # ZeRO 3 keeps only a part on each rank
        for parameter in parameters:
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy())
    mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8).to(engine.device)
    hashes = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(hashes, mine)
    return [bytes(each.tolist()).hex() for each in hashes]


def train(engine, corpus: Corpus, arguments, write):
    batch, rank = engine.train_micro_batch_size_per_gpu(), dist.get_rank()
    accumulation = engine.gradient_accumulation_steps()
    context = engine.module.config.context
    engine.train()
    for step in range(arguments.steps):
        started, gradient_traffic, loss_sum = time.perf_counter(), SentBytes(dist.barrier), 0.0
        for micro_step in range(step * accumulation, (step + 1) * accumulation):
            tokens, targets = corpus.batch(batch, context, seed=arguments.seed, step=micro_step, rank=rank)
            loss = engine(tokens.to(engine.device), targets.to(engine.device))
            with gradient_traffic:  # ZeRO 0, 1 and 2 reduce gradients inside backward unless overlap_comm is on
                engine.backward(loss)
            engine.step()
            loss_sum = loss_sum + loss.detach()
        seconds = time.perf_counter() - started
        record = {
            "step": step,
            "loss": mean_over_ranks(loss_sum / accumulation),
            "seconds": seconds,
            "interface_bytes": gradient_traffic.total,
            "interface_bytes_so_far": sent_bytes(gradient_traffic.interface),
        }
        if engine.communication_compression:
            record["compression"] = engine.communication_compression.stats.steps[-1].to_dict()
        write(record)


def main():
    arguments = parse_arguments()
    if deepspeed.get_accelerator().device_name() == "cpu":
        # At start-up DeepSpeed would compile a shared-memory all-reduce for CPUs, which takes more than a minute and
        # serves inference only.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.manual_seed(arguments.seed)
    model = GPT(GPTConfig(layers=arguments.layers, heads=arguments.heads, width=arguments.width))
    engine, *_ = deepspeed.initialize(args=arguments, model=model, model_parameters=model.parameters())

    log = open(arguments.log, "w", buffering=1) if arguments.log and dist.get_rank() == 0 else None

    def write(record: dict):
        if log:
            log.write(json.dumps(record) + "\n")
        if dist.get_rank() == 0:
            print(record, flush=True)

    corpus = Corpus()
    train(engine, corpus, arguments, write)

    loss = validation_loss(engine, corpus, engine.train_micro_batch_size_per_gpu())
    hashes = parameters_sha256(engine)
    final = {"validation_loss": loss, "replicas_identical": len(set(hashes)) == 1, "parameters_sha256": hashes}
    if engine.communication_compression:
        final["compression"] = engine.communication_compression.stats.total.to_dict()
    write(final)

    dist.barrier()  # a rank that leaves early can abort the others
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
