"""Typical sampling in Triton: which distances are kept.

A token's surprise is its distance + log(sum of exp(-distance)), the entropy is the mean distance + the same logarithm:
so they differ by distance - mean distance. `sample.py` explains distances, `radius.py` how bisection finds a radius.
"""

# mypy: allow-untyped-defs

import triton
import triton.language as tl

from .barred_logits import gaps, num_barred
from .early import wait_for_kernel_ahead
from .radius import find_radius
from .splits import load_splits

_INFINITY = tl.constexpr(float("inf"))
_INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def _distances(row_logits, ids, vocab, stop_ids, stop_stride, barred, best, temperature, radius):
    """Distances, and their weights: 0 beyond `radius`."""
    distance = tl.div_rn(gaps(row_logits, ids, vocab, stop_ids, stop_stride, barred, best), temperature)
    kept = (distance <= radius) & (distance < _INFINITY)
    return tl.where(kept, distance, 0.0), tl.where(kept, tl.exp(-distance), 0.0), kept


@triton.jit
def find_typical(
    logits,
    logits_stride,
    vocab,
    rows,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    typical_ps,
    outputs,
    min_outputs,
    stop_ids,
    stop_stride,
    bests,
    nears,
    fars,
    radii,
    centers,
    spreads,
    split_values,
    split_weights,
    num_splits,
    inner_weights,
    band_counts,
    band,
    NUM_STOPS: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of the tokens within a row's radius, those are kept whose distance from the center is at most the spread.

    The radius is that of the other filters. The center is the mean distance, the spread the smallest that occurs and
    within which the weight reaches typical_p; grid [S]. Without typical_p the spread is infinite.
    """
    wait_for_kernel_ahead(PDL)
    position = tl.program_id(0)
    far = tl.load(fars + position)
    if far >= 0.0:
        row = tl.load(rows + position)
        typical_p = tl.load(typical_ps + row)
        row_logits = logits + position.to(tl.int64) * logits_stride
        row_stops = stop_ids + row
        barred = num_barred(outputs, min_outputs, row, NUM_STOPS)
        best = tl.load(bests + position)
        temperature = tl.load(temperatures + row)
        center = temperature * 0.0
        radius = center + _INFINITY
        spread = row * 0 + _INFINITY_BITS
        if tl.load(nears + position) < _INFINITY:
            radius, _ = find_radius(
                row_logits,
                vocab,
                row_stops,
                stop_stride,
                barred,
                best,
                temperature,
                tl.load(top_ks + row),
                tl.load(top_ps + row),
                tl.load(min_ps + row),
                far,
                split_values,
                split_weights,
                load_splits(inner_weights, position, num_splits, 0.0, SPLITS),
                load_splits(band_counts, position, num_splits, 0, SPLITS),
                position,
                num_splits,
                band,
                SPLIT,
                SPLITS,
            )
        if typical_p < 1.0:
            weights = tl.zeros((SPLIT,), tl.float32)
            moments = tl.zeros((SPLIT,), tl.float32)
            for start in range(0, vocab, SPLIT):
                ids = start + tl.arange(0, SPLIT)
                distance, weight, _ = _distances(
                    row_logits, ids, vocab, row_stops, stop_stride, barred, best, temperature, radius
                )
                weights += weight
                moments += weight * distance
            mass = tl.sum(weights, 0)
            center = tl.sum(moments, 0) / mass
            near = spread * 0
            while near < spread:
                middle = near + (spread - near) // 2
                inner = tl.zeros((SPLIT,), tl.float32)
                within = tl.zeros((SPLIT,), tl.int32)
                beyond = tl.full((SPLIT,), _INFINITY_BITS, tl.int32)
                for start in range(0, vocab, SPLIT):
                    ids = start + tl.arange(0, SPLIT)
                    distance, weight, kept = _distances(
                        row_logits, ids, vocab, row_stops, stop_stride, barred, best, temperature, radius
                    )
                    bits = tl.abs(distance - center).to(tl.int32, bitcast=True)
                    inside = kept & (bits <= middle)
                    inner += tl.where(inside, weight, 0.0)
                    within = tl.maximum(within, tl.where(inside, bits, 0))
                    beyond = tl.minimum(beyond, tl.where(kept & (bits > middle), bits, _INFINITY_BITS))
                enough = tl.sum(inner, 0) >= typical_p * mass
                spread = tl.where(enough, tl.max(within, 0), spread)
                near = tl.where(enough, near, tl.min(beyond, 0))
        tl.store(radii + position, radius)
        tl.store(centers + position, center)
        tl.store(spreads + position, spread.to(tl.float32, bitcast=True))
