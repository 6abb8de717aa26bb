"""Philox4x32-10 in PyTorch: random numbers as a pure function of a 64-bit key and a 128-bit counter.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011). The same stream comes from
`philox_triton`.

The word of a token, or of a split (`SPLIT` tokens in a row of the vocabulary): key = the sample's seed (low, high
half), counter = (output index low, output index high, number // 4, purpose), and of the four result words the one
numbered number % 4; the number is the token's id, or counts the splits.
"""

from __future__ import annotations

import torch

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF

PURPOSE_TOKEN, PURPOSE_SPLIT = 0, 1
"""The counter's fourth word when the numbers draw a token of a split, and when they draw the split."""

SPLIT = 4096
"""Tokens of a split. Another size would give other tokens for the same seeds."""

MIN_GUMBEL = -2.8526
MAX_GUMBEL = 17.3287
"""Bounds of `gumbel`: -log(25 log 2) and 25 log 2, rounded outwards."""

UNIFORM_BITS = 24
HALF = 1 << (UNIFORM_BITS - 1)
ULP = 2.0**-UNIFORM_BITS


def philox(
    key: tuple[torch.Tensor | int, torch.Tensor | int],
    counter: tuple[torch.Tensor | int, torch.Tensor | int, torch.Tensor, torch.Tensor | int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four words per counter, int64 in [0, 2**32).

    Every part of `key` and `counter` is an int or an int64 tensor in [0, 2**32), of one shape; the third part of the
    counter is a tensor, its shape is the result's.
    """
    c0, c1, c2, c3 = (torch.as_tensor(part, device=counter[2].device).expand_as(counter[2]) for part in counter)
    k0, k1 = key
    for _ in range(ROUNDS):
        # NOTE: the product wraps into the sign bit; the shift is arithmetic, so its upper half is cut off by the mask.
        even, odd = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c2 = (odd >> 32).bitwise_and_(WORD) ^ c1 ^ k0, (even >> 32).bitwise_and_(WORD) ^ c3 ^ k1
        c1, c3 = odd.bitwise_and_(WORD), even.bitwise_and_(WORD)
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return c0, c1, c2, c3


def gumbel(words: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32, of the same shape: -log(-log u) with u = ((word >> 8) + 0.5) * 2**-24 exactly.

    Args:
        words: int64 in [0, 2**32).

    Above 1/2 float32 cannot hold u, and would round the largest to 1 (an infinite draw once in 2**24), so there
    v = 1 - u, which it can hold, and log1p take its place.
    """
    steps = (words >> (32 - UNIFORM_BITS)).float()
    nearest_end = torch.minimum(steps, 2 * HALF - 1 - steps).add_(0.5).mul_(ULP)
    return -torch.log(-torch.where(steps >= HALF, torch.log1p(-nearest_end), torch.log(nearest_end)))
