"""Attention of prompt chunks over the paged cache in place, with the softmax computed tile by tile.

A tile holds consecutive tokens of one chunk, each with all query heads of one kv head, so that a key is read once for
the whole group. Which chunk a tile belongs to is found on the device: tile numbers of chunk c begin at
(offset(c) - offset(0)) // TOKENS + c, which leaves every chunk room enough whatever the offsets are and bounds the grid
by shapes. What a captured grid has too many of ends at once.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .sizes import next_power_of_2
from .softmax_tile import LOG2_E


class PrefillTiles(NamedTuple):
    """How the work of prompt attention is cut.

    Attributes:
        queries: rows of a query tile (tokens times heads of a group), a power of two >= 16.
        positions: KV positions of a tile, a power of two >= 16.
        warps: per program.
        stages: KV tiles in flight while one is worked on.
    """

    queries: int
    positions: int
    warps: int
    stages: int


def prefill_tiles(capability: tuple[int, int], group: int, head_dim: int, dtype: torch.dtype) -> PrefillTiles:
    """Return the tiles for a compute capability.

    Those of other than 9.0 are untuned and fit into 99 KiB of shared memory.
    """
    dim_pad = next_power_of_2(head_dim)
    at_least = next_power_of_2(group)
    if dtype.itemsize == 4 or dim_pad > 256:
        return PrefillTiles(max(16, at_least), 32 if dim_pad <= 128 else 16, warps=4, stages=1)
    if dim_pad > 128:
        return PrefillTiles(max(64, at_least), 32, warps=4, stages=2 if capability == (9, 0) else 1)
    if capability == (9, 0):
        # The block table's load takes stages too: with 5, two tiles are under way, with 3 or 4 one.
        return PrefillTiles(max(128, at_least), 64, warps=8, stages=5)
    return PrefillTiles(max(64, at_least), 64 if dim_pad <= 64 else 32, warps=4, stages=2)


CHUNKS_AT_ONCE = tl.constexpr(64)


@triton.jit
def find_tile(tile, chunk_offsets_ptr, num_tokens, num_chunks, TOKENS: tl.constexpr):
    """Return the chunk of a tile, where that begins and ends in the step, and the tile's first token in it.

    It is the last chunk whose tiles begin at or before `tile`; chunk C is the padding behind the chunks.
    """
    first = tl.load(chunk_offsets_ptr)
    chunk = num_chunks * 0 - 1
    for base in range(0, num_chunks + 1, CHUNKS_AT_ONCE):
        index = base + tl.arange(0, CHUNKS_AT_ONCE)
        inside = index <= num_chunks
        offset = tl.load(chunk_offsets_ptr + index, mask=inside, other=0)
        chunk += tl.sum((inside & ((offset - first) // TOKENS + index <= tile)).to(tl.int32), 0)
    begin = tl.load(chunk_offsets_ptr + chunk)
    end = tl.load(chunk_offsets_ptr + tl.minimum(chunk + 1, num_chunks))
    token = (tile - (begin - first) // TOKENS - chunk) * TOKENS
    return chunk, begin, tl.where(chunk < num_chunks, end, num_tokens), token


@triton.jit
def _attend_tile(
    q,
    q_position,
    tile_begin,
    first,
    end,
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
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take a tile of positions into the softmax; not `MASKED`, every query sees all of it."""
    position = tile_begin + tl.arange(0, TILE)
    dim = tl.arange(0, DIM_PAD)
    reached = position < end
    if WINDOW > 0:
        reached = reached & (position >= first)
    inside = reached[:, None] & (dim < HEAD_DIM)[None, :]
    if MASKED:
        block = tl.load(table_ptr + position // BLOCK_SIZE, mask=reached, other=0).to(tl.int64)
    else:
        block = tl.load(table_ptr + position // BLOCK_SIZE).to(tl.int64)
    line = (block * KV_HEADS + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE
    kv_offsets = line[:, None] * HEAD_DIM + dim[None, :]
    if MASKED or HEAD_DIM != DIM_PAD:
        # Masked loads, not only masked scores: what lies beyond the chunk, or before the first query's window, may be
        # another's NaN.
        k = tl.load(keys_ptr + kv_offsets, mask=inside, other=0.0)
        v = tl.load(values_ptr + kv_offsets, mask=inside, other=0.0)
    else:
        k = tl.load(keys_ptr + kv_offsets)
        v = tl.load(values_ptr + kv_offsets)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        visible = (position < end)[None, :] & (position[None, :] <= q_position[:, None])
        if WINDOW > 0:
            visible = visible & (position[None, :] > q_position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    shift = new_top
    if WINDOW > 0:
        # A query may see nothing of a tile: -inf must not be subtracted from -inf.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * scale - shift[:, None])
    decay = tl.exp2(top - shift)
    total = total * decay + tl.sum(weights, 1)
    result = tl.dot(weights.to(v.dtype), v, result * decay[:, None], input_precision="ieee")
    return new_top, total, result


@triton.jit(
    do_not_specialize=["num_tokens", "num_chunks"],
    do_not_specialize_on_alignment=["chunk_rows_ptr", "chunk_starts_ptr", "chunk_offsets_ptr"],
)
def prefill_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    chunk_rows_ptr,
    chunk_starts_ptr,
    chunk_offsets_ptr,
    out_ptr,
    scale,
    num_tokens,
    num_chunks,
    q_token_stride,
    q_head_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program per kv head and query tile; `scale` includes log2(e)."""
    TOKENS: tl.constexpr = QUERIES // GROUP
    kv_head = tl.program_id(0) % KV_HEADS
    # The last tiles of a chunk see the most positions: they start first, those of all heads.
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // KV_HEADS
    chunk, chunk_begin, chunk_end, tile_token = find_tile(tile, chunk_offsets_ptr, num_tokens, num_chunks, TOKENS)
    real = chunk < num_chunks
    if chunk_begin + tile_token >= chunk_end:
        return
    start = tl.load(chunk_starts_ptr + chunk, mask=real, other=0)
    table_ptr += tl.load(chunk_rows_ptr + chunk, mask=real, other=0).to(tl.int64) * table_stride

    query = tl.arange(0, QUERIES)
    dim = tl.arange(0, DIM_PAD)
    token = tile_token + query // GROUP
    head = kv_head * GROUP + query % GROUP
    q_inside = ((query < TOKENS * GROUP) & (chunk_begin + token < chunk_end))[:, None] & (dim < HEAD_DIM)[None, :]
    q_token = (chunk_begin + token).to(tl.int64)
    q_ptrs = q_ptr + (q_token * q_token_stride + head * q_head_stride)[:, None] + dim[None, :]
    q = tl.load(q_ptrs, mask=q_inside, other=0.0)
    q_position = start + token

    end = start + tl.minimum(tile_token + TOKENS, chunk_end - chunk_begin)
    end = tl.where(real, end, 0)
    # Up to here the first query, and so every one, sees all of a tile.
    seen = tl.where(real, (start + tile_token + 1) // TILE * TILE, 0)
    first = start * 0
    begin = first
    if WINDOW > 0:
        first = tl.maximum(start + tile_token - WINDOW + 1, 0)
        begin = first // TILE * TILE
        seen = begin
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    result = tl.zeros([QUERIES, DIM_PAD], tl.float32)
    for tile_begin in range(begin, seen, TILE):
        top, total, result = _attend_tile(
            q, q_position, tile_begin, first, end, top, total, result, keys_ptr, values_ptr, table_ptr, kv_head, scale,
            KV_HEADS, HEAD_DIM, DIM_PAD, BLOCK_SIZE, WINDOW, TILE, False,
        )  # fmt: skip
    for tile_begin in range(seen, end, TILE):
        top, total, result = _attend_tile(
            q, q_position, tile_begin, first, end, top, total, result, keys_ptr, values_ptr, table_ptr, kv_head, scale,
            KV_HEADS, HEAD_DIM, DIM_PAD, BLOCK_SIZE, WINDOW, TILE, True,
        )  # fmt: skip

    result = result / tl.where(total == 0.0, 1.0, total)[:, None]
    out_ptrs = out_ptr + (q_token * (KV_HEADS * GROUP) + head)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=q_inside)


def prefill_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    chunk_rows: torch.Tensor,
    chunk_starts: torch.Tensor,
    chunk_offsets: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    window: int,
    tiles: PrefillTiles,
) -> None:
    """Causal attention of prompt chunks whose own keys and values are in the cache already.

    Args:
        q: [T, heads, head_dim]; the last dimension is contiguous.
        keys, values: one layer's cache, [num_blocks, kv_heads, block_size, head_dim], contiguous.
        table: int32 [R + 1, M], the block table of the layer's group.
        chunk_rows, chunk_starts: int32 [C], row and first position of each chunk.
        chunk_offsets: int32 [C + 1], where each chunk begins in q; tokens from the last one on are padding.
        out: [T, heads, head_dim], contiguous, written from the first chunk on; padding gets zeros.
        scale: factor on the scores, positive.
        window: a query sees its own position and the window - 1 before it; 0 is all.
        tiles: see `PrefillTiles`.
    """
    (tokens, heads, head_dim), kv_heads, chunks = q.shape, keys.shape[1], chunk_rows.shape[0]
    group = heads // kv_heads
    grid = (kv_heads * (tokens // (tiles.queries // group) + chunks + 1),)
    prefill_kernel[grid](
        q, keys, values, table, chunk_rows, chunk_starts, chunk_offsets, out, scale * LOG2_E, tokens, chunks,
        q.stride(0), q.stride(1), table.stride(0),
        KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim, DIM_PAD=next_power_of_2(head_dim),
        BLOCK_SIZE=keys.shape[2], WINDOW=window, QUERIES=tiles.queries, TILE=tiles.positions,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
