"""Tiny random models of the families that tests run, made and saved by transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers

SMALL = dict(vocab_size=320, hidden_size=48, intermediate_size=80, num_hidden_layers=3, max_position_embeddings=256)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2)
NO_STOP = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)

NATIVE = {
    "llama": transformers.LlamaConfig(**SMALL, **HEADS, **NO_STOP),
    "mistral": transformers.MistralConfig(**SMALL, **HEADS, **NO_STOP, sliding_window=11),
    "qwen2": transformers.Qwen2Config(**SMALL, **HEADS, **NO_STOP),
    "qwen3": transformers.Qwen3Config(**SMALL, **HEADS, **NO_STOP, head_dim=16),
}
ADAPTED = {
    "gpt2": transformers.GPT2Config(vocab_size=320, n_embd=48, n_layer=2, n_head=4, n_positions=256, **NO_STOP),
    "gpt_neox": transformers.GPTNeoXConfig(**SMALL, num_attention_heads=4, **NO_STOP),
    "gemma": transformers.GemmaConfig(**SMALL, **HEADS, **NO_STOP, head_dim=16),
}

SLIDING, FULL = "sliding_attention", "full_attention"
HYBRID = {
    "qwen2_hybrid": transformers.Qwen2Config(
        **SMALL | {"num_hidden_layers": 4}, **HEADS, **NO_STOP, use_sliding_window=True, sliding_window=10,
        layer_types=[FULL, SLIDING, FULL, SLIDING],
    ),
    "qwen3_hybrid": transformers.Qwen3Config(
        **SMALL | {"num_hidden_layers": 4}, **HEADS, **NO_STOP, head_dim=16, use_sliding_window=True,
        sliding_window=7, layer_types=[SLIDING, SLIDING, FULL, SLIDING],
    ),
    "gemma3_text": transformers.Gemma3TextConfig(
        **SMALL | {"num_hidden_layers": 6}, **HEADS, **NO_STOP, head_dim=16, sliding_window=9,
        query_pre_attn_scalar=16, layer_types=[SLIDING] * 5 + [FULL],
    ),
}  # fmt: skip
"""Windows in some layers; the last one runs through the adapter."""


def ids(length: int, seed: int = 0, vocab: int = SMALL["vocab_size"]) -> list[int]:
    """Random token ids that every family has."""
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


def save_family(family: str, directory: Path) -> transformers.PreTrainedModel:
    """Make the family's model, save it to `directory`, and return it."""
    torch.manual_seed(sum(map(ord, family)))
    model = transformers.AutoModelForCausalLM.from_config((NATIVE | ADAPTED | HYBRID)[family]).eval()
    # NOTE: the default initialisation is so small that logits hardly differ; ties would hide errors.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    model.save_pretrained(directory)
    return model
