"""Sampling in Triton: four launches of fixed grids, whatever the rows ask for, so that a graph can hold them.

    survey   grid [S, splits]  one pass over the logits: poisoned? largest, and where
    settle   grid [S]          joins the splits, ends greedy rows and errors, finds how far kept tokens may lie
    draw     grid [S, splits]  sampled rows only: noise, and the winner of each split
    combine  grid [S]          sampled rows only: the winner of the splits

A token's gap is largest logit - logit, its distance is gap / temperature: exp(-distance) is its probability over the
largest one, and every filter keeps the tokens within some radius (`radius.py`). A row's splits and the order of its
sums depend on the vocabulary alone: no batch mate can change its token.
"""

# mypy: allow-untyped-defs

import math

import torch
import triton
import triton.language as tl

from .barred_logits import bar, gaps, load_logits, num_barred
from .philox import PURPOSE_TOKEN
from .philox_triton import gumbel, token_words
from .radius import smallest_radius, weigh
from .sizes import cdiv, next_power_of_2
from .typical import find_typical

_SPLIT = 4096
_SPLIT_WARPS = 8
_TILE = 8192
_TILE_WARPS = 16

_PURPOSE = tl.constexpr(PURPOSE_TOKEN)
_INFINITY = tl.constexpr(float("inf"))
_INFINITY_BITS = tl.constexpr(0x7F800000)
_LOG2_E = tl.constexpr(math.log2(math.e))
_NOTHING_TO_DRAW = tl.constexpr(-1.0)


@triton.jit
def _first_largest(x, ids):
    """The largest of x, and the lowest id that has it."""
    best = tl.max(x, 0)
    return best, tl.min(tl.where(x == best, ids, 0x7FFFFFFF), 0)


@triton.jit
def _join_splits(values, ids, position, num_splits, SPLITS: tl.constexpr):
    lanes = tl.arange(0, SPLITS)
    place = position * num_splits + lanes
    inside = lanes < num_splits
    value = tl.load(values + place, mask=inside, other=-_INFINITY)
    return _first_largest(value, tl.load(ids + place, mask=inside, other=0x7FFFFFFF))


