"""A generator process: it holds a Hugging Face model, follows a trainer by patches of its weights, and generates.

`start` makes the process; `train_grpo.py` is a trainer for it. The trainer's request is a line of JSON, and a patch
follows it as bytes. Nothing is unpickled.
"""

import hashlib
import json
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ncz_plugins import MismatchError, stage_patch


def start(folder: str) -> tuple[Connection, BaseProcess]:
    """Start a generator with the model that `folder` has, in bfloat16. Returns the trainer's end of the connection."""
    context = get_context("spawn")
    ours, its = context.Pipe()
    process = context.Process(target=generator, args=(its, folder), daemon=True)
    process.start()
    its.close()  # so that `recv_bytes` ends if the generator dies
    return ours, process


def ask(connection: Connection, request: dict, patch: bytes | None = None) -> dict:
    """Send a generator a request, and a patch if it is an update. Returns its answer; EOFError if it has died."""
    connection.send_bytes(json.dumps(request).encode())
    if patch is not None:
        connection.send_bytes(patch)
    return json.loads(connection.recv_bytes())


def generator(connection: Connection, folder: str) -> None:
    """Answer the trainer until it ends."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    versions = None
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except EOFError:  # the trainer has ended
            return
        if request.pop("do") == "generate":
            answer = generate(model, **request)
        else:
            answer, versions = update(model, connection.recv_bytes(), versions)
        connection.send_bytes(json.dumps(answer).encode())


def update(model: PreTrainedModel, patch: bytes, versions: tuple[int, ...] | None) -> tuple[dict, tuple | None]:
    """Write a patch into the model. Returns the answer, and the version that the model is then."""
    weights = dict(model.named_parameters())
    try:
        staged = stage_patch(patch, weights, versions=versions)  # decodes and checks all of it, writes nothing
    except MismatchError as error:  # the model is another version than the one that the patch is for
        return {"stale": str(error)}, versions
    staged.apply()
    return {"sha256": digest(weights)}, staged.versions


@torch.no_grad()
def generate(model: PreTrainedModel, prompts: list[list[int]], tokens: int, sample: bool = True) -> dict[str, list]:
    """Complete prompts, all of one length. Returns tokens and the logarithms of their probabilities."""
    inputs = torch.tensor(prompts)
    options = {"max_new_tokens": tokens, "do_sample": sample, "return_dict_in_generate": True, "output_logits": True}
    made = model.generate(inputs, attention_mask=torch.ones_like(inputs), **options)
    new = made.sequences[:, inputs.shape[1] :]
    logprobs = torch.stack(made.logits, 1).float().log_softmax(-1).gather(-1, new[..., None])[..., 0]
    # What follows the first end-of-sequence token is padding.
    is_end = new == model.generation_config.eos_token_id
    is_kept = is_end.int().cumsum(1) - is_end.int() == 0
    return {
        "completion_ids": [row[kept].tolist() for row, kept in zip(new, is_kept)],
        "logprobs": [row[kept].tolist() for row, kept in zip(logprobs, is_kept)],
    }


def digest(weights: dict[str, torch.Tensor]) -> str:
    """SHA-256 of all weights: what the trainer compares. A patch has checksums, so this is for show."""
    found = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        found.update(name.encode() + tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
