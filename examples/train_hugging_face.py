"""Train the small GPT on the standard library's source with Hugging Face's Trainer.

    cd examples
    torchrun --nproc_per_node 2 train_hugging_face.py

To compress a training of your own, take the class `Compress` and the two lines that use it.
"""

import argparse

import torch
from data import Corpus, Windows
from gpt import GPT
from transformers import Trainer, TrainerCallback, TrainingArguments

from ncz_plugins.torch import ddp


class Compress(TrainerCallback):
    """Compresses the gradients of a trainer, once it has wrapped its model by DistributedDataParallel."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.compression = ddp.compress(self.trainer.model_wrapped, "ncclz")  # all defaults

    def on_train_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            print(self.compression.stats.total.describe())
        self.compression.close()


class Model(torch.nn.Module):
    """The GPT, with its loss where the Trainer looks for it."""

    def __init__(self):
        super().__init__()
        self.gpt = GPT()

    def forward(self, tokens, targets):
        return {"loss": self.gpt(tokens, targets)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    arguments = TrainingArguments(
        "out",
        max_steps=parser.parse_args().steps,
        per_device_train_batch_size=12,
        learning_rate=1e-3,
        logging_steps=10,
        save_strategy="no",  # docs/guides/hugging-face.md has checkpoints
        report_to=[],
        use_cpu=True,  # leave it out on GPUs
    )
    torch.manual_seed(0)
    model = Model()
    trainer = Trainer(model, arguments, train_dataset=Windows(Corpus().train, model.gpt.config.context))
    trainer.add_callback(Compress(trainer))
    trainer.train()


if __name__ == "__main__":
    main()
