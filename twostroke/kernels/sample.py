"""Sampling in Triton: four launches of fixed grids, whatever the rows ask for, so that a graph can hold them.

    survey   grid [S, splits]      one pass over the logits: poisoned? largest, and where, or the weight of the split
    bracket  grid [S]              ends greedy rows and errors; rows with filters: how far may kept tokens lie, by a
                                   sample of them (`bracket.py`)
    band     grid [S, programs]    rows with filters only: one pass; the weight within the bracket's near end, and the
                                   tokens between its ends (`band.py`)
    draw     grid [S]              sampled rows only: finds how far they lie (`radius.py`), draws a split, then a token
                                   of it (`draw.py`)

A token's gap is largest logit - logit, its distance is gap / temperature: exp(-distance) is its probability over the
largest one, and every filter keeps the tokens within some radius. A row's splits, its sample and the order of its sums
depend on the vocabulary alone: no batch mate can change its token.
"""

# mypy: allow-untyped-defs

import math

import torch
import triton
import triton.language as tl

from .band import CAPACITY, PROGRAMS, collect_band
from .barred_logits import load_logits, num_barred
from .bracket import find_bracket
from .draw import draw
from .early import early, wait_for_kernel_ahead
from .philox import SPLIT
from .sizes import cdiv, next_power_of_2
from .splits import NO_ID
from .typical import find_typical

_SPLIT_WARPS = 4
_BRACKET_WARPS = 8
_BAND_WARPS = 4
_ROW_WARPS = 16
_DRAW_REGISTERS = 64
"""Of a thread: so a multiprocessor holds two programs of 16 warps."""

_INFINITY = tl.constexpr(float("inf"))
_LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _bar(x, ids, stop_ids, stop_stride, num_barred):
    """As `barred_logits.bar`, but NaN where a barred logit is NaN or +inf."""
    # NOTE: ids are compared in two parts, or the compiler would hold a register for each, also in rows that bar none.
    for place in range(0, num_barred):
        stop = tl.load(stop_ids + place * stop_stride)
        x = tl.where((ids // 8 == stop // 8) & (ids % 8 == stop % 8), x - _INFINITY, x)
    return x


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
    PDL: tl.constexpr,
):
    """The largest logit of each split, +inf if one is NaN or +inf; for a greedy row the lowest id that has it, for
    a sampled one the weight of all tokens."""
    wait_for_kernel_ahead(PDL)
    position = tl.program_id(0)
    split = tl.program_id(1)
    ids = split * SPLIT + tl.arange(0, SPLIT)
    x = load_logits(logits + position.to(tl.int64) * logits_stride, ids, vocab)
    # NOTE: so that logits are asked for before the row's parameters, each of which waits for another load.
    tl.debug_barrier()
    row = tl.load(rows + position)
    temperature = tl.load(temperatures + row)
    x = _bar(x, ids, stop_ids + row, stop_stride, num_barred(outputs, min_outputs, row, NUM_STOPS))
    best = tl.max(x, 0)
    place = position * tl.num_programs(1) + split
    # NOTE: the maximum drops NaN, but what follows does not: a weight of NaN or an id of -1 tells of poison.
    if temperature > 0.0:
        # NOTE: in a split without any token all gaps are infinite, not NaN.
        gap = tl.where(best == -_INFINITY, 0.0, best) - x
        weight = tl.sum(tl.exp2(gap * tl.div_rn(-_LOG2_E, temperature)), 0)
        tl.store(split_weights + place, weight)
        poisoned = weight != weight
    else:
        first = tl.min(tl.where(x != x, -1, tl.where(x == best, ids, NO_ID)), 0)
        tl.store(split_ids + place, first)
        poisoned = first < 0
    tl.store(split_values + place, tl.where(poisoned, _INFINITY, best))


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
        typical: heed typical_p, which takes a launch more, between band and draw.
        chances: float32 [S], written unless None; see `sampling.sampler.sample`.
    """
    count, vocab = logits.shape
    num_splits = cdiv(vocab, SPLIT)
    split_values = torch.empty((count, num_splits), dtype=torch.float32, device=logits.device)
    split_weights, inner_weights = torch.empty_like(split_values), torch.empty_like(split_values)
    split_ids = torch.empty((count, num_splits), dtype=torch.int32, device=logits.device)
    band_counts = torch.empty_like(split_ids)
    band = torch.empty((count, num_splits, CAPACITY), dtype=logits.dtype, device=logits.device)
    # NOTE: not parts of one tensor: the alignment, and with it the compiled variant, would change with the count.
    bests = torch.empty(count, dtype=torch.float32, device=logits.device)
    nears, fars = torch.empty_like(bests), torch.empty_like(bests)
    radii, centers, spreads = (torch.empty_like(bests) for _ in range(3)) if typical else (bests, bests, bests)
    stops = (stop_ids, stop_ids.stride(0))
    common = (logits, logits.stride(0), vocab, rows)
    filters = (top_k, top_p, min_p)
    bands = (inner_weights, band_counts, band)
    num_stops, splits = stop_ids.shape[0], max(4, next_power_of_2(num_splits))
    per_split, per_row, pdl = (count, num_splits), (count,), early(logits.device)
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
        **pdl,
    )
    find_bracket[per_row](
        *common,
        temperature,
        *filters,
        outputs,
        min_outputs,
        *stops,
        split_values,
        split_ids,
        split_weights,
        num_splits,
        bests,
        nears,
        fars,
        tokens,
        errors,
        NUM_STOPS=num_stops,
        SPLITS=splits,
        num_warps=_BRACKET_WARPS,
        **pdl,
    )
    collect_band[(count, min(num_splits, cdiv(PROGRAMS, max(count, 1))))](
        *common,
        temperature,
        outputs,
        min_outputs,
        *stops,
        bests,
        nears,
        fars,
        split_values,
        num_splits,
        *bands,
        NUM_STOPS=num_stops,
        SPLIT=SPLIT,
        num_warps=_BAND_WARPS,
        **pdl,
    )
    if typical:
        find_typical[per_row](
            *common,
            temperature,
            *filters,
            typical_p,
            outputs,
            min_outputs,
            *stops,
            bests,
            nears,
            fars,
            radii,
            centers,
            spreads,
            split_values,
            split_weights,
            num_splits,
            *bands,
            NUM_STOPS=num_stops,
            SPLIT=SPLIT,
            SPLITS=splits,
            num_warps=_ROW_WARPS,
            **pdl,
        )
    draw[per_row](
        *common,
        temperature,
        *filters,
        seed_low,
        seed_high,
        outputs,
        min_outputs,
        *stops,
        bests,
        nears,
        fars,
        radii,
        centers,
        spreads,
        split_values,
        split_weights,
        num_splits,
        *bands,
        tokens,
        bests if chances is None else chances,
        TYPICAL=typical,
        NUM_STOPS=num_stops,
        SPLIT=SPLIT,
        SPLITS=splits,
        CHANCES=chances is not None,
        num_warps=_ROW_WARPS,
        maxnreg=_DRAW_REGISTERS,
        **pdl,
    )
