"""The requests of the offline benchmarks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

MAX_STEP_TOKENS = 2048
"""Of the engine, where nobody asks for another number."""


@dataclass(frozen=True)
class Workload:
    """Requests of a benchmark.

    Attributes:
        model: a preset.
        prompts: token ids of each prompt.
        outputs: tokens to generate for each.
        temperature: of all.
        max_rows, max_model_len, max_step_tokens: of the engine.
    """

    model: str
    prompts: list[list[int]]
    outputs: list[int]
    temperature: float
    max_rows: int
    max_model_len: int
    max_step_tokens: int = MAX_STEP_TOKENS

    def blocks(self, block_size: int) -> int:
        """The blocks of a cache in which the longest `max_rows` requests run at once, the dummy block among them."""
        lengths = [len(prompt) + new for prompt, new in zip(self.prompts, self.outputs, strict=True)]
        return 1 + sum(sorted((-(-length // block_size) for length in lengths), reverse=True)[: self.max_rows])


def article(new_tokens: int) -> Workload:
    """The published comparison: 32 requests with prompts of 128 tokens."""
    rng = random.Random(0)
    prompts = [[rng.randint(10, 100000) for _ in range(128)] for _ in range(32)]
    return Workload("llama-3.1-8b", prompts, [new_tokens] * 32, 0.0, max_rows=32, max_model_len=8192 + 256)


def rollouts(new_tokens: int) -> Workload:
    """Long continuations: 32 requests with prompts of 256 tokens."""
    rng = random.Random(0)
    prompts = [[rng.randint(10, 15999) for _ in range(256)] for _ in range(32)]
    return Workload("llama-3.1-8b", prompts, [new_tokens] * 32, 0.0, max_rows=32, max_model_len=new_tokens + 256)


def small() -> Workload:
    """A small model, 256 requests with prompts and outputs of 100 to 1,024 tokens."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    outputs = [rng.randint(100, 1024) for _ in range(256)]
    return Workload("qwen3-0.6b", prompts, outputs, 0.6, max_rows=256, max_model_len=4096, max_step_tokens=16384)


def gsm8k() -> Workload:
    """Many short prompts, 256 new tokens each; there are rows for all."""
    rng = random.Random(0)
    prompts = [[rng.randint(10, 9999) for _ in range(rng.randint(40, 148))] for _ in range(1319)]
    outputs = [256] * 1319
    return Workload("llama-3.1-8b", prompts, outputs, 0.0, max_rows=1319, max_model_len=1024, max_step_tokens=4096)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "article": lambda: article(8192),
    "article-512": lambda: article(512),
    "rollouts-1024": lambda: rollouts(1024),
    "rollouts-2048": lambda: rollouts(2048),
    "rollouts-4096": lambda: rollouts(4096),
    "rollouts-16384": lambda: rollouts(16384),
    "small": small,
    "gsm8k": gsm8k,
}
