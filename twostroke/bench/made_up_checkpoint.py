"""A folder of files for a preset: random weights, and a made-up tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from ..model.presets import PRESETS
from .made_up_tokenizer import made_up_tokenizer


def save_made_up_checkpoint(preset: str, folder: Path, device: str, dtype: torch.dtype) -> None:
    """Write a model of the shape of `preset` to `folder`; the weights are drawn on `device`, always the same there."""
    settings = PRESETS[preset]
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text(made_up_tokenizer(settings["vocab_size"]).to_json())
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    generator = torch.Generator(device).manual_seed(0)
    weights = {
        name: torch.ones(weight.shape, dtype=dtype)
        if weight.dim() == 1
        else torch.empty(weight.shape, dtype=dtype, device=device)
        .normal_(0, settings["initializer_range"], generator=generator)
        .cpu()
        for name, weight in shape.named_parameters()
    }
    save_file(weights, folder / "model.safetensors")
