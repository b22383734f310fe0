"""Train the small GPT on the standard library's source with torchft's DiLoCo: replicas that rarely talk.

    cd examples
    torchrun --nproc_per_node 2 train_diloco.py --compression ncclz

Every rank is a replica, which trains by itself for `--sync-every` steps. Then replicas average how far each has come,
and all take a step of the outer optimizer in that direction. `--compression` takes none, ncclz, or a configuration file
for it. A line of the report is one such round; its loss is that of rank 0's batches.

Rank 0 also runs torchft's lighthouse here. Where replicas come and go, start that by itself: torchft_lighthouse.
"""

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from data import Corpus
from reporting import Report, argument_parser, digest, new_model
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from ncz_plugins.torch.torchft import CompressedProcessGroup

TIMEOUT = timedelta(seconds=60)


def parse_arguments():
    parser = argument_parser(__doc__)
    parser.add_argument("--compression", default="ncclz", metavar="none|ncclz|FILE")
    parser.add_argument("--batch", type=int, default=12, help="sequences per replica and step")
    parser.add_argument("--sync-every", type=int, default=10, help="steps of a round (--steps counts rounds)")
    return parser.parse_args()


def own_address() -> str:
    """The address of this machine, as the others see it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 1))
        return probe.getsockname()[0]


def lighthouse_of(store: dist.Store, rank: int, world_size: int):
    """The server on rank 0, None elsewhere, and its address."""
    server = None
    if rank == 0:
        server = LighthouseServer(bind="[::]:0", min_replicas=world_size)
        store.set("lighthouse", f"http://{own_address()}:{server.address().rpartition(':')[2]}")
    return server, store.get("lighthouse").decode()


def train(model, optimizer, group, corpus: Corpus, arguments, rank: int, report: Report):
    context, every = model.config.context, arguments.sync_every
    model.train()
    for round in range(arguments.steps):
        report.start_step()
        losses = []
        for step in range(round * every, (round + 1) * every):
            tokens, targets = corpus.batch(arguments.batch, context, seed=arguments.seed, step=step, rank=rank)
            optimizer.zero_grad()
            loss = model(tokens, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with report.gradient_traffic:
                optimizer.step()  # the last one of a round synchronizes the replicas
            losses.append(loss.detach())
        if isinstance(group, CompressedProcessGroup):
            group.training.end_step()
        report.end_step(round, torch.stack(losses).mean())


def main():
    arguments = parse_arguments()
    store, rank, world_size = next(dist.rendezvous("env://"))
    server, lighthouse = lighthouse_of(store, rank, world_size)
    own_store = dist.TCPStore(own_address(), 0, is_master=True, wait_for_workers=False)  # of this replica's ranks

    compresses = arguments.compression != "none"
    group = CompressedProcessGroup(arguments.compression, timeout=TIMEOUT) if compresses else ProcessGroupGloo(TIMEOUT)
    model = new_model(arguments)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    manager = Manager(
        pg=group,
        load_state_dict=lambda state: (model.load_state_dict(state["model"]), inner.load_state_dict(state["inner"])),
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        min_replica_size=world_size,
        use_async_quorum=False,
        init_sync=False,  # all begin with the same weights
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=own_address(),
        store_port=own_store.port,
        hostname=own_address(),
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{rank}",
    )
    corpus = Corpus()
    report = Report(arguments.log_file, rank, lambda: None, torch.Tensor.item, group.stats if compresses else None)
    with DiLoCo(manager, [model], inner, outer, arguments.sync_every, use_bucketization=True):
        train(model, inner, group, corpus, arguments, rank, report)

    store.set(f"digest {rank}", bytes(digest(model.parameters()).tolist()))
    digests = [torch.tensor(list(store.get(f"digest {each}"))) for each in range(world_size)]
    report.end(model, model.config.context, corpus, arguments.batch, digests)
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < world_size:  # its store and lighthouse serve the others until then
        store.wait([f"digest {rank}"], TIMEOUT)
    manager.shutdown(wait=False)
    del server


if __name__ == "__main__":
    main()
