"""Bands in Triton: the tokens of a row between the ends of its bracket, packed, so that the search reads them alone.

Per split there are inner weights [S, splits], the summed 2 ** (gap * decay) of the tokens within the near end; counts
[S, splits] of the tokens in the band; and their logits [S, splits, CAPACITY], in a fixed order. What a split
has beyond the capacity is counted, not kept: then the row is searched instead (`radius.py`).
"""

# mypy: allow-untyped-defs

import math

import torch
import triton
import triton.language as tl

from .barred_logits import bar, gaps, load_logits, num_barred
from .early import wait_for_kernel_ahead

CAPACITY = 1024
"""Of a split's 4,096 tokens: bands take a quarter of the logits' bytes."""

PROGRAMS = 2048
"""As many as run at once on a large device; more would take rows without filters longer, whose programs do nothing."""

_INFINITY = tl.constexpr(float("inf"))
_INFINITY_BITS = tl.constexpr(0x7F800000)
_LOG2_E = tl.constexpr(math.log2(math.e))
_CAPACITY = tl.constexpr(CAPACITY)
_MAX_FLOAT = tl.constexpr(torch.finfo(torch.float32).max)
_LANES = tl.constexpr(128)
_UNROLL = tl.constexpr(8)


@triton.jit
def _collect_split(
    row_logits, begin, vocab, row_stops, stop_stride, barred, best, decay, near, far, band, SPLIT: tl.constexpr
):
    """Pack a split's band; return its inner weight and count. Each thread packs what it reads, so that all it needs of
    the others is how much they have."""
    end = tl.minimum(begin + SPLIT, vocab)
    lanes = tl.arange(0, _LANES)
    weights = tl.zeros((_LANES,), tl.float32)
    counts = tl.zeros((_LANES,), tl.int32)
    for start in tl.range(begin, end, _LANES, loop_unroll_factor=_UNROLL):
        gap = gaps(row_logits, start + lanes, vocab, row_stops, stop_stride, barred, best)
        weights += tl.where(gap <= near, tl.exp2(gap * decay), 0.0)
        counts += ((gap > near) & (gap <= far)).to(tl.int32)
    place = tl.cumsum(counts, 0) - counts
    for start in tl.range(begin, end, _LANES, loop_unroll_factor=_UNROLL):
        x = bar(load_logits(row_logits, start + lanes, vocab), start + lanes, row_stops, stop_stride, barred)
        gap = best - x
        inside = (gap > near) & (gap <= far)
        tl.store(band + place, x.to(band.dtype.element_ty), mask=inside & (place < _CAPACITY))
        place += inside.to(tl.int32)
    return tl.sum(weights, 0), tl.sum(counts, 0)


@triton.jit
def collect_band(
    logits,
    logits_stride,
    vocab,
    rows,
    temperatures,
    outputs,
    min_outputs,
    stop_ids,
    stop_stride,
    bests,
    nears,
    fars,
    split_values,
    num_splits,
    inner_weights,
    counts,
    band,
    NUM_STOPS: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """The bands of rows with filters; grid [S, programs that share a row's splits], 4 warps."""
    wait_for_kernel_ahead(PDL)
    position = tl.program_id(0)
    near = tl.load(nears + position)
    if near < _INFINITY:
        row = tl.load(rows + position)
        # NOTE: forbidden tokens are infinitely far.
        far = tl.minimum(tl.load(fars + position), _MAX_FLOAT)
        best = tl.load(bests + position)
        decay = tl.div_rn(-_LOG2_E, tl.load(temperatures + row))
        barred = num_barred(outputs, min_outputs, row, NUM_STOPS)
        row_logits = logits + position.to(tl.int64) * logits_stride
        row_stops = stop_ids + row
        for split in range(tl.program_id(1), num_splits, tl.num_programs(1)):
            place = position * num_splits + split
            split_band = band + place.to(tl.int64) * _CAPACITY
            begin = split * SPLIT
            inner = near * 0.0
            count = row * 0
            if best - tl.load(split_values + place) <= far:
                # NOTE: a loop over stop ids, though empty, would keep the compiler from reading ahead.
                if barred > 0:
                    inner, count = _collect_split(
                        row_logits,
                        begin,
                        vocab,
                        row_stops,
                        stop_stride,
                        barred,
                        best,
                        decay,
                        near,
                        far,
                        split_band,
                        SPLIT,
                    )
                else:
                    inner, count = _collect_split(
                        row_logits, begin, vocab, row_stops, stop_stride, 0, best, decay, near, far, split_band, SPLIT
                    )
            tl.store(inner_weights + place, inner)
            tl.store(counts + place, count)


@triton.jit
def load_band(band, position, num_splits, counts, start, best, SPLITS: tl.constexpr, CHUNK: tl.constexpr):
    """Gaps [SPLITS, CHUNK] of the band's tokens from `start` on in each split; infinity behind the last one."""
    place = start + tl.arange(0, CHUNK)[None, :]
    split = position.to(tl.int64) * num_splits + tl.arange(0, SPLITS)[:, None]
    x = tl.load(band + split * _CAPACITY + place, mask=place < counts[:, None], other=-_INFINITY)
    return best - x.to(tl.float32)


@triton.jit
def weigh_band(
    band,
    position,
    num_splits,
    counts,
    best,
    decay,
    radius,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """As `radius.weigh_row`, of the band's tokens alone; counts: [SPLITS], of the row."""
    weights = tl.zeros((SPLITS, CHUNK), tl.float32)
    within = tl.zeros((SPLITS, CHUNK), tl.int32)
    beyond = tl.full((SPLITS, CHUNK), _INFINITY_BITS, tl.int32)
    for start in range(0, tl.max(counts, 0), CHUNK):
        gap = load_band(band, position, num_splits, counts, start, best, SPLITS, CHUNK)
        bits = gap.to(tl.int32, bitcast=True)
        inside = (bits <= radius) & (bits < _INFINITY_BITS)
        weights += tl.where(inside, tl.exp2(gap * decay), 0.0)
        within = tl.maximum(within, tl.where(inside, bits, 0))
        beyond = tl.minimum(beyond, tl.where(inside, _INFINITY_BITS, bits))
    return tl.sum(weights), tl.max(within), tl.min(beyond)


@triton.jit
def weigh_kept_splits(
    band,
    position,
    num_splits,
    counts,
    inner,
    best,
    temperature,
    radius,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The weights of a row's splits [SPLITS] within `radius`, a distance that ends in the band."""
    weights = inner
    for start in range(0, tl.max(counts, 0), CHUNK):
        gap = load_band(band, position, num_splits, counts, start, best, SPLITS, CHUNK)
        distance = tl.div_rn(gap, temperature)
        weights += tl.sum(tl.where(distance <= radius, tl.exp(-distance), 0.0), 1)
    return weights
