"""GRPO by TRL on a tiny model, with a generator process that follows the trainer by patches of its weights.

    pip install trl
    python examples/train_grpo.py [--steps 4] [--rate 1e-3]

The trainer has float32 weights, the generator (generator.py) the same ones in bfloat16. Whenever TRL asks for
completions after a step, the generator gets what has changed, writes it into its model, and generates. Nothing is
downloaded: the model and its tokenizer are made here. A line says what a version took, and whether the generator then
has the trainer's weights to the bit.
"""

import argparse
import random
import tempfile
from multiprocessing.connection import Connection

import torch
from datasets import Dataset
from generator import ask, digest, start
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from ncz_plugins import WeightPublisher


class Rollouts:
    """What GRPOTrainer calls for completions: brings the generator's weights up to date, and lets it generate.

    Args:
        connection: to the generator.
        weights: what the generator has at first.
    """

    def __init__(self, connection: Connection, weights: dict[str, torch.Tensor]):
        self.connection, self.publisher = connection, WeightPublisher(base=weights)
        self.step = 0  # which step's weights the generator has

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
        if trainer.state.global_step != self.step:
            self.publish(bfloat16(trainer.model))
            self.step = trainer.state.global_step
        tokens = trainer.processing_class(prompts)["input_ids"]
        made = ask(self.connection, {"do": "generate", "prompts": tokens, "tokens": trainer.max_completion_length})
        return {"prompt_ids": tokens, **made}

    def publish(self, weights: dict[str, torch.Tensor]) -> None:
        """Send what has changed since the last version."""
        before = self.publisher.identity
        self.publisher.publish(weights)
        patch = self.publisher.patch(before)
        answer = ask(self.connection, {"do": "update"}, patch)
        if "stale" in answer:
            patch = self.publisher.patch()  # the whole version
            answer = ask(self.connection, {"do": "update"}, patch)
            if "stale" in answer:
                raise RuntimeError(f"the generator has another model: {answer['stale']}")
        size, whole = len(patch), sum(each.nbytes for each in weights.values())
        same = "yes" if answer["sha256"] == digest(weights) else "no"
        print(f"{size:,} bytes, {whole / size:.1f} times fewer than all weights; the same bits: {same}")


def bfloat16(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights as the generator has them. `named_parameters` names tied weights once, `state_dict` twice."""
    return {name: parameter.detach().to(torch.bfloat16) for name, parameter in model.named_parameters()}


def vowels(completions: list[str], **columns) -> list[float]:
    """The reward: the share of vowels."""
    return [sum(letter in "aeiou" for letter in each) / max(len(each), 1) for each in completions]


def tiny_model(folder: str) -> PreTrainedTokenizerFast:
    """Save a model with tied weights, whose tokens are letters. Returns its tokenizer."""
    letters = {each: number for number, each in enumerate(["<pad>", "</s>", *"abcdefghijklmnopqrstuvwxyz"])}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(letters), tie_word_embeddings=True, eos_token_id=1, pad_token_id=0, **sizes)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = tiny_model(folder)
        connection, process = start(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        rollouts = Rollouts(connection, bfloat16(model))
        train(model, tokenizer, rollouts, folder, arguments)
        rollouts.publish(bfloat16(model))
        connection.close()
        process.join()


def train(model: LlamaForCausalLM, tokenizer, rollouts: Rollouts, folder: str, arguments) -> None:
    chosen = random.Random(0)
    prompts = ["".join(chosen.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(64)]
    config = GRPOConfig(
        f"{folder}/out",
        max_steps=arguments.steps,
        learning_rate=arguments.rate,
        lr_scheduler_type="constant",
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=12,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=vowels,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        rollout_func=rollouts,
    )
    trainer.train()


if __name__ == "__main__":
    main()
