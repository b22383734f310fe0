"""A small Llama for tests with the engines of others, and what a trainer does with it."""

import torch


def small_llama(tied: bool):
    """A Llama with grouped queries, in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=tied, **sizes, **heads)).bfloat16()


def train_a_step(model, seed: int, rate: float = 1e-4) -> None:
    """A step of AdamW on random tokens."""
    tokens = torch.randint(2, model.config.vocab_size, (4, 16), generator=torch.Generator().manual_seed(seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def weights_of(model) -> dict[str, torch.Tensor]:
    """Copies of all parameters."""
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def are_equal(weights: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two models have the same parameters, to the bit."""
    return weights.keys() == other.keys() and all(torch.equal(each, other[name]) for name, each in weights.items())
