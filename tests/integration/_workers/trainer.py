"""Hugging Face's Trainer under DeepSpeed: a run, and another one that is stopped in the middle and resumed.

usage: trainer.py STAGE...
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from common import finish, parameters_sha256, save
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import ncz_plugins.deepspeed  # noqa: F401

STEPS, STOP = 4, 2


def config_of(stage: int) -> dict:
    """With stochastic rounding and error feedback, for which a run that is resumed must know what went before."""
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage, "reduce_bucket_size": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
        "communication_compression": {
            "quantizer": {"kind": "stochastic", "error_feedback": True},
            "transport": {"min_bytes": 0},
        },
    }


def trainer_of(stage: int, folder: Path, steps: int) -> Trainer:
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


def run(stage: int, folder: Path, steps: int, resume: bool = False) -> dict:
    trainer = trainer_of(stage, folder, steps)
    trainer.train(resume_from_checkpoint=resume)
    engine = trainer.deepspeed
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    found = {"sha256": parameters_sha256(engine), "losses": losses}
    compression = engine.communication_compression
    found |= {"step": compression.training.step, "total": compression.stats.total.to_dict()}
    engine.destroy()
    return found


result = {}
for stage in map(int, sys.argv[1:]):
    whole, parts = Path(f"whole_{stage}"), Path(f"parts_{stage}")
    result[stage] = {"whole": run(stage, whole, STEPS), "stopped": run(stage, parts, STOP)}
    dist.barrier()
    result[stage]["resumed"] = run(stage, parts, STEPS, resume=True)
save(result)
finish()
