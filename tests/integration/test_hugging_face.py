"""Hugging Face under DeepSpeed: the Trainer with ZeRO 1, 2 and 3, saved and resumed, and a loop of Accelerate.

tests/docs runs both under DistributedDataParallel.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

import torch
import torch.distributed as dist
from on_rank import folder, same_on_all_ranks
from scenarios import DEEPSPEED, on_ranks
from small_engine import BATCH, INPUTS, KEY, OUTPUTS, parameters_sha256

import ncz_plugins.deepspeed  # noqa: F401

pytestmark = [
    pytest.mark.slow,
    # Looked for and not imported, which takes seconds: only ranks need them.
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
    pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed"),
]
STEPS, STOP = 4, 2
HOW = {
    "launcher": "torch",
    "imports": f"{DEEPSPEED['imports']},transformers.trainer,transformers.models.bert.modeling_bert",
    # The first is what `accelerate launch` sets.
    "environment": {"ACCELERATE_USE_DEEPSPEED": "true", "HF_HUB_OFFLINE": "1"},
}


# ---------------------------------------------------------------- the Trainer


def config_of(stage: int) -> dict:
    """With stochastic rounding and error feedback, for which a run that is resumed must know what went before."""
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage, "reduce_bucket_size": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
        KEY: {
            "quantizer": {"kind": "stochastic", "error_feedback": True},
            "transport": {"min_bytes": 0},
        },
    }


def trainer_of(stage: int, folder: Path, steps: int):
    # Not at the top: these imports take seconds, and pytest's process does not need them. So it is with accelerate's.
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(folder),
        deepspeed=config_of(stage),
        use_cpu=True,
        max_steps=steps,
        save_steps=STOP,
        per_device_train_batch_size=4,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
    )
    torch.manual_seed(0)
    sizes = {"vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertForSequenceClassification(BertConfig(intermediate_size=131, num_labels=2, **sizes))
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(0, 101, (64, 16), generator=generator)
    dataset = [{"input_ids": text, "labels": text[0] % 2} for text in texts]
    return Trainer(model=model, args=arguments, train_dataset=dataset)


@dataclass
class Run:
    sha256: str  # of the weights
    losses: list[float]
    step: int
    total: object  # statistics of all steps


def run(stage: int, folder: Path, steps: int, resume: bool = False) -> Run:
    trainer = trainer_of(stage, folder, steps)
    trainer.train(resume_from_checkpoint=resume)
    engine = trainer.deepspeed
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    compression = engine.communication_compression
    found = Run(parameters_sha256(engine), losses, compression.training.step, compression.stats.total)
    engine.destroy()
    return found


def train_stop_and_resume(stage: int) -> None:
    """A run, and another one that is stopped in the middle and resumed."""
    whole = run(stage, folder() / "whole", STEPS)
    assert whole.total.compressed_calls == whole.total.calls > 0 and whole.total.ratio > 3
    assert whole.step == STEPS
    assert all(loss < 1.5 for loss in whole.losses)
    same_on_all_ranks(whole.sha256)

    stopped = run(stage, folder() / "parts", STOP)
    dist.barrier()
    resumed = run(stage, folder() / "parts", STEPS, resume=True)
    assert resumed.sha256 == whole.sha256 != stopped.sha256
    assert resumed.losses == whole.losses
    assert (stopped.step, resumed.step) == (STOP, STEPS)
    end_together()


def end_together() -> None:
    """A rank that leaves early can abort the others."""
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_run_that_the_trainer_resumes_has_the_bits_of_one_that_was_not_stopped(stage, tmp_path):
    on_ranks(2, train_stop_and_resume, tmp_path, stage, **HOW)


# ---------------------------------------------------------------- Accelerate


def train_in_a_loop() -> None:
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState

    PartialState(cpu=True)  # as the Trainer does: without it, Accelerate runs DeepSpeed on GPUs only
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 2},
        KEY: {"transport": {"min_bytes": 0}},
    }
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(INPUTS, 257), torch.nn.GELU(), torch.nn.Linear(257, OUTPUTS))
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(3 * BATCH * accelerator.num_processes, INPUTS)
    loader = torch.utils.data.DataLoader(inputs, batch_size=BATCH)
    engine, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert len(loader) == 3
    for batch in loader:
        with accelerator.accumulate(engine):
            accelerator.backward(engine(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    compression = engine.communication_compression
    total = compression.stats.total
    assert compression.training.step == 3
    assert total.compressed_calls == total.calls > 0 and total.ratio > 3
    same_on_all_ranks(parameters_sha256(engine))
    end_together()


def test_a_loop_of_accelerate_with_a_deepspeed_plugin(tmp_path):
    on_ranks(2, train_in_a_loop, tmp_path, **HOW)
