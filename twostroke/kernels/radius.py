"""Radii in Triton: how far from the largest logit the kept tokens of a row lie.

`sample.py` explains gaps. The bits of a float >= 0 are ordered like the float, so a radius is found by bisection on
them; each pass snaps both ends to gaps that occur, which ends it early. A pass reads the row's band, which lies in the
cache. Where that does not hold the radius, or not all of its tokens, a pass reads the row, but not the splits that lie
beyond the radius that it tries: their largest logits are known.
"""

# mypy: allow-untyped-defs

import math

import triton
import triton.language as tl

from .band import CAPACITY, weigh_band
from .barred_logits import gaps
from .splits import load_weights

_INFINITY = tl.constexpr(float("inf"))
_INFINITY_BITS = tl.constexpr(0x7F800000)
_LOG2_E = tl.constexpr(math.log2(math.e))
_CAPACITY = tl.constexpr(CAPACITY)


@triton.jit
def weigh_row(
    row_logits,
    vocab,
    stop_ids,
    stop_stride,
    num_barred,
    best,
    decay,
    values,
    num_splits,
    radius,
    SPLIT: tl.constexpr,
):
    """Weight of the tokens within the gap `radius`, the largest gap within it, the smallest beyond it (bits).

    A token weighs 2 ** (gap * decay): 1 without decay.
    """
    weights = tl.zeros((SPLIT,), tl.float32)
    within = tl.zeros((SPLIT,), tl.int32)
    beyond = tl.full((SPLIT,), _INFINITY_BITS, tl.int32)
    for split in range(0, num_splits):
        nearest = (best - tl.load(values + split)).to(tl.int32, bitcast=True)
        if nearest <= radius:
            ids = split * SPLIT + tl.arange(0, SPLIT)
            gap = gaps(row_logits, ids, vocab, stop_ids, stop_stride, num_barred, best)
            bits = gap.to(tl.int32, bitcast=True)
            inside = bits <= radius
            weights += tl.where(inside, tl.exp2(gap * decay), 0.0)
            within = tl.maximum(within, tl.where(inside, bits, 0))
            beyond = tl.minimum(beyond, tl.where(inside, _INFINITY_BITS, bits))
        else:
            beyond = tl.minimum(beyond, nearest)
    return tl.sum(weights, 0), tl.max(within, 0), tl.min(beyond, 0)


@triton.jit
def _weigh(
    banded,
    row_logits,
    vocab,
    stop_ids,
    stop_stride,
    num_barred,
    best,
    decay,
    values,
    position,
    num_splits,
    band,
    counts,
    radius,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """As `weigh_row`; `banded`: of the tokens in the row's band."""
    if banded:
        weight, within, beyond = weigh_band(
            band, position, num_splits, counts, best, decay, radius, SPLITS, SPLIT // SPLITS
        )
    else:
        weight, within, beyond = weigh_row(
            row_logits,
            vocab,
            stop_ids,
            stop_stride,
            num_barred,
            best,
            decay,
            values + position * num_splits,
            num_splits,
            radius,
            SPLIT,
        )
    return weight, within, beyond


@triton.jit
def _smallest_radius(
    banded,
    row_logits,
    vocab,
    stop_ids,
    stop_stride,
    num_barred,
    best,
    decay,
    values,
    position,
    num_splits,
    band,
    counts,
    target,
    far,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The smallest gap (bits) that occurs and within which the weight is at least `target`, or `far`.

    `near` and `far` are gaps that occur (or infinity); the answer lies between them, both included.
    """
    near = far * 0
    while near < far:
        middle = near + (far - near) // 2
        weight, within, beyond = _weigh(
            banded,
            row_logits,
            vocab,
            stop_ids,
            stop_stride,
            num_barred,
            best,
            decay,
            values,
            position,
            num_splits,
            band,
            counts,
            middle,
            SPLIT,
            SPLITS,
        )
        enough = weight >= target
        far = tl.where(enough, within, far)
        near = tl.where(enough, near, beyond)
    return far


@triton.jit
def find_radius(
    row_logits,
    vocab,
    stop_ids,
    stop_stride,
    num_barred,
    best,
    temperature,
    top_k,
    top_p,
    min_p,
    far,
    values,
    weights,
    inner,
    counts,
    position,
    num_splits,
    band,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The distance of the farthest token that a row keeps: by top_k, top_p within it, min_p; and whether the row's
    band holds all tokens that are kept beyond the near end of its bracket.

    Args:
        far: the far end of the row's bracket.
        values, weights: see `splits.py`.
        inner, counts: [SPLITS], of the row; see `band.py`.
    """
    most = tl.max(counts, 0)
    banded = most <= _CAPACITY
    farthest = -tl.log(min_p)
    decay = tl.div_rn(-_LOG2_E, temperature)
    radius = most * 0 + _INFINITY_BITS
    by_k = (top_k > 0) & (top_k < vocab)
    # NOTE: a band that min_p ends need not reach what the others ask for.
    ended = tl.div_rn(far, temperature) >= farthest
    if by_k:
        banded = banded & ((tl.sum(counts, 0) >= top_k) | (ended & ((top_p >= 1.0) | (far == _INFINITY))))
        radius = _smallest_radius(
            banded,
            row_logits,
            vocab,
            stop_ids,
            stop_stride,
            num_barred,
            best,
            0.0,
            values,
            position,
            num_splits,
            band,
            counts,
            top_k.to(tl.float32),
            radius,
            SPLIT,
            SPLITS,
        )
    if top_p < 1.0:
        if by_k:
            mass, _, _ = _weigh(
                banded,
                row_logits,
                vocab,
                stop_ids,
                stop_stride,
                num_barred,
                best,
                decay,
                values,
                position,
                num_splits,
                band,
                counts,
                radius,
                SPLIT,
                SPLITS,
            )
            target = top_p * mass
        else:
            mass = tl.sum(load_weights(values, weights, position, num_splits, best, decay, SPLITS), 0)
            target = top_p * mass
            missing = target - tl.sum(inner, 0)
            if banded:
                held, _, _ = weigh_band(
                    band, position, num_splits, counts, best, decay, radius, SPLITS, SPLIT // SPLITS
                )
                banded = (missing > 0.0) & (ended | (held >= missing))
            target = tl.where(banded, missing, target)
        radius = _smallest_radius(
            banded,
            row_logits,
            vocab,
            stop_ids,
            stop_stride,
            num_barred,
            best,
            decay,
            values,
            position,
            num_splits,
            band,
            counts,
            target,
            radius,
            SPLIT,
            SPLITS,
        )
    return tl.minimum(tl.div_rn(radius.to(tl.float32, bitcast=True), temperature), farthest), banded
