"""Train the small GPT on the standard library's source with Lightning's Trainer, which starts both ranks.

    cd examples
    python train_lightning.py

To compress a training of your own, take the class `Compress` and give it to the Trainer's `callbacks`.
"""

import argparse

import lightning
import torch
from data import Corpus, Windows
from gpt import GPT
from torch.utils.data import DataLoader

from ncz_plugins.torch import ddp


class Compress(lightning.Callback):
    """Compresses the gradients of a training, once its strategy has wrapped the module."""

    def on_train_start(self, trainer, module):
        self.compression = ddp.compress(trainer.strategy.model, "ncclz")  # all defaults

    def on_train_end(self, trainer, module):
        if trainer.is_global_zero:
            print(self.compression.stats.total.describe())
        self.compression.close()


class Module(lightning.LightningModule):
    """The GPT, and how it learns."""

    def __init__(self):
        super().__init__()
        self.model = GPT()

    def training_step(self, batch, index):
        loss = self.model(batch["tokens"], batch["targets"])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    steps = parser.parse_args().steps
    lightning.seed_everything(0)
    module = Module()
    loader = DataLoader(Windows(Corpus().train, module.model.config.context), batch_size=12, shuffle=True)
    trainer = lightning.Trainer(
        accelerator="cpu",  # or "gpu"
        devices=2,
        strategy="ddp",
        callbacks=[Compress()],
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,  # docs/guides/lightning.md has checkpoints
    )
    trainer.fit(module, loader)


if __name__ == "__main__":
    main()
