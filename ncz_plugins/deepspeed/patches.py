"""List of everything that this plugin replaces in DeepSpeed, and of the private names that it reads.

engine.py, gradients.py, weights.py and exchanges.py hold the replacements. Tried on DeepSpeed 0.19.8. Besides what
`install` replaces, these names are not part of DeepSpeed's documented API:

    DeepSpeedEngine        _config._param_dict, _step_applied, param_names, checkpoint_mp_rank, mp_world_size,
                           seq_dp_world_size, seq_data_parallel_group, torch_autocast_z0_gradscaler, basic_optimizer
    ZeRO 1 and 2           ipg_buckets, bit16_groups, param_names
    ZeRO 3                 ipg_buckets, param_names, parameter_offload, get_param_coordinator
    BF16_Optimizer         get_grads_for_reduction, bf16_groups, fp32_groups_gradients, fp32_groups_gradients_flat,
                           fp32_groups_actual_gradients_flat
    loss scale             loss_scale_config, cur_scale, torch_autocast_gradscaler
    deepspeed.utils.groups mpu, mesh_device, _get_sequence_data_parallel_group
    deepspeed.comm         comm.cdb, TorchBackend._reduce_op
    parameters             use_muon, ds_shape, runtime.utils.is_model_parallel_parameter, moe.utils.is_moe_param,
                           utils.bwc.bwc_tensor_model_parallel_world_size
    pipelines              PipelineEngine._INSTRUCTION_MAP, grid, has_attention_mask, has_bool_tensors;
                           PipelineModule.tied_comms
    torch                  torch._C._current_graph_task_id
"""

from __future__ import annotations

import functools
from importlib import import_module

import deepspeed
from packaging.version import Version

from ..core.errors import UnsupportedError
from ..core.reasons import Bypass
from . import engine, exchanges, gradients, weights
from .parameter_slices import of_engine, of_stage_3, of_stages_1_and_2

OLDEST = "0.19.8"  # older versions keep the parameters of a bucket elsewhere
_ENGINE = "deepspeed.runtime.engine"
_BF16 = "deepspeed.runtime.bf16_optimizer"
_STAGES_1_AND_2 = "deepspeed.runtime.zero.stage_1_and_2"
_STAGE_3 = "deepspeed.runtime.zero.stage3"
_PIPELINE = "deepspeed.runtime.pipe.engine"
_MESSAGES = ("send_activations", "recv_activations", "send_grads", "recv_grads")

# By class: a function that lists the gradients that may be reduced now, with their parameters' names, and the methods
# that reduce gradients. Every collective inside these methods carries exactly the gradients that the method's first
# argument names.
_GRADIENT_METHODS = {
    (_ENGINE, "DeepSpeedEngine"): (of_engine, ("allreduce_bucket",)),
    (_STAGES_1_AND_2, "DeepSpeedZeroOptimizer"): (
        of_stages_1_and_2,
        ("allreduce_bucket", "gradient_reduction_w_predivide"),
    ),
    (_STAGE_3, "DeepSpeedZeroOptimizer_Stage3"): (
        of_stage_3,
        (
            "allreduce_bucket",
            "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads",
            "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads",
        ),
    ),
}

# By class: the methods that send gradients in ways that can't be compressed, and the reason that is counted.
_PLAIN_METHODS = {
    (_ENGINE, "DeepSpeedEngine"): {
        "sparse_allreduce": Bypass.SPARSE,
        "_reduce_autoep_folding_tp_replicated_gradients": Bypass.MODEL_PARALLEL,
    },
    (_PIPELINE, "PipelineEngine"): {"_exec_reduce_tied_grads": Bypass.MODEL_PARALLEL},
    (_BF16, "BF16_Optimizer"): {"_update_hp_grad": Bypass.MODEL_PARALLEL},
    (_STAGES_1_AND_2, "DeepSpeedZeroOptimizer"): {
        "_maybe_reduce_autoep_folding_tp_gradient": Bypass.MODEL_PARALLEL,
        "_apply_muon_updates_cpu_offload": Bypass.REDUCED,
    },
    (_STAGE_3, "DeepSpeedZeroOptimizer_Stage3"): {
        "_apply_autoep_folding_tp_correction": Bypass.MODEL_PARALLEL,
        "_apply_muon_to_accumulated_grads": Bypass.REDUCED,
    },
    ("deepspeed.runtime.zenflow.zenflow_stage_1_and_2", "ZenFlowZeroOptimizer"): {
        "_process_selected_fp32_groups_grad": Bypass.REDUCED,
    },
}


