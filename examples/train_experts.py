"""Train the small GPT with experts that are shared out over the ranks, and all else with DistributedDataParallel.

    cd examples
    torchrun --nproc_per_node 2 train_experts.py --compression ncclz

`--compression` takes none, ncclz (gradients, and what goes to experts and back), a configuration file for it, or a
cast: bf16, or fp8 with a scale for each token as DeepSeek-V3 does it, where gradients of all else are bf16.
"""

import os
from functools import partial

import torch
import torch.distributed as dist
from data import Corpus
from experts import Exchange, ExpertGPT
from gpt import GPTConfig
from reporting import Report, argument_parser, digest
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from train_ddp import bf16, mean_over_ranks, train

from ncz_plugins import Communicator, Config, Training
from ncz_plugins.torch import ddp, functional

LARGEST_FP8 = 448.0
CASTS = {"none": None, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def parse_arguments():
    parser = argument_parser(__doc__)
    parser.add_argument("--compression", default="ncclz", metavar="none|bf16|fp8|ncclz|FILE")
    parser.add_argument("--batch", type=int, default=12, help="sequences per rank and step")
    parser.add_argument("--experts", type=int, default=4, help="of each layer, over all ranks")
    arguments, ranks = parser.parse_args(), int(os.environ.get("WORLD_SIZE", "1"))  # as torchrun says
    if arguments.experts % ranks:
        parser.error(f"--experts {arguments.experts} must be a multiple of {ranks} ranks")
    return arguments


class Cast(torch.autograd.Function):
    """An uncompressed exchange of rows, or one of rows that are cast to fewer bits, in both directions."""

    @staticmethod
    def forward(ctx, rows: Tensor, received: list[int], sent: list[int], dtype: torch.dtype | None) -> Tensor:
        ctx.given = sent, received, dtype
        return exchanged(rows.contiguous(), received, sent, dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return exchanged(gradient.contiguous(), *ctx.given), None, None, None


def exchanged(rows: Tensor, received: list[int], sent: list[int], dtype: torch.dtype | None) -> Tensor:
    """The rows that come from each rank, [sum(received), width]."""
    scales = 1.0
    if dtype == torch.float8_e4m3fn:  # the largest magnitude of a token becomes the largest code
        own_scales = rows.abs().amax(1, keepdim=True).clamp(min=1e-30) / LARGEST_FP8
        rows, scales = rows / own_scales, torch.empty(sum(received), 1)
        dist.all_to_all_single(scales, own_scales, received, sent)
    cast = rows if dtype is None else rows.to(dtype)
    come = cast.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(come.view(torch.uint8), cast.view(torch.uint8), received, sent)
    return come.float() * scales


def exchange_of(compression: str, training: Training | None) -> tuple[Exchange, Communicator | None]:
    """How rows go to experts and back, and the communicator that does it if they are compressed."""
    if compression in CASTS:
        return partial(apply_cast, CASTS[compression]), None
    communicator = Communicator(training=training)
    return partial(functional.all_to_all_single, communicator=communicator), communicator


def apply_cast(dtype: torch.dtype | None, rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
    return Cast.apply(rows, received, sent, dtype)


def clip(wrapped: DistributedDataParallel) -> None:
    """Clip gradients by their norm over all ranks, so that all ranks scale them alike."""
    of_experts = set(wrapped.module.expert_names())
    squares = torch.zeros(2)  # of experts, of all else
    for name, parameter in wrapped.module.named_parameters():
        squares[int(name not in of_experts)] += parameter.grad.square().sum()
    dist.all_reduce(squares[:1])
    torch.nn.utils.clip_grads_with_norm_(wrapped.module.parameters(), 1.0, squares.sum().sqrt())


def main():
    arguments = parse_arguments()
    dist.init_process_group("gloo")
    training = None
    if arguments.compression not in CASTS:
        config = Config.load(arguments.compression)
        training = Training(config.model_copy(update={"roles": ("gradient", "activation")}))
    exchange, communicator = exchange_of(arguments.compression, training)

    # Every rank has all weights but those of the other ranks' experts, which DDP must leave alone.
    torch.manual_seed(arguments.seed)
    sizes = GPTConfig(layers=arguments.layers, heads=arguments.heads, width=arguments.width)
    model = ExpertGPT(sizes, arguments.experts, exchange)
    of_experts = set(model.expert_names())
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, of_experts)
    for name, parameter in model.named_parameters():
        if name in of_experts:  # tokens of all ranks come here, and the loss is the mean over ranks
            parameter.register_hook(lambda gradient: gradient / dist.get_world_size())
    wrapped = DistributedDataParallel(model)
    compression = None
    if training is not None:
        compression = ddp.compress(wrapped, training=training)
    elif arguments.compression != "none":
        wrapped.register_comm_hook(None, bf16)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 20))
    corpus = Corpus()
    statistics = compression and compression.stats
    report = Report(arguments.log_file, dist.get_rank(), dist.barrier, mean_over_ranks, statistics)
    train(wrapped, optimizer, schedule, corpus, arguments, report, clip)

    shared = [parameter for name, parameter in model.named_parameters() if name not in of_experts]
    digests = [torch.empty(32, dtype=torch.uint8) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, digest(shared))
    report.end(model, sizes.context, corpus, arguments.batch, digests)
    for each in (compression, communicator):
        if each is not None:
            each.close()
    dist.barrier()  # gloo sometimes aborts if a peer's connection goes while it ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
