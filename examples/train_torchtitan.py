"""Compress the gradients of torchtitan's own trainings.

    cd examples
    torchrun --nproc_per_node 8 -m torchtitan.train --module train_torchtitan --config llama3_debugmodel

`--compression` takes none, a preset such as ncclz, or a configuration file. All other options are torchtitan's. For
another model write a function like the last one.
"""

from dataclasses import dataclass, fields

from torchtitan.models.llama3 import config_registry as llama3
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from ncz_plugins.torch import fsdp


class CompressedTrainer(Trainer):
    """torchtitan's trainer with compressed gradients."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        compression: str = "ncclz"
        """none, a preset such as ncclz, or the path of a configuration file"""

    def __init__(self, config: Config):
        super().__init__(config)
        # Pipeline schedules may give a rank several parts of the model.
        parts = self.model_parts if config.compression != "none" else []
        self.compressions = [fsdp.compress(part, config.compression) for part in parts]
        if config.checkpoint.enable:
            self.checkpointer.states |= {f"compression.{at}": each for at, each in enumerate(self.compressions)}

    def close(self) -> None:
        for compression in self.compressions:
            logger.info(f"Gradients: {compression.stats.total.describe()}")
            compression.close()
        super().close()


def compressed(config: Trainer.Config) -> CompressedTrainer.Config:
    """The same training with compressed gradients."""
    config.training.disable_cuda_graphs = True  # a graph can't hold messages whose sizes follow from the data
    return CompressedTrainer.Config(**{each.name: getattr(config, each.name) for each in fields(config)})


def llama3_debugmodel() -> CompressedTrainer.Config:
    return compressed(llama3.llama3_debugmodel())
