"""A model that says given tokens, and a small one that has the default model's tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from twostroke import Engine


class Scripted:
    """Makes a model say given tokens, whatever it would say itself; beyond them, the last for ever.

    Args:
        prompt_len: tokens of each prompt.
        ids: the tokens; None stands for logits that are NaN.
    """

    def __init__(self, engine: Engine, prompt_len: int, ids: Sequence[int | None]) -> None:
        self.model: Any = engine.model
        self.prompt_len, self.ids = prompt_len, ids
        self.original = self.model.forward

    def forward(self, step: Any, attention: Any) -> torch.Tensor:
        logits = self.original(step, attention)
        positions = step.positions if step.sample_index is None else step.positions[step.sample_index]
        for row, position in enumerate(positions.tolist()):
            token = self.ids[min(max(position + 1 - self.prompt_len, 0), len(self.ids) - 1)]
            if token is None:
                logits[row] = torch.nan
            else:
                logits[row, token] = 1e4
        return logits

    def __enter__(self) -> Scripted:
        self.model.forward = self.forward
        return self

    def __exit__(self, *exc: object) -> None:
        del self.model.forward


def save_small(tokenizer_dir: Path, directory: Path, vocab_size: int = 49152) -> Path:
    """Save a small random Llama with the tokenizer of `tokenizer_dir`, whose end-of-sequence id it has too.

    A smaller vocabulary has the first tokens of the whole one: special tokens, single bytes, and what was merged first.
    """
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer_dir / name, directory / name)
    settings = json.loads((directory / "tokenizer.json").read_text())
    vocab = {token: id_ for token, id_ in settings["model"]["vocab"].items() if id_ < vocab_size}
    merges = [merge for merge in settings["model"]["merges"] if "".join(merge) in vocab]
    settings["model"] |= {"vocab": vocab, "merges": merges}
    (directory / "tokenizer.json").write_text(json.dumps(settings))
    return directory
