"""vLLM's own Llama, loader and registry on CPUs, whose weights follow a trainer by patches.

vLLM pins torch and transformers to older versions than the other tests need, so it is not among the packages that
`make setup` installs. Run this file where `pip install vllm` has been.
"""

import configparser
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from on_rank import folder, raises
from repository import ROOT
from scenarios import on_ranks
from small_llama import are_equal, small_llama, train_a_step, weights_of

from ncz_plugins import FrameError, MismatchError, WeightPublisher

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM pins another torch: this runs where it was installed"),
]
HOW = {
    "imports": "scenarios",
    "seconds": 280,
    "environment": {"VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"},
}


def plugin():
    """The function that setup.cfg names as the entry point of vLLM."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    _, _, place = settings["options.entry_points"]["vllm.general_plugins"].strip().partition(" = ")
    module, _, name = place.partition(":")
    return getattr(__import__(module, fromlist=[name]), name)


def loaded_by_vllm(path: str):
    """vLLM's model with the checkpoint in a folder, and its configuration with our backend."""
    from vllm.config import WeightTransferConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    arguments = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "bfloat16", "max_model_len": 64}
    config = EngineArgs(model=path, **arguments).create_engine_config()
    config.weight_transfer_config = WeightTransferConfig(backend="ncz")
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{folder()}/store", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
        return get_model(vllm_config=config), config


def follow(tied: bool, from_disk: bool) -> list[int]:
    """Sizes of patches, by which vLLM's model becomes the one that vLLM loads from the trainer's checkpoint.

    Args:
        from_disk: whether vLLM's copy begins with the checkpoint from which the trainer begins.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    for _ in range(2):
        plugin()()
    model = small_llama(tied)
    model.save_pretrained(folder() / "v0")
    ours, config = loaded_by_vllm(str(folder() / "v0"))
    places = {name: each.data_ptr() for name, each in ours.named_parameters()}
    transfer = config.weight_transfer_config
    engine = WeightTransferEngineFactory.create_engine(transfer, config, torch.device("cpu"), ours)
    (folder() / "key").write_bytes(bytes(range(32)))
    publisher = WeightPublisher(base=dict(model.named_parameters()), key=bytes(range(32)))
    file, sizes = folder() / "a.patch", []

    def send(patch: bytes) -> None:
        """What vLLM's worker does for the three requests of a trainer."""
        file.write_bytes(patch)
        with set_current_vllm_config(config):
            engine.start_weight_update()
            engine.update_weights({"patches": [str(file)]})
            engine.finish_weight_update()

    begin = {"checkpoint": str(folder() / "v0")} if from_disk else {}
    engine.init_transfer_engine(engine.parse_init_info(begin | {"key_file": str(folder() / "key")}))
    for number in range(1, 4):
        before = publisher.identity if number > 1 or from_disk else None
        train_a_step(model, number)
        publisher.publish(dict(model.named_parameters()))
        patch, old = publisher.patch(before), weights_of(ours)
        sizes.append(len(patch))
        if number == 2:
            # Another version's patch, and a damaged one, change nothing.
            raises(FrameError, partial(send, patch[:-1]))
            model.get_parameter("model.norm.weight").data += 1
            raises(MismatchError, partial(send, changes_after_a_lost_version(publisher, model)))
            assert are_equal(weights_of(ours), old)
            patch = publisher.patch()
        send(patch)
        model.save_pretrained(folder() / f"v{number}")
        expected, _ = loaded_by_vllm(str(folder() / f"v{number}"))
        assert are_equal(weights_of(ours), weights_of(expected)) and not are_equal(weights_of(ours), old)
    assert places == {name: each.data_ptr() for name, each in ours.named_parameters()}
    engine.shutdown()
    return [*sizes, sum(each.nbytes for each in model.parameters())]


def changes_after_a_lost_version(publisher: WeightPublisher, model) -> bytes:
    before = publisher.identity
    publisher.publish(dict(model.named_parameters()))
    return publisher.patch(before)


@pytest.mark.parametrize("tied,from_disk", [(False, False), (True, False), (False, True)])
def test_vllm_has_every_version_as_if_it_had_loaded_it_from_disk(tmp_path, tied, from_disk):
    [[first, *later, whole]] = on_ranks(1, follow, tmp_path, tied, from_disk, **HOW)
    assert first < 0.4 * whole if from_disk else first > 0.5 * whole
    assert all(size < 0.4 * whole for size in later)
