"""Generators that follow a trainer by patches: a process with a Hugging Face model, alone and under TRL's GRPO."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from on_rank import folder, raises
from repository import ROOT
from scenarios import on_ranks
from small_llama import train_a_step

from ncz_plugins import MismatchError, WeightPublisher, stage_patch

pytestmark = [
    pytest.mark.slow,
    # Looked for and not imported, which takes seconds: only other processes need it.
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]
sys.path.insert(0, str(ROOT / "examples"))  # for ranks
HOW = {"imports": "scenarios,transformers.models.llama.modeling_llama,transformers.generation.utils"}
RATE = 1e-2  # so large that what is generated becomes another
PROMPTS, TOKENS = [[5, 6, 7], [8, 9, 10]], 8
VERSIONS, LOST = 5, 2  # the latter: which version's patch does not arrive


def saved_model(path: str):
    """A small Llama whose head is its embedding, in bfloat16, saved to `path`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=50, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0, **sizes)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(path)
    return model


def patch_to(publisher: WeightPublisher, model) -> bytes:
    """Publish a model's weights. Returns the changes since the version before."""
    before = publisher.identity
    publisher.publish(dict(model.named_parameters()))
    return publisher.patch(before)


def are_alike(made: dict, other: dict) -> bool:
    """Whether two answers are those of the same weights, which in bfloat16 don't always give the same bits."""
    firsts = [(each[0], its[0]) for each, its in zip(made["logprobs"], other["logprobs"])]
    return all(abs(each - its) < 0.01 for each, its in firsts)


# ------------------------------------------------------------------ a process with a Hugging Face model


def follow() -> list[dict]:
    """What a trainer and the generator of examples/generator.py see. Both begin with the same checkpoint."""
    from generator import ask, digest, generate, start

    model = saved_model(str(folder() / "model"))
    connection, process = start(str(folder() / "model"))
    publisher = WeightPublisher(base=dict(model.named_parameters()))
    request = {"do": "generate", "prompts": PROMPTS, "tokens": TOKENS, "sample": False}
    seen = [{"generated": ask(connection, request)}]
    for number in range(VERSIONS):
        train_a_step(model, number, RATE)
        patch = patch_to(publisher, model)
        if number == LOST:
            continue
        answer = ask(connection, {"do": "update"}, patch)
        found = {"bytes": len(patch), "stale": "stale" in answer, "before": ask(connection, request)}
        if found["stale"]:
            answer = ask(connection, {"do": "update"}, publisher.patch())
        same = answer["sha256"] == digest(dict(model.named_parameters()))
        own = generate(model, PROMPTS, TOKENS, sample=False)
        seen.append(found | {"same": same, "own": own, "generated": ask(connection, request)})
    seen[0]["whole"] = sum(each.nbytes for each in model.parameters())
    connection.close()
    process.join(60)
    assert process.exitcode == 0, process.exitcode
    return seen


def test_a_generator_has_every_version_and_recovers_from_a_patch_that_was_lost(tmp_path):
    [[first, *seen]] = on_ranks(1, follow, tmp_path, **HOW)
    generated = [first["generated"]]
    for found in seen:
        assert found["same"] and are_alike(found["generated"], found["own"])
        assert not are_alike(found["generated"], generated[-1])
        assert found["bytes"] < first["whole"]
        if found["stale"]:
            assert are_alike(found["before"], generated[-1])  # a patch that does not fit changes nothing
        generated.append(found["generated"])
    assert [found["stale"] for found in seen] == [number == LOST for number in range(VERSIONS - 1)]


def stage_and_apply() -> None:
    """A patch that is staged changes nothing. Once applied, the parameters are the same objects, and still tied."""
    from generator import generate
    from transformers import AutoModelForCausalLM

    model = saved_model(str(folder() / "model"))
    ours = AutoModelForCausalLM.from_pretrained(folder() / "model", dtype=torch.bfloat16)
    places = {name: each.data_ptr() for name, each in ours.state_dict().items()}
    publisher = WeightPublisher()
    publisher.publish(model.state_dict())  # which names tied weights twice
    versions = None
    for number in range(2):
        before, old = publisher.identity, generate(ours, PROMPTS, TOKENS, sample=False)
        train_a_step(model, number, RATE)
        publisher.publish(model.state_dict())
        staged = stage_patch(publisher.patch(before), ours.state_dict(), decoded=True, versions=versions)
        assert are_alike(generate(ours, PROMPTS, TOKENS, sample=False), old)
        staged.apply()
        versions = staged.versions
        new = generate(ours, PROMPTS, TOKENS, sample=False)
        assert are_alike(new, generate(model, PROMPTS, TOKENS, sample=False)) and not are_alike(new, old)
    assert all(torch.equal(ours.state_dict()[name], each) for name, each in model.state_dict().items())
    assert places == {name: each.data_ptr() for name, each in ours.state_dict().items()}
    assert places["lm_head.weight"] == places["model.embed_tokens.weight"]
    # A trainer that casts both names of a tied weight has two weights. The generator has one.
    cast = WeightPublisher()
    cast.publish({name: each.clone() for name, each in model.state_dict().items()})
    raises(MismatchError, lambda: stage_patch(cast.patch(), ours.state_dict()), "shares its memory")


def test_weights_change_between_two_calls_of_generate_and_stay_tied(tmp_path):
    on_ranks(1, stage_and_apply, tmp_path, **HOW)


# ------------------------------------------------------------------ TRL


@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
def test_grpo_by_trl_with_a_separate_generator(tmp_path):
    """The generator has the weights of each step, in fewer bytes, and TRL takes what it generates."""
    steps = 3
    environment = os.environ | {"HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "train_grpo.py", "--steps", str(steps), "--rate", "1e-4"]
    done = subprocess.run(command, cwd=ROOT / "examples", env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert "'num_tokens'" in done.stdout, done.stdout
    versions = re.findall(r"([\d,]+) bytes, ([\d.]+) times fewer than all weights; the same bits: (\w+)", done.stdout)
    assert len(versions) == steps, done.stdout
    for _, times, same in versions:
        assert same == "yes" and float(times) > 2, done.stdout
