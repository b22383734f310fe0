"""What every example of a training takes from the command line, and reports: a JSON line per step, and one at the end.

A step's line has the loss, the seconds, the bytes that left through the network interface, and what ncz_plugins counted
of it. The last line has the loss on text that was held out, and whether all ranks ended with the same weights.
"""

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Iterable

import torch
from data import Corpus
from gpt import GPT, GPTConfig
from network import SentBytes, sent_bytes


def argument_parser(description: str) -> argparse.ArgumentParser:
    """A parser of the arguments that all examples take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and of the batches")
    parser.add_argument("--layers", type=int, default=GPTConfig.layers)
    parser.add_argument("--heads", type=int, default=GPTConfig.heads)
    parser.add_argument("--width", type=int, default=GPTConfig.width)
    # Not --log: horovodrun would take that for an abbreviation of its own options.
    parser.add_argument("--log-file", metavar="FILE.jsonl", help="where rank 0 writes one JSON line per step")
    return parser


def new_model(arguments: argparse.Namespace) -> GPT:
    """The model of these arguments, with the same weights on every rank."""
    torch.manual_seed(arguments.seed)
    return GPT(GPTConfig(layers=arguments.layers, heads=arguments.heads, width=arguments.width))


def digest(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """A SHA-256 of all parameters, uint8 [32]: where two ranks have the same, so have they all bits of all weights."""
    sha256 = hashlib.sha256()
    for parameter in parameters:
        sha256.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy())
    return torch.frombuffer(bytearray(sha256.digest()), dtype=torch.uint8)


class Report:
    """What rank 0 prints and writes.

    Args:
        log_file: for the lines; None for none.
        rank: of this process.
        barrier: returns once all ranks have come to it.
        mean_over_ranks: the mean of a scalar over all ranks.
        statistics: of ncz_plugins; None where it is not used.
    """

    def __init__(
        self,
        log_file: str | None,
        rank: int,
        barrier: Callable[[], None],
        mean_over_ranks: Callable[[torch.Tensor], float],
        statistics=None,
    ):
        self._rank = rank
        self._log = open(log_file, "w", buffering=1) if log_file and rank == 0 else None
        self._barrier = barrier
        self._mean_over_ranks = mean_over_ranks
        self._statistics = statistics
        self.start_step()

    def start_step(self) -> None:
        """Begin to measure a step."""
        self._started = time.perf_counter()
        self.gradient_traffic = SentBytes(self._barrier)  # a context for what reduces gradients

    def end_step(self, step: int, loss: torch.Tensor) -> None:
        """Write the line of a step. All ranks must call this."""
        if loss.is_cuda:
            torch.cuda.synchronize()
        record = {
            "step": step,
            "seconds": time.perf_counter() - self._started,
            "loss": self._mean_over_ranks(loss),
            "interface_bytes": self.gradient_traffic.total,
            "interface_bytes_so_far": sent_bytes(self.gradient_traffic.interface),
        }
        if self._statistics is not None:
            record["compression"] = self._statistics.steps[-1].to_dict()
        self._write(record)

    def end(self, model: torch.nn.Module, context: int, corpus: Corpus, batch: int, digests: Iterable) -> None:
        """Write the last line. All ranks must call this.

        Args:
            model: returns the loss of tokens and targets.
            context: tokens that it sees at once.
            batch: sequences in each of 16 batches of the held-out text, which is the same on every rank.
            digests: of every rank's weights, see `digest`.
        """
        hashes = [bytes(each.tolist()).hex() for each in digests]
        device = next(model.parameters()).device
        model.eval()
        with torch.no_grad():
            batches = corpus.validation_batches(batch, context, count=16)
            losses = [model(tokens.to(device), targets.to(device)) for tokens, targets in batches]
        record = {
            "validation_loss": self._mean_over_ranks(torch.stack(losses).mean()),
            "replicas_identical": len(set(hashes)) == 1,
            "parameters_sha256": hashes,
        }
        if self._statistics is not None:
            record["compression"] = self._statistics.total.to_dict()
        self._write(record)

    def _write(self, record: dict) -> None:
        if self._log:
            self._log.write(json.dumps(record) + "\n")
        if self._rank == 0:
            print(record, flush=True)
