"""What should be sampled: a small model in transformers, and a sampler that shares no line with the engine's."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers

from twostroke import SamplingParams

VOCAB = 257
"""No multiple of the four tokens that share a draw of the random numbers."""
EOS = (7, 256)


MASK = 0xFFFFFFFF
SLACK = 1e-4
"""How far the engine's rounding may move a logit against the edge of the kept set, and a probability against top_p."""
TIE = 1e-3
"""Two scores closer than this: rounding may choose either."""


def philox4x32(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10 on Python's integers (Salmon et al., SC 2011): four words."""
    c, k = list(counter), list(key)
    for _ in range(10):
        even, odd = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(odd >> 32) ^ c[1] ^ k[0], odd & MASK, (even >> 32) ^ c[3] ^ k[1], even & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


@functools.lru_cache(8192)
def gumbel_noise(seed: int, output_index: int, vocab: int) -> np.ndarray:
    """The noise of every token id, float64 [V]."""
    key = seed & MASK, seed >> 32
    low, high = output_index & MASK, output_index >> 32
    words = [philox4x32((low, high, quad, 0), key) for quad in range(-(-vocab // 4))]
    uniform = ((np.array(words, np.uint64).reshape(-1)[:vocab] >> np.uint64(8)) + 0.5) * 2.0**-24
    return -np.log(-np.log(uniform))


def scale(logits: np.ndarray, params: SamplingParams, barred: Sequence[int]) -> np.ndarray:
    """Logits over temperature, float64 [V], -inf at the ids in `barred`."""
    scaled = logits.astype(np.float64) / (params.temperature or 1.0)
    scaled[list(barred)] = -np.inf
    return scaled


def keep(scaled: np.ndarray, params: SamplingParams, slack: float = 0.0) -> np.ndarray:
    """Which tokens are kept, bool [V]; more of them with a positive slack, fewer with a negative one."""
    kept = np.isfinite(scaled)
    if 0 < params.top_k < len(scaled):
        kept &= scaled >= np.sort(scaled)[-params.top_k] - slack
    if params.top_p < 1:
        weights = np.where(kept, np.exp(scaled - scaled.max()), 0.0)
        order = np.argsort(-weights, kind="stable")
        reached = np.cumsum(weights[order]) / weights.sum() >= params.top_p + slack
        last = order[np.argmax(reached)] if reached.any() else order[-1]
        kept &= weights >= weights[last]
    if params.min_p > 0:
        kept &= scaled >= scaled.max() + np.log(params.min_p) - slack
    kept[scaled.argmax()] = True
    return kept & keep_typical(np.where(kept, scaled, -np.inf), params.typical_p + slack)


def keep_typical(scaled: np.ndarray, typical_p: float) -> np.ndarray:
    """Which tokens have a surprise near the entropy, bool [V]; all where typical_p is 1 or more."""
    if typical_p >= 1:
        return np.full(len(scaled), True)
    logarithms = scaled - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum())
    weights = np.exp(logarithms)
    entropy = -(weights * np.where(weights > 0, logarithms, 0.0)).sum()
    shift = np.abs(-logarithms - entropy)
    order = np.argsort(shift, kind="stable")
    last = order[np.argmax(np.cumsum(weights[order]) >= typical_p)]
    kept: np.ndarray = shift <= shift[last]
    return kept


def choices(logits: np.ndarray, params: SamplingParams, index: int, barred: Sequence[int] = ()) -> set[int]:
    """The tokens that may be drawn at an output index: one, or more where rounding may decide."""
    scaled = scale(logits, params, barred)
    if params.temperature == 0:
        return _winners(scaled)
    score = scaled + gumbel_noise(params.seed, index, len(scaled))
    found: set[int] = set()
    for slack in (-SLACK, 0.0, SLACK):
        found |= _winners(np.where(keep(scaled, params, slack), score, -np.inf))
    return found


def _winners(score: np.ndarray) -> set[int]:
    return set(np.flatnonzero(score >= score.max() - TIE).tolist())


class Reference:
    """A small random Llama with two end-of-sequence ids, saved in a directory."""

    def __init__(self, directory: Path) -> None:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.3,
            bos_token_id=None,
            eos_token_id=list(EOS),
            pad_token_id=None,
        )
        self.directory = directory
        self.model = transformers.AutoModelForCausalLM.from_config(config).eval()
        self.model.save_pretrained(directory)
        # NOTE: the modes are to give the same tokens, so all but the first find their logits here.
        self._forward = functools.lru_cache(1024)(self._forward_once)
        self.right_tokens: dict[tuple[object, ...], list[set[int]]] = {}
        """What others have worked out from these logits."""

    def logits(self, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """What each of `tokens` after `prompt` is drawn from, float32 [len(tokens), V]."""
        return self._forward((*prompt, *tokens))[len(prompt) - 1 : -1].clone()

    @torch.inference_mode()
    def _forward_once(self, ids: tuple[int, ...]) -> torch.Tensor:
        return self.model(torch.tensor([ids])).logits[0].float()

    def check(
        self, prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams, barred: Sequence[int] = ()
    ) -> None:
        """Assert that every token is the right one; those in `barred` may not come before min_tokens."""
        ties = 0
        logits = self.logits(prompt, tokens).numpy()
        for index, token in enumerate(tokens):
            allowed = choices(logits[index], params, index, barred if index < params.min_tokens else ())
            assert token in allowed, f"token {index} of {params} is {token}, not {allowed}"
            ties += len(allowed) > 1
        assert ties <= 1 + len(tokens) // 16


def make_prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return np.random.default_rng([length, seed]).integers(0, VOCAB, length).tolist()
