"""What the programs of a row's splits hand to the program of the row, in Triton.

Values [S, splits] are the largest logit of each split, weights [S, splits] the sum of 2 ** (gap * decay) over its
tokens, their gaps taken to the split's largest logit.
"""

# mypy: allow-untyped-defs

import triton
import triton.language as tl

_INFINITY = tl.constexpr(float("inf"))
NO_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def first_largest(x, ids):
    """The largest of x, and the lowest id that has it."""
    best = tl.max(x, 0)
    return best, first_id(x, best, ids)


@triton.jit
def first_id(x, value, ids):
    """The lowest id at which x has the value."""
    return tl.min(tl.where(x == value, ids, NO_ID), 0)


@triton.jit
def load_splits(values, position, num_splits, other, SPLITS: tl.constexpr):
    """The entries of a row's splits [SPLITS], `other` behind the last one."""
    lanes = tl.arange(0, SPLITS)
    return tl.load(values + position * num_splits + lanes, mask=lanes < num_splits, other=other)


@triton.jit
def load_weights(values, weights, position, num_splits, best, decay, SPLITS: tl.constexpr):
    """The weights of a row's splits [SPLITS], gaps taken to the row's largest logit `best`."""
    gap = best - load_splits(values, position, num_splits, -_INFINITY, SPLITS)
    weight = load_splits(weights, position, num_splits, 0.0, SPLITS)
    return tl.where(gap < _INFINITY, weight * tl.exp2(gap * decay), 0.0)
