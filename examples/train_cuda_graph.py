"""Train the small GPT with the whole step in one CUDA graph: forward, backward, compressed all_reduce and optimizer.

    cd examples
    torchrun --nproc_per_node 2 train_cuda_graph.py

The host then takes no part in a step but to copy the batch and to start the graph. That needs a fixed rate
(`quantizer.mode: bits`), because a graph can't wait until the host knows sizes. With `--eager`, and on CPUs, the same
step runs without a graph.
"""

import argparse
import hashlib
import os

import torch
import torch.distributed as dist
from data import Corpus
from gpt import GPT, GPTConfig

from ncz_plugins import Communicator

WARM_UP = 3  # steps before the graph is captured: they connect the ranks and compile what is compiled on first use


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_true", help="no graph")
    parser.add_argument("--bits", type=int, default=4, help="of each value of the gradients, 3 to 8")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=12, help="sequences per rank and step")
    parser.add_argument("--layers", type=int, default=GPTConfig.layers)
    return parser.parse_args()


def flat_gradients(model) -> torch.Tensor:
    """The gradients of all parameters as one tensor, of which each parameter's `.grad` is a view."""
    parameters = list(model.parameters())
    flat = torch.zeros(sum(each.numel() for each in parameters), device=parameters[0].device)
    for parameter, gradient in zip(parameters, flat.split([each.numel() for each in parameters])):
        parameter.grad = gradient.view_as(parameter)
    return flat


def main():
    arguments = parse_arguments()
    device = torch.device(arguments.device)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=arguments.layers)).to(device)
    gradients = flat_gradients(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=device.type == "cuda")
    communicator = Communicator({"quantizer": {"mode": "bits", "value": arguments.bits}})

    # A graph reads and writes the same memory in each replay.
    shape = arguments.batch, model.config.context
    tokens, targets = (torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(2))
    loss = torch.zeros((), device=device)

    def step():
        gradients.zero_()
        found = model(tokens, targets)
        found.backward()
        communicator.all_reduce(gradients, dist.ReduceOp.AVG)
        optimizer.step()
        loss.copy_(found.detach())

    corpus, graph = Corpus(), None
    for number in range(arguments.steps):
        for static, batch in zip((tokens, targets), corpus.batch(*shape, seed=0, step=number, rank=rank)):
            static.copy_(batch)
        if graph is not None:
            graph.replay()
        elif number < WARM_UP or arguments.eager or device.type != "cuda":
            step()
        else:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            graph.replay()  # capturing runs nothing
        if rank == 0 and (number % 10 == 9 or number == arguments.steps - 1):
            print(f"step {number + 1}: loss {loss.item():.4f}", flush=True)

    weights = b"".join(each.detach().cpu().numpy().tobytes() for each in model.parameters())
    digest = torch.frombuffer(bytearray(hashlib.sha256(weights).digest()), dtype=torch.uint8)
    digests = [torch.empty_like(digest) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, digest)
    if rank == 0:
        how = "in a CUDA graph" if graph is not None else "without a graph"
        ratio = communicator.stats.total.ratio
        identical = all(torch.equal(each, digest) for each in digests)
        print(f"{how}, {ratio:.2f} times fewer bytes, replicas identical: {identical}")
    graph = None
    communicator.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
