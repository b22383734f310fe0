"""DeepSpeed's functions that sum over ranks are all known, so that a new one can't reduce gradients unnoticed."""

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

import deepspeed

from ncz_plugins.deepspeed import patches

ROOT = Path(deepspeed.__file__).parent
FOLDERS = ["runtime", "moe", "module_inject"]
SUMS = {"all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_fn", "reduce_scatter_tensor"}

# By file: functions that sum gradients of parameters.
OF_GRADIENTS = {
    "runtime/engine.py": ["DeepSpeedEngine.allreduce_bucket"],
    "runtime/zero/stage_1_and_2.py": [
        "DeepSpeedZeroOptimizer.allreduce_bucket",
        "DeepSpeedZeroOptimizer.gradient_reduction_w_predivide",
    ],
    "runtime/zero/stage3.py": [
        "DeepSpeedZeroOptimizer_Stage3.allreduce_bucket",
        "DeepSpeedZeroOptimizer_Stage3.__avg_scatter_contiguous_grads",
    ],
    # Counted.
    "runtime/pipe/engine.py": ["PipelineEngine._exec_reduce_tied_grads"],
    "module_inject/auto_ep_folding.py": ["reduce_autoep_folding_gradient"],
    # DeepSpeed does not call these.
    "runtime/pipe/module.py": ["PipelineModule.allreduce_tied_weight_gradients"],
    "runtime/zero/partition_parameters.py": ["Init._reduce_scatter_gradient"],
    # A part of the backward pass of tensor parallelism, which the guide names as not counted.
    "module_inject/auto_tp.py": ["AutoTP.register_replicated_grad_hooks.make_grad_allreduce_hook.hook"],
}
# Functions that sum norms, losses, sizes, activations and their gradients, or weights.
OF_OTHERS = {
    "module_inject/layers.py": [
        "AsyncColumnParallel.backward",
        "ColumnParallel.backward",
        "ColumnParallel.symbolic",
        "RowParallel.forward",
        "ScatterToTensorParallelRegion.backward",
    ],
    "moe/ep_tp_dispatch.py": ["_AllGatherVariableRows.backward", "_AverageGradientOverTP.backward"],
    "runtime/data_pipeline/data_sampling/data_analyzer.py": ["DistributedDataAnalyzer.run_map_reduce"],
    "runtime/domino/async_linear.py": ["DominoAsyncColumnParallelLinearImpl.backward"],
    "runtime/domino/transformer.py": [
        "DominoTransformer.inter_layer_overlap_forward",
        "DominoTransformerLayer.forward",
    ],
    "runtime/engine.py": [
        "DeepSpeedEngine._configure_tensor_parallel_states.check_dataloader_inputs_same_across_ranks"
        ".broadcast_and_check"
    ],
    "runtime/pipe/engine.py": [
        "PipelineEngine.__init__",
        "PipelineEngine._aggregate_total_loss",
        "PipelineEngine._reduce_outputs",
    ],
    "runtime/utils.py": [
        "clip_grad_norm_",
        "get_checkpoint_folder_size",
        "get_flattened_grad_norm",
        "get_global_norm_of_tensors",
        "get_grad_zeros",
        "get_norm_with_moe_layers_fast",
        "get_weight_norm",
    ],
    "runtime/zero/partition_parameters.py": ["Init._convert_to_deepspeed_param._all_gather_coalesced"],
    "runtime/zero/stage3.py": [
        "DeepSpeedZeroOptimizer_Stage3._model_parallel_all_reduce",
        "DeepSpeedZeroOptimizer_Stage3.complete_grad_norm_calculation_for_cpu_offload",
        "DeepSpeedZeroOptimizer_Stage3.get_grad_norm_direct",
    ],
    "runtime/zero/stage_1_and_2.py": [
        "DeepSpeedZeroOptimizer._average_expert_grad_norms",
        "DeepSpeedZeroOptimizer._model_parallel_all_reduce",
        "DeepSpeedZeroOptimizer.complete_grad_norm_calculation_for_cpu_offload",
        "DeepSpeedZeroOptimizer.get_grad_norm_direct",
    ],
}


def test_functions_that_sum_over_ranks_are_known():
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    found = {(file.relative_to(ROOT).as_posix(), name) for file in files for name in functions_that_sum(file)}
    known = {(file, name) for kind in (OF_GRADIENTS, OF_OTHERS) for file, names in kind.items() for name in names}
    assert found - known == set(), "find out whether these sum gradients, and wrap or refuse those that do"
    assert known - found == set(), "gone from this DeepSpeed"


def functions_that_sum(file: Path) -> Iterator[str]:
    """Qualified names of functions that call a collective of deepspeed.comm which may be a sum."""
    yield from _in_scope(ast.parse(file.read_text()), "")


def _in_scope(node: ast.AST, scope: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            yield from _in_scope(child, f"{scope}.{child.name}".lstrip("."))
        else:
            if isinstance(child, ast.Call) and _may_sum(child):
                yield scope
            yield from _in_scope(child, scope)


def _may_sum(call: ast.Call) -> bool:
    if not (isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "dist" and call.func.attr in SUMS):
        return False
    ops = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "op"]
    return not any(op.endswith((".MAX", ".MIN")) for op in ops)


def test_no_subclass_has_a_method_of_its_own_in_place_of_one_that_the_plugin_wraps():
    for module in ("runtime.hybrid_engine", "runtime.superoffload.superoffload_stage3"):
        import_module(f"deepspeed.{module}")  # the others come with DeepSpeed's engine
    wrapped = [(of, name) for of, (_, names) in patches._GRADIENT_METHODS.items() for name in names]
    wrapped += [(of, name) for of, names in patches._PLAIN_METHODS.items() for name in names]
    for (module, owner), name in wrapped:
        for subclass in subclasses(getattr(import_module(module), owner)):
            assert name not in vars(subclass), f"{subclass.__name__}.{name}"


def subclasses(owner: type) -> Iterator[type]:
    for subclass in owner.__subclasses__():
        yield subclass
        yield from subclasses(subclass)
