"""The draw in Triton: first a split of the row, then a token of that split.

A split comes with probability its kept tokens' weight over that of all, a token within it with its own over the
split's: their product is the token's probability. So noise is made for the splits and the tokens of one of them, not
for all tokens. `sample.py` explains distances and radii.
"""

# mypy: allow-untyped-defs

import math

import triton
import triton.language as tl

from .band import weigh_kept_splits
from .barred_logits import gaps, num_barred
from .early import wait_for_kernel_ahead
from .philox import PURPOSE_SPLIT, PURPOSE_TOKEN
from .philox_triton import gumbel, numbered_words
from .radius import find_radius
from .splits import first_largest, load_splits, load_weights

_INFINITY = tl.constexpr(float("inf"))
_LOG2_E = tl.constexpr(math.log2(math.e))
_PURPOSE_SPLIT = tl.constexpr(PURPOSE_SPLIT)
_PURPOSE_TOKEN = tl.constexpr(PURPOSE_TOKEN)


@triton.jit
def _kept_distances(
    row_logits,
    ids,
    vocab,
    row_stops,
    stop_stride,
    barred,
    best,
    temperature,
    radius,
    center,
    spread,
    TYPICAL: tl.constexpr,
):
    """Distances; infinity for what is not kept."""
    distance = tl.div_rn(gaps(row_logits, ids, vocab, row_stops, stop_stride, barred, best), temperature)
    kept = distance <= radius
    if TYPICAL:
        kept = kept & (tl.abs(distance - center) <= spread)
    return tl.where(kept, distance, _INFINITY)


@triton.jit
def draw(
    logits,
    logits_stride,
    vocab,
    rows,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds_low,
    seeds_high,
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
    tokens,
    chances,
    TYPICAL: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    CHANCES: tl.constexpr,
    PDL: tl.constexpr,
):
    """The token of a sampled row, and with CHANCES its log-probability; grid [S], SPLITS >= 4.

    Rows without a filter take the weights of their splits from the survey, others from their band. Where that does not
    do, and with TYPICAL, which has radii found before, the splits that hold kept tokens are weighed anew.
    """
    wait_for_kernel_ahead(PDL)
    position = tl.program_id(0)
    far = tl.load(fars + position)
    near = tl.load(nears + position)
    best = tl.load(bests + position)
    row = tl.load(rows + position)
    # NOTE: so that these are asked for together.
    tl.debug_barrier()
    if far >= 0.0:
        seed_low = tl.load(seeds_low + row)
        seed_high = tl.load(seeds_high + row)
        output = tl.load(outputs + row)
        temperature = tl.load(temperatures + row)
        row_logits = logits + position.to(tl.int64) * logits_stride
        row_stops = stop_ids + row
        barred = num_barred(outputs, min_outputs, row, NUM_STOPS)
        filtered = near < _INFINITY
        lanes = tl.arange(0, SPLITS)
        weights = load_weights(
            split_values, split_weights, position, num_splits, best, tl.div_rn(-_LOG2_E, temperature), SPLITS
        )
        center = temperature * 0.0
        radius = center + _INFINITY
        spread = radius
        if TYPICAL:
            radius = tl.load(radii + position)
            center = tl.load(centers + position)
            spread = tl.load(spreads + position)
            filtered = filtered | (spread < _INFINITY)
        elif filtered:
            inner = load_splits(inner_weights, position, num_splits, 0.0, SPLITS)
            counts = load_splits(band_counts, position, num_splits, 0, SPLITS)
            radius, banded = find_radius(
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
                inner,
                counts,
                position,
                num_splits,
                band,
                SPLIT,
                SPLITS,
            )
            if banded:
                weights = weigh_kept_splits(
                    band,
                    position,
                    num_splits,
                    counts,
                    inner,
                    best,
                    temperature,
                    radius,
                    SPLITS,
                    SPLIT // SPLITS,
                )
            filtered = banded == 0
        if filtered:
            weights = tl.zeros((SPLITS,), tl.float32)
            for split in range(0, num_splits):
                nearest = tl.div_rn(best - tl.load(split_values + position * num_splits + split), temperature)
                if nearest <= radius:
                    distance = _kept_distances(
                        row_logits,
                        split * SPLIT + tl.arange(0, SPLIT),
                        vocab,
                        row_stops,
                        stop_stride,
                        barred,
                        best,
                        temperature,
                        radius,
                        center,
                        spread,
                        TYPICAL,
                    )
                    weights = tl.where(lanes == split, tl.sum(tl.exp(-distance), 0), weights)
        words = numbered_words(seed_low, seed_high, output, tl.arange(0, SPLITS // 4), _PURPOSE_SPLIT)
        _, split = first_largest(gumbel(words) + tl.log(weights), lanes)
        ids = split * SPLIT + tl.arange(0, SPLIT)
        distance = _kept_distances(
            row_logits,
            ids,
            vocab,
            row_stops,
            stop_stride,
            barred,
            best,
            temperature,
            radius,
            center,
            spread,
            TYPICAL,
        )
        quads = split * (SPLIT // 4) + tl.arange(0, SPLIT // 4)
        words = numbered_words(seed_low, seed_high, output, quads, _PURPOSE_TOKEN)
        _, token = first_largest(gumbel(words) - distance, ids)
        tl.store(tokens + position, token)
        if CHANCES:
            drawn = tl.min(tl.where(ids == token, distance, _INFINITY), 0)
            tl.store(chances + position, -drawn - tl.log(tl.sum(weights, 0)))
    elif CHANCES:
        tl.store(chances + position, 0.0)
