"""Entry point of the group `vllm.general_plugins`: vLLM calls `register` in each of its processes."""

from __future__ import annotations


def register() -> None:
    """Make the weight transfer backend "ncz" known to vLLM. It is imported when vLLM makes one."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine("ncz", "ncz_plugins.weights.engines.vllm", "PatchEngine")
    except ValueError:  # vLLM calls plugins several times
        pass
