"""A weight transfer engine of vLLM that takes patches: `--weight-transfer-config '{"backend": "ncz"}'`.

Each worker keeps the checkpoint in host memory. `update_weights` applies patches to it, while the model stays as it is.
`finish_weight_update` has vLLM load all tensors as it does from disk, so that names, fused tensors, shards of tensor
parallelism and quantization are vLLM's. See docs/guides/rl.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

try:
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
except ImportError as error:
    raise ImportError("ncz_plugins.weights.engines.vllm needs vLLM 0.33 or newer: pip install vllm") from error

from ...core.errors import UnsupportedError
from ..keys import read_key
from .checkpoint import CheckpointCopy, read_checkpoint


@dataclass
class PatchInitInfo(WeightTransferInitInfo):
    """What `init_weight_transfer_engine` takes.

    Attributes:
        checkpoint: folder of the checkpoint that the trainer begins with. None: its first version is whole.
        key_file: a file with the trainer's key, which every worker can read. None: patches have none.
    """

    checkpoint: str | None = None
    key_file: str | None = None


@dataclass
class PatchUpdateInfo(WeightTransferUpdateInfo):
    """What `update_weights` takes.

    Attributes:
        patches: paths of files that every worker can read, one for each rank that published the version.
    """

    patches: list[str]


class PatchEngine(WeightTransferEngine[PatchInitInfo, PatchUpdateInfo]):
    """Applies patches to a copy of the checkpoint, and has vLLM load it. vLLM makes one in each worker."""

    init_info_cls = PatchInitInfo
    update_info_cls = PatchUpdateInfo
    supports_draft_weight_update = False
    _checkpoint: CheckpointCopy | None = None

    def init_transfer_engine(self, init_info: PatchInitInfo) -> None:
        """Begin with a trainer."""
        key = read_key(init_info.key_file)
        begins_with = None if init_info.checkpoint is None else read_checkpoint(init_info.checkpoint)
        self._checkpoint = CheckpointCopy(begins_with, key)

    def start_weight_update(self) -> None:
        """Nothing: the model stays as it is until `finish_weight_update`."""

    def update_weights(self, update_info: dict) -> None:
        """Apply the patches in the files that `update_info` names. The model stays as it is.

        Raises PatchKeyError, FrameError and MismatchError as `CheckpointCopy.apply` does.
        """
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: PatchUpdateInfo) -> None:
        """`update_weights` with typed arguments."""
        self._begun().apply([Path(path).read_bytes() for path in update_info.patches])

    def finish_weight_update(self) -> None:
        """Load all tensors into the model."""
        weights = self._begun().weights
        initialize_layerwise_reload(self.model)
        self.model.load_weights(weights.items())
        finalize_layerwise_reload(self.model, self.model_config)
        # The next patch changes the tensors from which the device copies.
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def shutdown(self) -> None:
        """Free the copy."""
        self._checkpoint = None

    def _begun(self) -> CheckpointCopy:
        if self._checkpoint is None:
            raise UnsupportedError("no trainer has begun: call init_weight_transfer_engine({}) first")
        return self._checkpoint
