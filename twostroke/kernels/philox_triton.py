"""Philox4x32-10 and Gumbel noise as Triton device functions; `philox` says what they compute and from where."""

# mypy: allow-untyped-defs

import triton
import triton.language as tl

from . import philox

_ROUNDS = tl.constexpr(philox.ROUNDS)
_MULTIPLIER_0 = tl.constexpr(philox.MULTIPLIERS[0])
_MULTIPLIER_1 = tl.constexpr(philox.MULTIPLIERS[1])
_KEY_STEP_0 = tl.constexpr(philox.KEY_STEPS[0])
_KEY_STEP_1 = tl.constexpr(philox.KEY_STEPS[1])
_SHIFT = tl.constexpr(32 - philox.UNIFORM_BITS)
_HALF = tl.constexpr(philox.HALF)
_ULP = tl.constexpr(philox.ULP)


@triton.jit
def philox_words(k0, k1, c0, c1, c2, c3):
    """Four uint32 words per counter. All arguments are uint32 tensors, c0 to c3 of one shape, k0 and k1 scalars."""
    for _ in tl.static_range(_ROUNDS):
        even, odd = c0, c2
        c0 = tl.umulhi(odd, _MULTIPLIER_1) ^ c1 ^ k0
        c2 = tl.umulhi(even, _MULTIPLIER_0) ^ c3 ^ k1
        c1 = tl.mul(odd, _MULTIPLIER_1, sanitize_overflow=False)
        c3 = tl.mul(even, _MULTIPLIER_0, sanitize_overflow=False)
        k0 = tl.add(k0, _KEY_STEP_0, sanitize_overflow=False)
        k1 = tl.add(k1, _KEY_STEP_1, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def numbered_words(seed_low, seed_high, output_index, quads, purpose: tl.constexpr):
    """One uint32 word per token or split of the groups of four `quads` (int32 [N]), in order: [4 N].

    The seed halves and the output index are int32 scalars.
    """
    c2 = quads.to(tl.uint32)
    zero = c2 * 0
    w0, w1, w2, w3 = philox_words(
        seed_low.to(tl.uint32, bitcast=True),
        seed_high.to(tl.uint32, bitcast=True),
        zero + output_index.to(tl.uint32, bitcast=True),
        zero,
        c2,
        zero + purpose,
    )
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def gumbel(words):
    """Standard Gumbel noise, float32, from uint32 words.

    In the upper half log1p(-v) is log(w) * v / (1 - w) with w = 1 - v rounded: the rounding error of w cancels
    (Higham, "Accuracy and Stability of Numerical Algorithms", 1.14.1).
    """
    steps = (words >> _SHIFT).to(tl.int32)
    upper = steps >= _HALF
    nearest_end = (tl.minimum(steps, 2 * _HALF - 1 - steps).to(tl.float32) + 0.5) * _ULP
    rounded = 1.0 - nearest_end
    minus_log = -tl.log(tl.where(upper, rounded, nearest_end))
    # NOTE: where `rounded` is 1 the quotient would be 0 / 0, and v itself is the answer to within half an ulp.
    is_one = rounded == 1.0
    corrected = minus_log * (nearest_end / tl.where(is_one, 1.0, 1.0 - rounded))
    return -tl.log(tl.where(upper, tl.where(is_one, nearest_end, corrected), minus_log))
