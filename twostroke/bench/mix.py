"""The requests of `mixed`."""

from __future__ import annotations

from dataclasses import dataclass

WARM_UP_TOKENS = 16
"""Tokens of every decoding row before the first arrival."""


@dataclass(frozen=True)
class Mix:
    """The workload.

    Attributes:
        model: a preset.
        rows: samples that decode throughout, after prompts of `row_prompt` tokens.
        arrivals: prompts of `prompt` tokens, one every `every` seconds, one output token each.
        spare_rows: rows of the engine for arrivals that overlap.
        watched: decoding rows whose tokens are timed.
        max_model_len: of the engine; the decoding rows may not reach it.
        max_step_tokens: of the engine: how much of a prompt one step takes bounds the rows' waits.
    """

    model: str = "llama-3.1-8b"
    rows: int = 64
    row_prompt: int = 600
    arrivals: int = 100
    prompt: int = 2000
    every: float = 0.1
    spare_rows: int = 16
    watched: int = 4
    max_model_len: int = 8192
    max_step_tokens: int = 384
