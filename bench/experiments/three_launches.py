"""What the one kernel of decode attention replaced: a split-KV kernel and one that combines the splits.

`bench/decode_attention.py` measures against them, behind `rotate_and_write`.

Nothing on the host depends on a length. The grid is (lanes, kv_heads, splits); every program reads its lane's length on
the device and takes its share of the tiles, so one captured graph is right for all lengths. A short lane uses fewer
splits than there are: its other programs end at once, and the combining kernel skips them.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from twostroke.kernels.softmax_tile import LOG2_E, take_tile


class DecodeTiles(NamedTuple):
    """How the work of decode attention is cut.

    Attributes:
        positions: KV positions of a tile, a power of two >= 16.
        warps: per program.
        stages: tiles in flight while one is worked on.
        waves: programs per multiprocessor to aim for.
        min_splits: splits of a lane at the least, so that one long lane among many is shared out.
        min_share: tiles that a split takes at the least, so that short lanes are not cut into crumbs.
    """

    positions: int
    warps: int
    stages: int
    waves: int
    min_splits: int
    min_share: int


MAX_SPLITS = 64


def decode_tiles(capability: tuple[int, int], head_dim: int, dtype: torch.dtype) -> DecodeTiles:
    """Return the tiles for a compute capability.

    Those of other than 9.0 are untuned and fit into 99 KiB of shared memory.
    """
    row_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
    # The float32 product has no tensor cores and holds its operands in registers: twice smaller tiles avoid spills.
    tile_bytes = 8192 if dtype.itemsize == 4 else 16384
    positions = max(16, min(64, tile_bytes // row_bytes))
    stages = 4 if capability == (9, 0) and 2 * positions * row_bytes <= 32768 else 2
    return DecodeTiles(positions, warps=4, stages=stages, waves=4, min_splits=2, min_share=4)


def decode_splits(lanes: int, kv_heads: int, processors: int, tiles: DecodeTiles) -> int:
    """Return the splits per lane, a power of two: fixed by shapes alone, as a captured graph needs it."""
    wanted = tiles.waves * processors / (lanes * kv_heads)
    return max(tiles.min_splits, min(MAX_SPLITS, 2 ** round(math.log2(max(wanted, 1.0)))))


def workspace_size(lanes: int, heads: int, head_dim: int, splits: int) -> int:
    """float32 elements that `decode_attention` needs for partial results."""
    return lanes * heads * splits * (head_dim + 1)


@triton.jit
def _split_share(
    length,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SHARE: tl.constexpr,
):
    """Return (first visible position, its tile, number of tiles, tiles per split) of a lane."""
    first = length * 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    first_tile = first // TILE
    tiles = tl.cdiv(length, TILE) - first_tile
    share = tl.maximum(tl.cdiv(tiles, SPLITS), MIN_SHARE)
    return first, first_tile, tiles, share


@triton.jit(do_not_specialize_on_alignment=["lane_rows_ptr", "lane_lengths_ptr"])
def decode_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    lane_rows_ptr,
    lane_lengths_ptr,
    partial_ptr,
    log_sum_ptr,
    scale,
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
    SPLITS: tl.constexpr,
    MIN_SHARE: tl.constexpr,
):
    """One program per lane, kv head and split: softmax over its share for the whole group of query heads.

    Stores the share's normalised result and the base-2 logarithm of its softmax sum. `scale` includes log2(e).
    """
    lane = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lane_lengths_ptr + lane)
    first, first_tile, tiles, share = _split_share(length, WINDOW, TILE, SPLITS, MIN_SHARE)
    if split * share >= tiles:
        return
    begin = (first_tile + split * share) * TILE
    end = tl.minimum(begin + share * TILE, length)

    member = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, DIM_PAD)
    offset = tl.arange(0, TILE)
    head = kv_head * GROUP + member
    q_inside = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    q_ptrs = q_ptr + lane.to(tl.int64) * q_token_stride + head[:, None] * q_head_stride + dim[None, :]
    q = tl.load(q_ptrs, mask=q_inside, other=0.0)
    table_ptr += tl.load(lane_rows_ptr + lane).to(tl.int64) * table_stride

    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    result = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for tile_begin in range(begin, end, TILE):
        position = tile_begin + offset
        visible = (position >= first) & (position < end)
        # Every tile has a visible position.
        top, total, result = take_tile(
            q, position, visible, top, total, result, keys_ptr, values_ptr, table_ptr, kv_head, scale,
            KV_HEADS, HEAD_DIM, DIM_PAD, BLOCK_SIZE,
        )  # fmt: skip

    part = (lane.to(tl.int64) * (KV_HEADS * GROUP) + head) * SPLITS + split
    tl.store(partial_ptr + part[:, None] * HEAD_DIM + dim[None, :], result / total[:, None], mask=q_inside)
    tl.store(log_sum_ptr + part, top + tl.log2(total), mask=member < GROUP)


@triton.jit(do_not_specialize_on_alignment=["lane_lengths_ptr"])
def combine_kernel(
    partial_ptr,
    log_sum_ptr,
    lane_lengths_ptr,
    out_ptr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SHARE: tl.constexpr,
):
    """One program per lane and head: weighted mean of the used splits; zeros for a dead lane."""
    lane = tl.program_id(0)
    length = tl.load(lane_lengths_ptr + lane)
    _, _, tiles, share = _split_share(length, WINDOW, TILE, SPLITS, MIN_SHARE)
    split = tl.arange(0, SPLITS)
    used = split * share < tiles
    dim = tl.arange(0, DIM_PAD)
    query = lane.to(tl.int64) * HEADS + tl.program_id(1)
    part = query * SPLITS + split
    log_sum = tl.load(log_sum_ptr + part, mask=used, other=float("-inf"))
    top = tl.max(log_sum, 0)
    weight = tl.exp2(log_sum - tl.where(length > 0, top, 0.0))
    partial_ptrs = partial_ptr + part[:, None] * HEAD_DIM + dim[None, :]
    partial = tl.load(partial_ptrs, mask=used[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    total = tl.where(length > 0, tl.sum(weight, 0), 1.0)
    result = tl.sum(partial * weight[:, None], 0) / total
    tl.store(out_ptr + query * HEAD_DIM + dim, result.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


def decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lane_rows: torch.Tensor,
    lane_lengths: torch.Tensor,
    out: torch.Tensor,
    workspace: torch.Tensor,
    *,
    scale: float,
    window: int,
    splits: int,
    tiles: DecodeTiles,
) -> None:
    """Attention of one query token per lane, written into the first L tokens of `out`.

    Args:
        q: [T, heads, head_dim], T >= L; the last dimension is contiguous.
        keys, values: one layer's cache, [num_blocks, kv_heads, block_size, head_dim], contiguous.
        table: int32 [R + 1, M], the block table of the layer's group.
        lane_rows: int32 [L].
        lane_lengths: int32 [L], positions that the lane sees; 0 gives zeros.
        out: [T, heads, head_dim], contiguous.
        workspace: float32, at least `workspace_size` elements; free again when the kernels have run.
        scale: factor on the scores.
        window: newest positions that are visible; 0 is all.
        splits: a power of two, see `decode_splits`.
        tiles: see `DecodeTiles`.
    """
    lanes, (_, heads, head_dim), kv_heads = lane_rows.shape[0], q.shape, keys.shape[1]
    group = heads // kv_heads
    results = lanes * heads * splits
    partial, log_sum = workspace[: results * head_dim], workspace[results * head_dim :]
    dim_pad = triton.next_power_of_2(head_dim)
    cut = {"WINDOW": window, "TILE": tiles.positions, "SPLITS": splits, "MIN_SHARE": tiles.min_share}
    decode_kernel[(lanes, kv_heads, splits)](
        q, keys, values, table, lane_rows, lane_lengths, partial, log_sum, scale * LOG2_E,
        q.stride(0), q.stride(1), table.stride(0),
        KV_HEADS=kv_heads, GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)), HEAD_DIM=head_dim,
        DIM_PAD=dim_pad, BLOCK_SIZE=keys.shape[2], num_warps=tiles.warps, num_stages=tiles.stages, **cut,
    )  # fmt: skip
    combine_kernel[(lanes, heads)](
        partial, log_sum, lane_lengths, out, HEADS=heads, HEAD_DIM=head_dim, DIM_PAD=dim_pad, num_warps=4, **cut
    )  # fmt: skip
