"""The floor of a workload: the time that the machine's ceilings allow, whatever the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Cost:
    """What a model must read and compute.

    Attributes:
        weight_bytes: read once in every step.
        kv_bytes: of one token, over all layers; read once per earlier token of a row in every step.
        token_flop: of one token's matrix products.
        attention_flop: of one token's attention to one position, over all layers.
    """

    weight_bytes: int
    kv_bytes: int
    token_flop: float
    attention_flop: float


@dataclass(frozen=True)
class Floor:
    """Attributes:
    seconds: sum over steps of the larger of reading time and computing time.
    read_bytes: what the steps have to read.
    """

    seconds: float
    read_bytes: float


def floor_of(cost: Cost, prompts: np.ndarray, outputs: np.ndarray, read_bytes_per_s: float, flop_per_s: float) -> Floor:
    """The floor of requests that all run at once.

    The first step takes all prompts; step k > 0 decodes one token of each request that has more than k outputs, and
    reads the weights and the KV cache of those requests.

    Args:
        prompts, outputs: tokens of each request, int [N].
        read_bytes_per_s, flop_per_s: ceilings.
    """
    prompt_tokens = float(prompts.sum())
    prompt_flop = cost.token_flop * prompt_tokens + cost.attention_flop * float((prompts.astype(float) ** 2).sum()) / 2
    read = [float(cost.weight_bytes)]
    flop = [prompt_flop]
    for k in range(1, int(outputs.max())):
        alive = outputs > k
        rows, positions = int(alive.sum()), float((prompts[alive] + k).sum())
        read.append(cost.weight_bytes + cost.kv_bytes * positions)
        flop.append(cost.token_flop * rows + cost.attention_flop * positions)
    seconds = np.maximum(np.array(read) / read_bytes_per_s, np.array(flop) / flop_per_s)
    return Floor(float(seconds.sum()), float(sum(read)))


def mixed_floor(
    cost: Cost,
    *,
    rows: int,
    length: int,
    steps: int,
    prompts: np.ndarray,
    read_bytes_per_s: float,
    flop_per_s: float,
) -> Floor:
    """The floor of `steps` steps in which `rows` rows decode and `prompts` are taken, spread evenly over the steps.

    No other way to share the prompts out needs less time: a step's time is a convex function of its prompt tokens.

    Args:
        length: KV positions of each row in the first step.
        prompts: tokens of each prompt, int [N].
        read_bytes_per_s, flop_per_s: ceilings.
    """
    positions = rows * (length + np.arange(steps, dtype=float))
    prompt_flop = float((cost.token_flop * prompts + cost.attention_flop * prompts.astype(float) ** 2 / 2).sum())
    read = cost.weight_bytes + cost.kv_bytes * positions
    flop = cost.token_flop * rows + cost.attention_flop * positions + prompt_flop / steps
    seconds = np.maximum(read / read_bytes_per_s, flop / flop_per_s)
    return Floor(float(seconds.sum()), float(read.sum()))


def mixed_floor_steps(seconds: float, cost: Cost, **mixed: Any) -> int:
    """The most steps whose `mixed_floor` fits into `seconds`; `mixed` are its arguments, but for their number."""
    low, high = 1, 2
    while mixed_floor(cost, steps=high, **mixed).seconds <= seconds:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        fits = mixed_floor(cost, steps=middle, **mixed).seconds <= seconds
        low, high = (middle, high) if fits else (low, middle)
    return low