def install() -> None:
    """Replace DeepSpeed's functions; a second call does nothing.

    Raises UnsupportedError if this DeepSpeed is too old or lacks one of them. Nothing is replaced then.
    """
    if Version(deepspeed.__version__) < Version(OLDEST):
        raise UnsupportedError(
            f"ncz_plugins needs DeepSpeed {OLDEST} or newer, and {deepspeed.__version__} is installed: "
            f"pip install 'deepspeed>={OLDEST}'"
        )
    engine_class = _lookup(_ENGINE, "DeepSpeedEngine")
    if hasattr(engine_class, engine.ATTRIBUTE):
        return
    backend = _lookup("deepspeed.comm.torch", "TorchBackend")
    bf16 = _lookup(_BF16, "BF16_Optimizer")
    stages_1_and_2 = _lookup(_STAGES_1_AND_2, "DeepSpeedZeroOptimizer")
    stage_3 = _lookup(_STAGE_3, "DeepSpeedZeroOptimizer_Stage3")
    coordinator = _lookup("deepspeed.runtime.zero.partitioned_param_coordinator", "PartitionedParameterCoordinator")
    pipeline = _lookup(_PIPELINE, "PipelineEngine")
    in_groups, by_parameter = (
        functools.partial(weights.mark_gathers, how) for how in (weights.in_groups, weights.by_parameter)
    )
    wrappers = [
        (_lookup(module, name), method, functools.partial(gradients.mark_gradients, list_gradients))
        for (module, name), (list_gradients, methods) in _GRADIENT_METHODS.items()
        for method in methods
    ]
    wrappers += [
        (_lookup(module, name), method, functools.partial(gradients.mark_plain, reason))
        for (module, name), reasons in _PLAIN_METHODS.items()
        for method, reason in reasons.items()
    ]
    wrappers += [
        (backend, "all_reduce", gradients.compressed_all_reduce),
        (backend, "reduce_scatter_tensor", gradients.compressed_reduce_scatter),
        (backend, "broadcast", gradients.counted_broadcast),
        (backend, "all_gather", gradients.counted_all_gather),
        (backend, "all_gather_into_tensor", gradients.counted_all_gather_into_tensor),
        (backend, "all_gather_into_tensor", weights.gather_parameters),
        (backend, "all_to_all_single", exchanges.compressed_all_to_all),
        (backend, "send", exchanges.compressed_send),
        (backend, "recv", exchanges.compressed_recv),
        # The optimizer's module imported the function by name, so replace it there.
        (import_module(_STAGE_3), "reduce_scatter_coalesced", gradients.group_by_settings),
        (import_module(_STAGES_1_AND_2), "all_gather_dp_groups", weights.gather_changes),
        (import_module(_BF16), "all_gather_dp_groups", weights.gather_changes),
        (stages_1_and_2, "step", in_groups),
        (stages_1_and_2, "update_lp_params", in_groups),
        (bf16, "update_lp_params", in_groups),
        (coordinator, "_PartitionedParameterCoordinator__all_gather_params_", by_parameter),
        (stage_3, "_post_step", by_parameter),
        (engine_class, "__init__", engine.configure_engine),
        (engine_class, "forward", exchanges.mark_exchanges),
        (pipeline, "__init__", exchanges.connect_stages),
        (pipeline, "set_has_attention_mask", exchanges.checked_mask),
        *((pipeline, f"_exec_{what}", exchanges.mark_messages) for what in _MESSAGES),
        (engine_class, "_take_model_step", engine.end_step),
        (engine_class, "save_checkpoint", engine.save_compression),
        (engine_class, "_load_checkpoint", engine.load_compression),
        (engine_class, "destroy", engine.close_compression),
    ]
    for owner, name, _ in wrappers:
        if not hasattr(owner, name):
            raise _unknown_deepspeed(f"{owner.__name__}.{name}")
    for owner, name, wrapper in wrappers:
        original = getattr(owner, name)
        setattr(owner, name, functools.wraps(original)(wrapper(original)))
    # A pipeline's engine looks its methods up in a table.
    for instruction, method in pipeline._INSTRUCTION_MAP.items():
        pipeline._INSTRUCTION_MAP[instruction] = getattr(pipeline, method.__name__)
    setattr(engine_class, engine.ATTRIBUTE, None)


def _lookup(module: str, name: str):
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise _unknown_deepspeed(f"{module}.{name}") from error


def _unknown_deepspeed(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"DeepSpeed {deepspeed.__version__} has no {what}, which ncz_plugins hooks into: install DeepSpeed {OLDEST}, "
        "with which it is tested"
    )