@triton.jit
def _survey(
    logits,
    logits_stride,
    vocab,
    rows,
    outputs,
    min_outputs,
    stop_ids,
    stop_stride,
    split_values,
    split_ids,
    NUM_STOPS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """The largest logit of each split and the lowest id that has it; +inf if one is NaN or +inf."""
    position = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.load(rows + position)
    ids = split * SPLIT + tl.arange(0, SPLIT)
    x = load_logits(logits + position.to(tl.int64) * logits_stride, ids, vocab)
    poisoned = tl.max(((x != x) | (x == _INFINITY)).to(tl.int32), 0) != 0
    barred = num_barred(outputs, min_outputs, row, NUM_STOPS)
    best, token = _first_largest(bar(x, ids, stop_ids + row, stop_stride, barred), ids)
    place = position * tl.num_programs(1) + split
    tl.store(split_values + place, tl.where(poisoned, _INFINITY, best))
    tl.store(split_ids + place, token)


@triton.jit
def _settle(
    logits,
    logits_stride,
    vocab,
    rows,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    outputs,
    min_outputs,
    stop_ids,
    stop_stride,
    split_values,
    split_ids,
    num_splits,
    bests,
    radii,
    tokens,
    errors,
    NUM_STOPS: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Ends greedy rows and errors; for the others, the radius of the kept tokens: top_k, top_p within it, min_p."""
    position = tl.program_id(0)
    row = tl.load(rows + position)
    best, token = _join_splits(split_values, split_ids, position, num_splits, SPLITS)
    failed = tl.abs(best) == _INFINITY
    tl.store(tokens + position, tl.where(failed, 0, token))
    tl.store(errors + position, failed.to(tl.int32))
    tl.store(bests + position, best)
    temperature = tl.load(temperatures + row)
    if (temperature > 0.0) & (failed == 0):
        row_logits = logits + position.to(tl.int64) * logits_stride
        row_stops = stop_ids + row
        barred = num_barred(outputs, min_outputs, row, NUM_STOPS)
        decay = tl.div_rn(-_LOG2_E, temperature)
        radius = row * 0 + _INFINITY_BITS
        top_k = tl.load(top_ks + row)
        if (top_k > 0) & (top_k < vocab):
            radius = smallest_radius(
                row_logits,
                vocab,
                row_stops,
                stop_stride,
                barred,
                best,
                decay,
                top_k.to(tl.float32),
                radius,
                False,
                TILE,
            )
        top_p = tl.load(top_ps + row)
        if top_p < 1.0:
            mass, _, _ = weigh(row_logits, vocab, row_stops, stop_stride, barred, best, decay, radius, True, TILE)
            radius = smallest_radius(
                row_logits, vocab, row_stops, stop_stride, barred, best, decay, top_p * mass, radius, True, TILE
            )
        farthest = -tl.log(tl.load(min_ps + row))
        tl.store(radii + position, tl.minimum(tl.div_rn(radius.to(tl.float32, bitcast=True), temperature), farthest))
    else:
        tl.store(radii + position, _NOTHING_TO_DRAW)


@triton.jit
def _draw(
    logits,
    logits_stride,
    vocab,
    rows,
    temperatures,
    seeds_low,
    seeds_high,
    outputs,
    min_outputs,
    stop_ids,
    stop_stride,
    bests,
    radii,
    centers,
    spreads,
    split_values,
    split_ids,
    split_weights,
    TYPICAL: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    SPLIT: tl.constexpr,
    CHANCES: tl.constexpr,
):
    """For each split of a sampled row: the largest of noise - distance among the kept tokens, and the lowest id.

    With CHANCES also the weight of its kept tokens: the sum of exp(-distance).
    """
    position = tl.program_id(0)
    split = tl.program_id(1)
    radius = tl.load(radii + position)
    if radius >= 0.0:
        row = tl.load(rows + position)
        place = position * tl.num_programs(1) + split
        ids = split * SPLIT + tl.arange(0, SPLIT)
        gap = gaps(
            logits + position.to(tl.int64) * logits_stride,
            ids,
            vocab,
            stop_ids + row,
            stop_stride,
            num_barred(outputs, min_outputs, row, NUM_STOPS),
            tl.load(bests + position),
        )
        distance = tl.div_rn(gap, tl.load(temperatures + row))
        kept = distance <= radius
        if TYPICAL:
            kept = kept & (tl.abs(distance - tl.load(centers + position)) <= tl.load(spreads + position))
        if tl.max(kept.to(tl.int32), 0) != 0:
            quads = split * (SPLIT // 4) + tl.arange(0, SPLIT // 4)
            words = token_words(
                tl.load(seeds_low + row), tl.load(seeds_high + row), tl.load(outputs + row), quads, _PURPOSE
            )
            best, token = _first_largest(tl.where(kept, gumbel(words) - distance, -_INFINITY), ids)
            tl.store(split_values + place, best)
            tl.store(split_ids + place, token)
            if CHANCES:
                tl.store(split_weights + place, tl.sum(tl.where(kept, tl.exp(-distance), 0.0), 0))
        else:
            tl.store(split_values + place, -_INFINITY)
            if CHANCES:
                tl.store(split_weights + place, 0.0)


@triton.jit
def _combine(
    logits,
    logits_stride,
    rows,
    temperatures,
    bests,
    split_values,
    split_ids,
    split_weights,
    num_splits,
    radii,
    tokens,
    chances,
    SPLITS: tl.constexpr,
    CHANCES: tl.constexpr,
):
    position = tl.program_id(0)
    if tl.load(radii + position) >= 0.0:
        _, token = _join_splits(split_values, split_ids, position, num_splits, SPLITS)
        tl.store(tokens + position, token)
        if CHANCES:
            lanes = tl.arange(0, SPLITS)
            weights = tl.load(split_weights + position * num_splits + lanes, mask=lanes < num_splits, other=0.0)
            logit = tl.load(logits + position.to(tl.int64) * logits_stride + token).to(tl.float32)
            temperature = tl.load(temperatures + tl.load(rows + position))
            distance = tl.div_rn(tl.load(bests + position) - logit, temperature)
            tl.store(chances + position, -distance - tl.log(tl.sum(weights, 0)))
    elif CHANCES:
        tl.store(chances + position, 0.0)


def sample_rows(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    typical_p: torch.Tensor,
    seed_low: torch.Tensor,
    seed_high: torch.Tensor,
    outputs: torch.Tensor,
    min_outputs: torch.Tensor,
    stop_ids: torch.Tensor,
    tokens: torch.Tensor,
    errors: torch.Tensor,
    typical: bool = False,
    chances: torch.Tensor | None = None,
) -> None:
    """Draw one token per row of `logits`; the tensors between `rows` and `tokens` are `SamplingState`'s, in order.

    Args:
        logits: [S, V] in bfloat16, float16 or float32, the last dimension contiguous.
        rows: int32 [S].
        tokens, errors: int32 [S], written.
        typical: heed typical_p, which takes a launch more, between settle and draw.
        chances: float32 [S], written unless None; see `sampling.sampler.sample`.
    """
    count, vocab = logits.shape
    num_splits = cdiv(vocab, _SPLIT)
    split_values = torch.empty((count, num_splits), dtype=torch.float32, device=logits.device)
    split_ids = torch.empty((count, num_splits), dtype=torch.int32, device=logits.device)
    # NOTE: not halves of one tensor: the alignment, and with it the compiled variant, would change with the count.
    bests = torch.empty(count, dtype=torch.float32, device=logits.device)
    radii = torch.empty_like(bests)
    centers, spreads = (torch.empty_like(bests), torch.empty_like(bests)) if typical else (bests, bests)
    asked = chances is not None
    split_weights = torch.empty_like(split_values) if asked else split_values
    stops = (stop_ids, stop_ids.stride(0))
    common = (logits, logits.stride(0), vocab, rows)
    num_stops, splits = stop_ids.shape[0], next_power_of_2(num_splits)
    per_split, per_row = (count, num_splits), (count,)
    _survey[per_split](
        *common,
        outputs,
        min_outputs,
        *stops,
        split_values,
        split_ids,
        NUM_STOPS=num_stops,
        SPLIT=_SPLIT,
        num_warps=_SPLIT_WARPS,
    )
    _settle[per_row](
        *common,
        temperature,
        top_k,
        top_p,
        min_p,
        outputs,
        min_outputs,
        *stops,
        split_values,
        split_ids,
        num_splits,
        bests,
        radii,
        tokens,
        errors,
        NUM_STOPS=num_stops,
        SPLITS=splits,
        TILE=_TILE,
        num_warps=_TILE_WARPS,
    )
    if typical:
        find_typical[per_row](
            *common,
            temperature,
            typical_p,
            outputs,
            min_outputs,
            *stops,
            bests,
            radii,
            centers,
            spreads,
            NUM_STOPS=num_stops,
            TILE=_TILE,
            num_warps=_TILE_WARPS,
        )
    _draw[per_split](
        *common,
        temperature,
        seed_low,
        seed_high,
        outputs,
        min_outputs,
        *stops,
        bests,
        radii,
        centers,
        spreads,
        split_values,
        split_ids,
        split_weights,
        TYPICAL=typical,
        NUM_STOPS=num_stops,
        SPLIT=_SPLIT,
        CHANCES=asked,
        num_warps=_SPLIT_WARPS,
    )
    _combine[per_row](
        logits,
        logits.stride(0),
        rows,
        temperature,
        bests,
        split_values,
        split_ids,
        split_weights,
        num_splits,
        radii,
        tokens,
        chances if asked else radii,
        SPLITS=splits,
        CHANCES=asked,
        num_warps=1,
    )
