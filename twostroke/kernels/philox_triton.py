"""Philox4x32-10 and Gumbel noise as Triton device functions; `philox` says what they compute and from where."""

# mypy: allow-untyped-defs

import math

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

_TWO_THIRDS_BITS = tl.constexpr(0x3F2AAAAB)
_EXPONENT_BITS = tl.constexpr(-0x800000)
_MINUS_LOG_2 = tl.constexpr(-math.log(2) / 0x800000)


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
def _scale_and_rest(x):
    """Of normal floats > 0: n * 2 ** 23 (int32) and x / 2 ** n - 1, which lies in [-1/3, 1/3)."""
    bits = x.to(tl.int32, bitcast=True)
    scale = (bits - _TWO_THIRDS_BITS) & _EXPONENT_BITS
    return scale, (bits - scale).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def _minus_log(scale, rest):
    """-log(2 ** n * (1 + rest)); the polynomial is that of log(1 + x) = x + x ** 2 * p with the least error, 3e-8."""
    p = -0.15372743 + rest * 0.143741
    p = -0.1641935 + rest * (0.13920924 + rest * p)
    p = -0.250075996 + rest * (0.20016059 + rest * p)
    p = -0.4999994 + rest * (0.33333105 + rest * p)
    return scale.to(tl.float32) * _MINUS_LOG_2 - (rest + rest * rest * p)


@triton.jit
def gumbel(words):
    """Standard Gumbel noise, float32, from uint32 words."""
    steps = (words >> _SHIFT).to(tl.int32)
    upper = steps >= _HALF
    nearest_end = (tl.minimum(steps, 2 * _HALF - 1 - steps).to(tl.float32) + 0.5) * _ULP
    scale, rest = _scale_and_rest(tl.where(upper, 1.0 - nearest_end, nearest_end))
    # NOTE: 1.0 - nearest_end is rounded, which near 1 would be too much for its logarithm.
    rest = tl.where(upper & (scale == 0), -nearest_end, rest)
    scale, rest = _scale_and_rest(_minus_log(scale, rest))
    return _minus_log(scale, rest)
