"""Brackets in Triton: two gaps between which the radius of a row with filters lies, estimated from a part of the row.

The sample is 4,096 tokens in runs of 16 neighbours, evenly spread over the vocabulary. Of top_p the weight beyond a gap
is estimated, not that within it: few tokens can hold most of the weight and be missed, but then the tail is still that
of the sample, and the weight of all tokens is known from the survey. A wrong bracket is noticed (`radius.py`), and
costs time only.
"""

# mypy: allow-untyped-defs

import math

import triton
import triton.language as tl

from .barred_logits import gaps, num_barred
from .early import wait_for_kernel_ahead
from .splits import first_id, load_splits, load_weights

_INFINITY = tl.constexpr(float("inf"))
_INFINITY_BITS = tl.constexpr(0x7F800000)
_LOG2_E = tl.constexpr(math.log2(math.e))

_SAMPLE = tl.constexpr(4096)
_RUN = tl.constexpr(16)
_STEPS = tl.constexpr(16)
"""Halvings of an interval of all floats >= 0: what is left is 1/256 of the gap."""
_DEVIATIONS = tl.constexpr(4.0)
_FEWEST = tl.constexpr(8.0)
"""Tokens of the sample that lie within the bracket's far end at least, since the likeliest may not be in the sample."""
_NOTHING_TO_DRAW = tl.constexpr(-1.0)
_ROUNDING = tl.constexpr(2.0**-20)


@triton.jit
def _edge(gap, weights, allowed, floor, decay, deviations):
    """The gap (bits) from which on the weight beyond it is at most `allowed`: a lower and an upper bound of it.

    The weight beyond varies as that of randomly drawn tokens, none of which weighs more than one at the gap: its
    standard deviation is at most the root of that token's weight times the weight beyond. So many of them are added to
    it. Weights up to `floor` (bits) do not count.
    """
    bits = gap.to(tl.int32, bitcast=True)
    low = tl.max(bits, 0) * 0
    high = low + _INFINITY_BITS
    for _ in range(_STEPS):
        middle = low + (high - low) // 2
        counted = tl.maximum(middle, floor)
        beyond = tl.sum(tl.where(bits > counted, weights, 0.0), 0)
        heaviest = tl.exp2(counted.to(tl.float32, bitcast=True) * decay)
        enough = beyond + deviations * tl.sqrt(heaviest * allowed) <= allowed
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return low, high


@triton.jit
def find_bracket(
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
    nears,
    fars,
    tokens,
    errors,
    NUM_STOPS: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Ends greedy rows and errors, whose far end is below 0; for the others, the bracket's ends; grid [S].

    Tokens within the near end are kept for certain, those beyond the far one are not. Both are infinite for a row
    without filters. Of top_k the near end is below 0, so that top_p, within it, can be found in the same bracket.
    """
    wait_for_kernel_ahead(PDL)
    position = tl.program_id(0)
    row = tl.load(rows + position)
    values = load_splits(split_values, position, num_splits, -_INFINITY, SPLITS)
    best = tl.max(values, 0)
    failed = tl.abs(best) == _INFINITY
    tl.store(errors + position, failed.to(tl.int32))
    tl.store(bests + position, best)
    temperature = tl.load(temperatures + row)
    near = temperature * 0.0 + _INFINITY
    far = near
    if (temperature > 0.0) & (failed == 0):
        top_k = tl.load(top_ks + row)
        top_p = tl.load(top_ps + row)
        by_k = (top_k > 0) & (top_k < vocab)
        if by_k | (top_p < 1.0):
            lanes = tl.arange(0, _SAMPLE)
            ids = lanes // _RUN * tl.maximum(vocab // _SAMPLE * _RUN, _RUN) + lanes % _RUN
            barred = num_barred(outputs, min_outputs, row, NUM_STOPS)
            gap = gaps(
                logits + position.to(tl.int64) * logits_stride, ids, vocab, stop_ids + row, stop_stride, barred, best
            )
            decay = tl.div_rn(-_LOG2_E, temperature)
            sampled = tl.minimum(vocab, _SAMPLE).to(tl.float32)
            share = sampled / vocab
            within = tl.where(by_k, top_k.to(tl.float32) * share, 0.0)
            within += _DEVIATIONS * tl.sqrt(within) + _FEWEST
            _, far_bits = _edge(gap, tl.where(ids < vocab, 1.0, 0.0), tl.maximum(sampled - within, 0.0), 0, 0.0, 0.0)
            near = temperature * 0.0 - 1.0
            if by_k == 0:
                mass = tl.sum(load_weights(split_values, split_weights, position, num_splits, best, decay, SPLITS), 0)
                allowed = (1.0 - top_p) * mass * share
                weights = tl.exp2(gap * decay)
                # NOTE: without the likeliest, since one of them in the sample tells little of how many there are.
                near_bits, _ = _edge(gap, weights, allowed, far_bits, decay, -_DEVIATIONS)
                _, enough_bits = _edge(gap, weights, allowed, 0, decay, _DEVIATIONS)
                far_bits = tl.maximum(far_bits, enough_bits)
                near = tl.where(near_bits > 0, (near_bits - 1).to(tl.float32, bitcast=True), near)
            far = far_bits.to(tl.float32, bitcast=True)
        min_p = tl.load(min_ps + row)
        if min_p > 0.0:
            # NOTE: a hair of room, in which distances decide, not gaps.
            farthest = -tl.log(min_p) * temperature
            near = tl.minimum(near, farthest * (1.0 - _ROUNDING))
            far = tl.minimum(far, farthest * (1.0 + _ROUNDING))
    else:
        token = first_id(values, best, load_splits(split_ids, position, num_splits, 0, SPLITS))
        tl.store(tokens + position, tl.where(failed, 0, token))
        far = temperature * 0.0 + _NOTHING_TO_DRAW
    tl.store(nears + position, near)
    tl.store(fars + position, far)
