"""Sampling in Triton: three launches of fixed grids, whatever the rows ask for, so that a graph can hold them.

    survey   grid [S, splits]  one pass over the logits: poisoned? largest, and where, or the weight of the split
    settle   grid [S]          joins the splits, ends greedy rows and errors, finds how far kept tokens may lie
    draw     grid [S]          sampled rows only: draws a split, then a token of it (`draw.py`)

A token's gap is largest logit - logit, its distance is gap / temperature: exp(-distance) is its probability over the
largest one, and every filter keeps the tokens within some radius (`radius.py`). A row's splits and the order of its
sums depend on the vocabulary alone: no batch mate can change its token.
"""

# mypy: allow-untyped-defs

import math

import torch
import triton
import triton.language as tl

from .barred_logits import bar, load_logits, num_barred
from .draw import draw
from .philox import SPLIT
from .radius import smallest_radius, weigh
from .sizes import cdiv, next_power_of_2
from .splits import first_id, load_splits, load_weights
from .typical import find_typical

_SPLIT_WARPS = 4
_ROW_WARPS = 16

_INFINITY = tl.constexpr(float("inf"))
_INFINITY_BITS = tl.constexpr(0x7F800000)
_LOG2_E = tl.constexpr(math.log2(math.e))
_NOTHING_TO_DRAW = tl.constexpr(-1.0)


@triton.jit
def _survey(
    logits,
    logits_stride,
    vocab,
    rows,
    temperatures,
    outputs,
    min_outputs,
    stop_ids,
    stop_stride,
    split_values,
    split_ids,
    split_weights,
    NUM_STOPS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """The largest logit of each split, +inf if one is NaN or +inf; for a greedy row the lowest id that has it, for
    a sampled one the weight of all tokens."""
    position = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.load(rows + position)
    temperature = tl.load(temperatures + row)
    ids = split * SPLIT + tl.arange(0, SPLIT)
    x = load_logits(logits + position.to(tl.int64) * logits_stride, ids, vocab)
    poisoned = (x != x) | (x == _INFINITY)
    barred = num_barred(outputs, min_outputs, row, NUM_STOPS)
    x = tl.where(poisoned, _INFINITY, bar(x, ids, stop_ids + row, stop_stride, barred))
    best = tl.max(x, 0)
    place = position * tl.num_programs(1) + split
    tl.store(split_values + place, best)
    if temperature > 0.0:
        # NOTE: in a split without any token all gaps are infinite, not NaN.
        gap = tl.where(best == -_INFINITY, 0.0, best) - x
        tl.store(split_weights + place, tl.sum(tl.exp2(gap * tl.div_rn(-_LOG2_E, temperature)), 0))
    else:
        tl.store(split_ids + place, first_id(x, best, ids))


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
    split_weights,
    num_splits,
    bests,
    radii,
    tokens,
    errors,
    NUM_STOPS: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Ends greedy rows and errors; for the others, the radius of the kept tokens: top_k, top_p within it, min_p."""
    position = tl.program_id(0)
    row = tl.load(rows + position)
    values = load_splits(split_values, position, num_splits, -_INFINITY, SPLITS)
    best = tl.max(values, 0)
    failed = tl.abs(best) == _INFINITY
    tl.store(errors + position, failed.to(tl.int32))
    tl.store(bests + position, best)
    temperature = tl.load(temperatures + row)
    if (temperature > 0.0) & (failed == 0):
        row_logits = logits + position.to(tl.int64) * logits_stride
        row_stops = stop_ids + row
        row_values = split_values + position * num_splits
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
                row_values,
                num_splits,
                top_k.to(tl.float32),
                radius,
                False,
                SPLIT,
            )
        top_p = tl.load(top_ps + row)
        if top_p < 1.0:
            if radius < _INFINITY_BITS:
                mass, _, _ = weigh(
                    row_logits,
                    vocab,
                    row_stops,
                    stop_stride,
                    barred,
                    best,
                    decay,
                    row_values,
                    num_splits,
                    radius,
                    True,
                    SPLIT,
                )
            else:
                mass = tl.sum(load_weights(split_values, split_weights, position, num_splits, best, decay, SPLITS), 0)
            radius = smallest_radius(
                row_logits,
                vocab,
                row_stops,
                stop_stride,
                barred,
                best,
                decay,
                row_values,
                num_splits,
                top_p * mass,
                radius,
                True,
                SPLIT,
            )
        farthest = -tl.log(tl.load(min_ps + row))
        tl.store(radii + position, tl.minimum(tl.div_rn(radius.to(tl.float32, bitcast=True), temperature), farthest))
    else:
        token = first_id(values, best, load_splits(split_ids, position, num_splits, 0, SPLITS))
        tl.store(tokens + position, tl.where(failed, 0, token))
        tl.store(radii + position, _NOTHING_TO_DRAW)


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
    num_splits = cdiv(vocab, SPLIT)
    split_values = torch.empty((count, num_splits), dtype=torch.float32, device=logits.device)
    split_weights = torch.empty_like(split_values)
    split_ids = torch.empty((count, num_splits), dtype=torch.int32, device=logits.device)
    # NOTE: not halves of one tensor: the alignment, and with it the compiled variant, would change with the count.
    bests = torch.empty(count, dtype=torch.float32, device=logits.device)
    radii = torch.empty_like(bests)
    centers, spreads = (torch.empty_like(bests), torch.empty_like(bests)) if typical else (bests, bests)
    stops = (stop_ids, stop_ids.stride(0))
    common = (logits, logits.stride(0), vocab, rows)
    num_stops, splits = stop_ids.shape[0], max(4, next_power_of_2(num_splits))
    per_split, per_row = (count, num_splits), (count,)
    _survey[per_split](
        *common,
        temperature,
        outputs,
        min_outputs,
        *stops,
        split_values,
        split_ids,
        split_weights,
        NUM_STOPS=num_stops,
        SPLIT=SPLIT,
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
        split_weights,
        num_splits,
        bests,
        radii,
        tokens,
        errors,
        NUM_STOPS=num_stops,
        SPLIT=SPLIT,
        SPLITS=splits,
        num_warps=_ROW_WARPS,
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
            TILE=SPLIT,
            num_warps=_ROW_WARPS,
        )
    draw[per_row](
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
        split_weights,
        num_splits,
        tokens,
        radii if chances is None else chances,
        TYPICAL=typical,
        NUM_STOPS=num_stops,
        SPLIT=SPLIT,
        SPLITS=splits,
        CHANCES=chances is not None,
        num_warps=_ROW_WARPS,
    )
