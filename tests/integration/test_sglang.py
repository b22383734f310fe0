"""SGLang's own Llama, loader and weight updater on CPUs, whose weights follow a trainer by patches.

SGLang pins torch and transformers to older versions than the other tests need, so it is not among the packages that
`make setup` installs. Run this file where `pip install sglang` has been.
"""

import os
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from on_rank import folder, raises
from scenarios import on_ranks
from small_llama import are_equal, small_llama, train_a_step, weights_of

from ncz_plugins import FrameError, MismatchError, WeightPublisher, fetch_version, publish_version

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang pins another torch: this runs where it is there"),
]
LOADER = "ncz_plugins.weights.engines.sglang.load_patches"
RANKS = (
    "tp_rank",
    "pp_rank",
    "attn_tp_rank",
    "attn_dp_rank",
    "attn_cp_rank",
    "moe_dp_rank",
    "moe_ep_rank",
    "moe_tp_rank",
)


def begin(path: str):
    """Begin as a rank of SGLang's server does. Returns its arguments."""
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    how = {"device": "cpu", "dtype": "bfloat16", "attention_backend": "torch_native", "skip_tokenizer_init": True}
    arguments = ServerArgs(model_path=path, custom_weight_loader=[LOADER], **how)
    set_global_server_args_for_scheduler(arguments)
    init_distributed_environment(1, 0, f"file://{folder()}/store", 0, "gloo")
    initialize_model_parallel(backend="gloo")
    get_parallel().override_permanently(**dict.fromkeys(RANKS, 0))
    return arguments


def loaded_by_sglang(arguments, path: str):
    """SGLang's model with the checkpoint in a folder, and its configuration."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import get_model

    config = ModelConfig.from_server_args(arguments, model_path=path)
    return get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu")), config


def updater_of(model, config, arguments):
    """What a rank of SGLang's server calls for `update_weights_from_tensor`."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    return WeightUpdater(
        tp_rank=0,
        device="cpu",
        gpu_id=0,
        model_config=config,
        custom_weight_loaders=arguments.custom_weight_loader,
        get_model=lambda: model,
        update_model_fields=lambda *arguments, **fields: None,  # of the model's runner, which is not there
        recapture_cuda_graph=None,
        get_model_runner=None,
    )


def follow(tied: bool) -> list[int]:
    """Sizes of patches, by which SGLang's model becomes the one that SGLang loads from the trainer's checkpoint."""
    model = small_llama(tied)
    model.save_pretrained(folder() / "v0")
    arguments = begin(str(folder() / "v0"))
    ours, config = loaded_by_sglang(arguments, str(folder() / "v0"))
    places = {name: each.data_ptr() for name, each in ours.named_parameters()}
    updater = updater_of(ours, config, arguments)

    def send(patch: bytes) -> None:
        tensor = torch.frombuffer(bytearray(patch), dtype=torch.uint8)
        updater.begin_weight_update()
        assert updater.update_weights_from_tensor([("patch", tensor)], load_format=LOADER) == (True, "Success")
        updater.end_weight_update(run_post_load=True)

    (folder() / "key").write_bytes(bytes(range(32)))
    os.environ["NCZ_KEY_FILE"] = str(folder() / "key")
    publisher, sizes = WeightPublisher(key=bytes(range(32))), []
    for number in range(3):
        before = publisher.identity if number else None
        if number:
            train_a_step(model, number)
        publisher.publish(dict(model.named_parameters()))
        patch, old = publisher.patch(before), weights_of(ours)
        sizes.append(len(patch))
        if number == 1:
            # A damaged patch, and that of another version, change nothing. A whole version helps.
            raises(FrameError, partial(send, patch[:-1]))
            before = publisher.identity
            model.get_parameter("model.norm.weight").data += 1
            publisher.publish(dict(model.named_parameters()))
            raises(MismatchError, partial(send, publisher.patch(before)))
            assert are_equal(weights_of(ours), old)
            patch = publisher.patch()
        send(patch)
        model.save_pretrained(folder() / f"v{number}")
        from_disk, _ = loaded_by_sglang(arguments, str(folder() / f"v{number}"))
        assert are_equal(weights_of(ours), weights_of(from_disk))
        assert number == 0 or not are_equal(weights_of(ours), old)
    follow_a_folder(model, ours, updater, arguments)
    assert places == {name: each.data_ptr() for name, each in ours.named_parameters()}
    return [*sizes, sum(each.nbytes for each in model.parameters())]


def follow_a_folder(model, ours, updater, arguments) -> None:
    """The same by a folder of versions and SGLang's own way to load a checkpoint again."""
    base = None
    for number in range(2):
        if number:
            train_a_step(model, 10 + number)
        model.save_pretrained(folder() / f"saved{number}")
        publish_version(folder() / "versions", folder() / f"saved{number}")
        fetched = folder() / f"fetched{number}"
        fetch_version(folder() / "versions", fetched, base=base)
        done, message = updater.update_weights_from_disk(str(fetched), "auto")
        assert done, message
        expected, _ = loaded_by_sglang(arguments, str(folder() / f"saved{number}"))
        assert are_equal(weights_of(ours), weights_of(expected))
        base = fetched


@pytest.mark.parametrize("tied", [False, True])
def test_sglang_has_every_version_as_if_it_had_loaded_it_from_disk(tmp_path, tied):
    how = {"imports": "scenarios", "seconds": 280, "environment": {"HF_HUB_OFFLINE": "1"}}
    [[first, *later, whole]] = on_ranks(1, follow, tmp_path, tied, **how)
    assert first > 0.5 * whole
    assert all(size < 0.4 * whole for size in later)
