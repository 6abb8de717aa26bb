"""Typical sampling in Triton: which distances are kept.

A token's surprise is its distance + log(sum of exp(-distance)), the entropy is the mean distance + the same logarithm:
so they differ by distance - mean distance. `sample.py` explains distances, `radius.py` how bisection finds a radius.
"""

# mypy: allow-untyped-defs

import triton
import triton.language as tl

from .barred_logits import gaps, num_barred

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
    typical_ps,
    outputs,
    min_outputs,
    stop_ids,
    stop_stride,
    bests,
    radii,
    centers,
    spreads,
    NUM_STOPS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Of the tokens within a row's radius, those are kept whose distance from the center is at most the spread.

    The center is the mean distance, the spread the smallest that occurs and within which the weight reaches typical_p;
    grid [S]. Without typical_p, or for a greedy row, the spread is infinite.
    """
    position = tl.program_id(0)
    row = tl.load(rows + position)
    typical_p = tl.load(typical_ps + row)
    radius = tl.load(radii + position)
    center = radius * 0.0 if radius < _INFINITY else 0.0
    spread = row * 0 + _INFINITY_BITS
    if (typical_p < 1.0) & (radius >= 0.0):
        row_logits = logits + position.to(tl.int64) * logits_stride
        row_stops = stop_ids + row
        barred = num_barred(outputs, min_outputs, row, NUM_STOPS)
        best = tl.load(bests + position)
        temperature = tl.load(temperatures + row)
        weights = tl.zeros((TILE,), tl.float32)
        moments = tl.zeros((TILE,), tl.float32)
        for start in range(0, vocab, TILE):
            ids = start + tl.arange(0, TILE)
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
            inner = tl.zeros((TILE,), tl.float32)
            within = tl.zeros((TILE,), tl.int32)
            beyond = tl.full((TILE,), _INFINITY_BITS, tl.int32)
            for start in range(0, vocab, TILE):
                ids = start + tl.arange(0, TILE)
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
    tl.store(centers + position, center)
    tl.store(spreads + position, spread.to(tl.float32, bitcast=True))
