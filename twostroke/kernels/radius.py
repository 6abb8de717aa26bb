"""Radii in Triton: how far from the largest logit the kept tokens of a row lie.

`sample.py` explains gaps. The bits of a float >= 0 are ordered like the float, so a radius is found by bisection on
them; each pass snaps both ends to gaps that occur, which ends it early. A pass does not read the splits that lie beyond
the radius that it tries: their largest logits, `values`, are known.
"""

# mypy: allow-untyped-defs

import triton
import triton.language as tl

from .barred_logits import gaps

_INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def weigh(
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
    BY_MASS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Weight of the tokens within the gap `radius`, the largest gap within it, the smallest beyond it (bits)."""
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
            if BY_MASS:
                weights += tl.where(inside, tl.exp2(gap * decay), 0.0)
            else:
                weights += tl.where(inside, 1.0, 0.0)
            within = tl.maximum(within, tl.where(inside, bits, 0))
            beyond = tl.minimum(beyond, tl.where(inside, _INFINITY_BITS, bits))
        else:
            beyond = tl.minimum(beyond, nearest)
    return tl.sum(weights, 0), tl.max(within, 0), tl.min(beyond, 0)


@triton.jit
def smallest_radius(
    row_logits,
    vocab,
    stop_ids,
    stop_stride,
    num_barred,
    best,
    decay,
    values,
    num_splits,
    target,
    far,
    BY_MASS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """The smallest gap (bits) that occurs and within which the weight is at least `target`, or `far`.

    `near` and `far` are gaps that occur (or infinity); the answer lies between them, both included. A token weighs 1,
    or 2 ** (gap * decay) by mass.
    """
    near = far * 0
    while near < far:
        middle = near + (far - near) // 2
        weight, within, beyond = weigh(
            row_logits,
            vocab,
            stop_ids,
            stop_stride,
            num_barred,
            best,
            decay,
            values,
            num_splits,
            middle,
            BY_MASS,
            SPLIT,
        )
        enough = weight >= target
        far = tl.where(enough, within, far)
        near = tl.where(enough, near, beyond)
    return far
