"""A step of the softmax: a tile of the paged cache is read and taken into what the tiles before it gave."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2_E = math.log2(math.e)
"""Part of the factor on the scores, since their exponentials are powers of two."""


@triton.jit
def take_tile(
    q,
    position,
    visible,
    top,
    total,
    result,
    keys_ptr,
    values_ptr,
    table_ptr,
    kv_head,
    scale,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Return (largest score, sum of weights, sum of weighted values) of queries that see some positions more.

    `scale` includes log2(e). A position must be visible here or in a tile before, so that the largest score is finite.
    """
    dim = tl.arange(0, DIM_PAD)
    block = tl.load(table_ptr + position // BLOCK_SIZE, mask=visible, other=0).to(tl.int64)
    line = (block * KV_HEADS + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE
    # Masked loads, not only masked scores: what lies beyond may be the NaN of an earlier owner.
    inside = visible[:, None] & (dim < HEAD_DIM)[None, :]
    kv_offsets = line[:, None] * HEAD_DIM + dim[None, :]
    k = tl.load(keys_ptr + kv_offsets, mask=inside, other=0.0)
    v = tl.load(values_ptr + kv_offsets, mask=inside, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(visible[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    decay = tl.exp2(top - new_top)
    total = total * decay + tl.sum(weights, 1)
    result = tl.dot(weights.to(v.dtype), v, result * decay[:, None], input_precision="ieee")
    return new_top, total, result
