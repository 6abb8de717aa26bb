"""Comparison with transformers on the same weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from twostroke import RequestOutput

TIE = 1e-3
"""Two best logits of the reference that are closer than this are a tie: rounding may choose either."""


@torch.inference_mode()
def check_greedy(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> int:
    """Assert that `tokens` is what the reference would choose greedily after `prompt`; return the ties met.

    The reference sees the prompt and the tokens at once. At each position its best token must be the one chosen; where
    it is not, its two best logits must be closer than `TIE` and the other one chosen, and the comparison goes on.
    """
    ids = torch.tensor([[*prompt, *tokens]], device=model.device)
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    best = logits.topk(2)
    ties = 0
    for place, token in enumerate(tokens):
        first, second = best.indices[place].tolist()
        if token == first:
            continue
        gap = float(best.values[place, 0] - best.values[place, 1])
        assert token == second, f"token {place} is {token}, the reference has {first}"
        assert gap < TIE, f"token {place} is {token}, the reference has {first}, better by {gap}"
        ties += 1
    return ties


def check(model: PreTrainedModel, outputs: Sequence[RequestOutput]) -> None:
    """Assert of each of `outputs` what `check_greedy` does, and that few of them met a tie."""
    ties = sum(check_greedy(model, output.prompt_token_ids, output.token_ids) for output in outputs)
    assert ties <= 1 + len(outputs) // 10
