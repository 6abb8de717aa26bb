"""Comparison with transformers on the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from transformers import PreTrainedModel

from twostroke import RequestOutput

TIE = 1e-3
"""Two best logits of the reference that are closer than this are a tie: rounding may choose either."""


def check_greedy(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> int:
    """Assert that `tokens` is what the reference would choose greedily after `prompt`; return the ties met.

    The reference sees the prompt and the tokens at once. At each position its best token must be the one chosen; where
    it is not, its two best logits must be closer than `TIE` and the other one chosen, and the comparison goes on.
    """
    best = _best_two(model, (*prompt, *tokens))[len(prompt) - 1 : -1]
    ties = 0
    for place, (token, ((first, second), gap)) in enumerate(zip(tokens, best, strict=True)):
        if token == first:
            continue
        assert token == second, f"token {place} is {token}, the reference has {first}"
        assert gap < TIE, f"token {place} is {token}, the reference has {first}, better by {gap}"
        ties += 1
    return ties


@lru_cache(1024)
@torch.inference_mode()
def _best_two(model: PreTrainedModel, ids: tuple[int, ...]) -> list[tuple[list[int], float]]:
    """The two best tokens after each of `ids`, and how much better the first is; kept, for other modes ask the same."""
    best = model(torch.tensor([ids], device=model.device)).logits[0].float().topk(2)
    return list(zip(best.indices.tolist(), (best.values[:, 0] - best.values[:, 1]).tolist(), strict=True))


def check(model: PreTrainedModel, outputs: Sequence[RequestOutput]) -> None:
    """Assert of each of `outputs` what `check_greedy` does, and that few of them met a tie."""
    ties = sum(check_greedy(model, output.prompt_token_ids, output.token_ids) for output in outputs)
    assert ties <= 1 + len(outputs) // 10
