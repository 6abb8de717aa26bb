"""Paged attention whose result for a token depends on its own sequence alone, to the bit.

Every token, of a lane or of a prompt chunk, is one program per kv head, which goes through the sequence in tiles that
begin at multiples of the tile's size. So a token that was decoded and one that is computed anew as part of a prompt, in
whatever chunk, see the same sums in the same order. What it costs: the keys of a chunk are read once for each of its
tokens, and a single long sequence is not shared out.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .sizes import next_power_of_2
from .softmax_tile import LOG2_E, take_tile
from .step import StepInputs


class InvariantTiles(NamedTuple):
    """How attention is cut; never by what is in the step.

    Attributes:
        positions: KV positions of a tile, a power of two >= 16.
        warps: per program.
        stages: tiles in flight while one is worked on.
    """

    positions: int
    warps: int
    stages: int


def invariant_tiles(capability: tuple[int, int], head_dim: int, dtype: torch.dtype) -> InvariantTiles:
    """Return the tiles for a compute capability; those of other than 9.0 fit into 99 KiB of shared memory."""
    row_bytes = next_power_of_2(head_dim) * dtype.itemsize
    positions = max(16, min(64, (8192 if dtype.itemsize == 4 else 16384) // row_bytes))
    return InvariantTiles(positions, warps=4, stages=3 if capability == (9, 0) else 2)


_CHUNKS_AT_ONCE = tl.constexpr(64)


@triton.jit
def _chunk_of(token, chunk_offsets_ptr, num_chunks):
    """Return the last chunk that begins at or before `token`: -1 before the first, C in the padding behind them."""
    chunk = num_chunks * 0 - 1
    for base in range(0, num_chunks + 1, _CHUNKS_AT_ONCE):
        index = base + tl.arange(0, _CHUNKS_AT_ONCE)
        inside = index <= num_chunks
        chunk += tl.sum((inside & (tl.load(chunk_offsets_ptr + index, mask=inside, other=0) <= token)).to(tl.int32), 0)
    return chunk


@triton.jit
def _sequence_of(
    token,
    lane_rows_ptr,
    lane_lengths_ptr,
    chunk_rows_ptr,
    chunk_starts_ptr,
    chunk_offsets_ptr,
    num_lanes,
    num_chunks,
):
    """Return the row of a token and the positions that it sees, 0 for padding and dead lanes."""
    lane_length = tl.load(lane_lengths_ptr + token, mask=token < num_lanes, other=0)
    chunk = _chunk_of(token, chunk_offsets_ptr, num_chunks)
    # A lane that is not in use is dead, and a chunk token may lie in its place.
    in_chunk = (lane_length == 0) & (chunk >= 0) & (chunk < num_chunks)
    begin = tl.load(chunk_offsets_ptr + chunk, mask=in_chunk, other=0)
    start = tl.load(chunk_starts_ptr + chunk, mask=in_chunk, other=0)
    chunk_row = tl.load(chunk_rows_ptr + chunk, mask=in_chunk, other=0)
    lane_row = tl.load(lane_rows_ptr + token, mask=lane_length > 0, other=0)
    length = tl.where(in_chunk, start + token - begin + 1, lane_length)
    return tl.where(in_chunk, chunk_row, lane_row), length


@triton.jit(
    do_not_specialize=["num_lanes", "num_chunks"],
    do_not_specialize_on_alignment=[
        "lane_rows_ptr",
        "lane_lengths_ptr",
        "chunk_rows_ptr",
        "chunk_starts_ptr",
        "chunk_offsets_ptr",
    ],
)
def invariant_attention_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    lane_rows_ptr,
    lane_lengths_ptr,
    chunk_rows_ptr,
    chunk_starts_ptr,
    chunk_offsets_ptr,
    out_ptr,
    scale,
    num_lanes,
    num_chunks,
    q_token_stride,
    q_head_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program per token and kv head; `scale` includes log2(e)."""
    token = tl.program_id(0)
    kv_head = tl.program_id(1)
    row, length = _sequence_of(
        token,
        lane_rows_ptr,
        lane_lengths_ptr,
        chunk_rows_ptr,
        chunk_starts_ptr,
        chunk_offsets_ptr,
        num_lanes,
        num_chunks,
    )
    table_ptr += row.to(tl.int64) * table_stride
    member = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, DIM_PAD)
    head = kv_head * GROUP + member
    q_inside = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    q_ptrs = q_ptr + token.to(tl.int64) * q_token_stride + (head * q_head_stride)[:, None] + dim[None, :]
    q = tl.load(q_ptrs, mask=q_inside, other=0.0)

    begin = length * 0
    if WINDOW > 0:
        begin = tl.maximum(length - WINDOW, 0) // TILE * TILE
    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    result = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for tile_begin in range(begin, length, TILE):
        position = tile_begin + tl.arange(0, TILE)
        visible = position < length
        if WINDOW > 0:
            visible = visible & (position >= length - WINDOW)
        top, total, result = take_tile(
            q, position, visible, top, total, result, keys_ptr, values_ptr, table_ptr, kv_head, scale,
            KV_HEADS, HEAD_DIM, DIM_PAD, BLOCK_SIZE,
        )  # fmt: skip

    result = result / tl.where(total == 0.0, 1.0, total)[:, None]
    out_token = token.to(tl.int64) * (KV_HEADS * GROUP)
    tl.store(
        out_ptr + (out_token + head)[:, None] * HEAD_DIM + dim[None, :],
        result.to(out_ptr.dtype.element_ty),
        mask=q_inside,
    )


def invariant_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    step: StepInputs,
    *,
    scale: float,
    window: int,
    tiles: InvariantTiles,
) -> torch.Tensor:
    """Causal attention of all tokens of a step, whose keys and values are in the cache already.

    Args:
        q: [T, heads, head_dim]; the last dimension is contiguous.
        keys, values: one layer's cache, [num_blocks, kv_heads, block_size, head_dim], contiguous.
        table: int32 [R + 1, M], the block table of the layer's group.
        step: says which sequence each token belongs to.
        scale: factor on the scores.
        window: a query sees its own position and the window - 1 before it; 0 is all.
        tiles: see `InvariantTiles`.

    Returns:
        [T, heads, head_dim], contiguous, dtype of q; zeros for dead lanes and padding.
    """
    (tokens, heads, head_dim), kv_heads = q.shape, keys.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    invariant_attention_kernel[(tokens, kv_heads)](
        q, keys, values, table, step.lane_rows, step.lane_lengths, step.chunk_rows, step.chunk_starts,
        step.chunk_offsets, out, scale * LOG2_E, step.num_lanes, step.num_chunks,
        q.stride(0), q.stride(1), table.stride(0),
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, GROUP_PAD=max(16, next_power_of_2(heads // kv_heads)),
        HEAD_DIM=head_dim, DIM_PAD=next_power_of_2(head_dim), BLOCK_SIZE=keys.shape[2], WINDOW=window,
        TILE=tiles.positions, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out
