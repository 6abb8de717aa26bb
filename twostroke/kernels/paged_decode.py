"""Attention of decode lanes over the paged cache, one kernel a layer.

What a lane needs is done where it is needed: the kernel norms and rotates the queries as it loads them, the new key
too; the program that has the end of a lane stores its key and value in the cache and takes them into account from
registers, so that nobody waits for them. The programs of a lane that is shared out leave partial results, and the last
of them to arrive adds these up in the order of the lane.

Nothing on the host depends on a length: a program reads on the device what it has to do (`decode_schedule`).

With programmatic dependent launch a program starts while the kernel before it ends. Before it waits, it reads only what
is older than that kernel: the schedule, block tables, rotary tables and the cache's past. This holds where every kernel
lets its dependents start only after its own wait.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import decode_schedule as schedule_layout
from .decode_schedule import DecodeSchedule
from .early import wait_for_kernel_ahead
from .ops import Rotary
from .sizes import next_power_of_2
from .softmax_tile import LOG2_E, take_tile

_RECORD = tl.constexpr(schedule_layout.RECORD)
_ROW, _LANE = tl.constexpr(schedule_layout.ROW), tl.constexpr(schedule_layout.LANE)
_BEGIN, _END = tl.constexpr(schedule_layout.BEGIN), tl.constexpr(schedule_layout.END)
_SPLIT, _SPLITS = tl.constexpr(schedule_layout.SPLIT), tl.constexpr(schedule_layout.SPLITS)


class DecodeTiles(NamedTuple):
    """How the work of decode attention is cut.

    Attributes:
        positions: KV positions of a tile, a power of two >= 16.
        warps: per program.
        stages: tiles in flight while one is worked on.
        programs: shares per multiprocessor to cut the batch into, about.
        min_share: tiles that a program takes at the least, so that short lanes are not cut into crumbs.
        ahead: tiles that a program asks for, into the L2 cache, before it turns to its queries.
        rounds: 1, or 2 if programs take shares one after the other; see `make_schedule`.
    """

    positions: int
    warps: int
    stages: int
    programs: int
    min_share: int
    ahead: int
    rounds: int = 1


def is_crowded(lanes: int, kv_heads: int, processors: int) -> bool:
    """Whether lanes alone fill a device of so many multiprocessors several times, so that few are shared out."""
    return lanes * kv_heads > 4 * processors


def decode_tiles(capability: tuple[int, int], head_dim: int, dtype: torch.dtype, *, crowded: bool) -> DecodeTiles:
    """Return the tiles for a compute capability.

    Those of 9.0 in 16 bits were measured, see bench/NOTES.md; the others are untuned and fit into 99 KiB of memory.

    Args:
        crowded: see `is_crowded`.
    """
    row_bytes = next_power_of_2(head_dim) * dtype.itemsize
    ahead = 2 if capability >= (9, 0) else 0
    if capability == (9, 0) and row_bytes <= 256 and dtype.itemsize == 2:
        if crowded:
            return DecodeTiles(32, warps=4, stages=5, programs=4, min_share=4, ahead=ahead)
        return DecodeTiles(64, warps=8, stages=5, programs=2, min_share=4, ahead=ahead)
    # The float32 product has no tensor cores and holds its operands in registers: twice smaller tiles avoid spills.
    tile_bytes = 8192 if dtype.itemsize == 4 else 16384
    positions = max(16, min(64, tile_bytes // row_bytes))
    return DecodeTiles(positions, warps=4, stages=2, programs=4, min_share=4, ahead=ahead)


def extra_programs(kv_heads: int, processors: int, tiles: DecodeTiles) -> int:
    """Return the programs per kv head beside one per lane: as many as it takes to share out a single lane."""
    return max(1, tiles.programs * processors // kv_heads)


class DecodeWorkspace(NamedTuple):
    """Where the programs of a lane that is shared out meet. Layers and graphs run one after the other and share it.

    Attributes:
        partial: float32, results of programs.
        log_sum: float32, base-2 logarithms of their softmax sums.
        arrivals: int32, counts the programs of a lane and kv head that are done; zero between launches.
        tickets: int32 [2], of a kernel whose programs take shares one after the other: shares taken, and programs that
            are done; zero between launches.
    """

    partial: torch.Tensor
    log_sum: torch.Tensor
    arrivals: torch.Tensor
    tickets: torch.Tensor

    @classmethod
    def zeros(cls, results: int, head_dim: int, device: torch.device) -> DecodeWorkspace:
        """Return a workspace for up to `results`; kernels need 2 * `extra_programs` * heads."""
        return cls(
            torch.zeros(results * head_dim, dtype=torch.float32, device=device),
            torch.zeros(results, dtype=torch.float32, device=device),
            torch.zeros(results, dtype=torch.int32, device=device),
            torch.zeros(2, dtype=torch.int32, device=device),
        )


@triton.jit
def _prefetch(pointers):
    """Ask for the lines behind the pointers, into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _ask_ahead(
    keys_ptr,
    values_ptr,
    table_ptr,
    kv_head,
    begin,
    end,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    AHEAD: tl.constexpr,
    LINE_DIMS: tl.constexpr,
):
    """Ask for the first `AHEAD` tiles of [begin, end): the memory's latency passes while the queries come."""
    if begin < end:
        dim = tl.minimum(tl.arange(0, DIM_PAD // LINE_DIMS) * LINE_DIMS, HEAD_DIM - 1)
        for tile in tl.static_range(AHEAD):
            position = tl.minimum(begin + tile * TILE + tl.arange(0, TILE), end - 1)
            block = tl.load(table_ptr + position // BLOCK_SIZE).to(tl.int64)
            line = (block * KV_HEADS + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE
            lines = line[:, None] * HEAD_DIM + dim[None, :]
            _prefetch(keys_ptr + lines)
            _prefetch(values_ptr + lines)


@triton.jit
def _rotated(
    x_ptrs, weight_ptr, cos, sin, dim, inside, eps, HEAD_DIM: tl.constexpr, NORM: tl.constexpr, ROTARY: tl.constexpr
):
    """Load heads [H, DIM_PAD] from their beginnings [H, 1], normed and rotated; `sin` is negated in the first half."""
    dtype: tl.constexpr = x_ptrs.dtype.element_ty
    own = tl.load(x_ptrs + dim[None, :], mask=inside, other=0.0)
    if ROTARY:
        partner = (dim + HEAD_DIM // 2) % HEAD_DIM
        x = own.to(tl.float32)
        y = tl.load(x_ptrs + partner[None, :], mask=inside, other=0.0).to(tl.float32)
        if NORM:
            inverse = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
            x_weight = tl.load(weight_ptr + dim, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
            y_weight = tl.load(weight_ptr + partner, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
            x = ((x * inverse).to(dtype).to(tl.float32) * x_weight).to(dtype).to(tl.float32)
            y = ((y * inverse).to(dtype).to(tl.float32) * y_weight).to(dtype).to(tl.float32)
        own = (x * cos + y * sin).to(dtype)
    return own


@triton.jit
def _combine(
    partial_ptr,
    log_sum_ptr,
    out_ptr,
    first_part,
    part_stride,
    splits,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    MEMBERS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Weighted mean of the partial results of all programs of a lane and kv head, `CHUNK` at a time, in their order."""
    member = tl.arange(0, MEMBERS)
    dim = tl.arange(0, DIM_PAD)
    inside = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    top = tl.full([MEMBERS], float("-inf"), tl.float32)
    total = tl.zeros([MEMBERS], tl.float32)
    result = tl.zeros([MEMBERS, DIM_PAD], tl.float32)
    for begin in range(0, splits, CHUNK):
        split = begin + tl.arange(0, CHUNK)
        part = (first_part + split * part_stride)[:, None] + member[None, :]
        used = (split < splits)[:, None] & (member < GROUP)[None, :]
        # Past the L1 cache, which does not see what other multiprocessors wrote.
        log_sum = tl.load(log_sum_ptr + part, mask=used, other=float("-inf"), cache_modifier=".cg")
        partial_ptrs = partial_ptr + part[:, :, None] * HEAD_DIM + dim[None, None, :]
        partial = tl.load(partial_ptrs, mask=used[:, :, None] & inside[None, :, :], other=0.0, cache_modifier=".cg")
        new_top = tl.where(member < GROUP, tl.maximum(top, tl.max(log_sum, 0)), 0.0)
        weight = tl.exp2(log_sum - new_top[None, :])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weight, 0)
        result = result * decay[:, None] + tl.sum(partial * weight[:, :, None], 0)
        top = new_top
    total = tl.where(member < GROUP, total, 1.0)
    out_ptrs = out_ptr + member[:, None] * HEAD_DIM + dim[None, :]
    tl.store(out_ptrs, (result / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    slots_ptr,
    schedule_ptr,
    partial_ptr,
    log_sum_ptr,
    arrivals_ptr,
    out_ptr,
    eps,
    scale,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ROTARY: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    MEMBERS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
    AHEAD: tl.constexpr,
    LINE_DIMS: tl.constexpr,
):
    """One program per kv head and record of the schedule: softmax over its share for the whole group of query heads.

    `scale` includes log2(e).
    """
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    record = schedule_ptr + (1 + item) * _RECORD
    items = tl.load(schedule_ptr)
    row = tl.load(record + _ROW).to(tl.int64)
    lane = tl.load(record + _LANE).to(tl.int64)
    begin = tl.load(record + _BEGIN)
    end = tl.load(record + _END)
    split = tl.load(record + _SPLIT)
    splits = tl.load(record + _SPLITS)
    if item >= items:
        return

    member = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, DIM_PAD)
    offset = tl.arange(0, TILE)
    table_ptr += row * table_stride
    newest = split == splits - 1
    dim_inside = (dim < HEAD_DIM)[None, :]
    slot = tl.load(slots_ptr + lane)
    cos = 0.0
    sin = 0.0
    if ROTARY:
        HALF: tl.constexpr = HEAD_DIM // 2
        angle = lane * HALF + dim % HALF
        cos = tl.load(cos_ptr + angle, mask=dim < HEAD_DIM, other=0.0)[None, :]
        sin = tl.load(sin_ptr + angle, mask=dim < HEAD_DIM, other=0.0)
        sin = tl.where(dim < HALF, -sin, sin)[None, :]
    if AHEAD > 0:
        _ask_ahead(
            keys_ptr, values_ptr, table_ptr, kv_head, begin, end,
            KV_HEADS, HEAD_DIM, DIM_PAD, BLOCK_SIZE, TILE, AHEAD, LINE_DIMS,
        )  # fmt: skip
    wait_for_kernel_ahead(PDL)

    head = kv_head * GROUP + member
    q_inside = (member < GROUP)[:, None] & dim_inside
    q_ptrs = q_ptr + lane * q_token_stride + head[:, None] * q_head_stride
    q = _rotated(q_ptrs, q_weight_ptr, cos, sin, dim, q_inside, eps, HEAD_DIM, Q_NORM, ROTARY)
    # The newest position: its key as the cache has it, and the softmax over it alone.
    one = tl.arange(0, 1)[:, None]
    new_inside = dim_inside & newest
    k_ptrs = k_ptr + lane * k_token_stride + kv_head * k_head_stride + one
    k_new = _rotated(k_ptrs, k_weight_ptr, cos, sin, dim, new_inside, eps, HEAD_DIM, K_NORM, ROTARY)
    k_new = k_new.to(keys_ptr.dtype.element_ty)
    v_ptrs = v_ptr + lane * v_token_stride + kv_head * v_head_stride + dim[None, :]
    v_new = tl.load(v_ptrs, mask=new_inside, other=0.0).to(values_ptr.dtype.element_ty)
    target = ((slot // BLOCK_SIZE * KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM + dim[None, :]
    tl.store(keys_ptr + target, k_new, mask=new_inside)
    tl.store(values_ptr + target, v_new, mask=new_inside)
    top = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), 1) * scale
    top = tl.where(newest, top, float("-inf"))
    total = tl.where(newest, tl.full([GROUP_PAD], 1.0, tl.float32), 0.0)
    result = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32) + v_new.to(tl.float32)

    for tile_begin in range(begin, end, TILE):
        position = tile_begin + offset
        top, total, result = take_tile(
            q, position, position < end, top, total, result, keys_ptr, values_ptr, table_ptr, kv_head, scale,
            KV_HEADS, HEAD_DIM, DIM_PAD, BLOCK_SIZE,
        )  # fmt: skip

    # A dead lane has no position: its mean over nothing must not be NaN.
    result = result / tl.where(splits == 0, 1.0, total)[:, None]
    out_ptr += (lane * KV_HEADS + kv_head) * (GROUP * HEAD_DIM)
    in_group = member[:, None] * HEAD_DIM + dim[None, :]
    if splits <= 1:
        tl.store(out_ptr + in_group, result.to(out_ptr.dtype.element_ty), mask=q_inside)
    else:
        part = (item * KV_HEADS + kv_head) * GROUP
        tl.store(partial_ptr + part * HEAD_DIM + in_group, result, mask=q_inside)
        tl.store(log_sum_ptr + part + member, top + tl.log2(total), mask=member < GROUP)
        # All threads have stored before one of them announces it.
        tl.debug_barrier()
        first = (item - split) * KV_HEADS + kv_head
        if tl.atomic_add(arrivals_ptr + first, 1, sem="acq_rel", scope="gpu") == splits - 1:
            tl.store(arrivals_ptr + first, 0)
            _combine(
                partial_ptr, log_sum_ptr, out_ptr, first * GROUP, KV_HEADS * GROUP, splits,
                GROUP, HEAD_DIM, DIM_PAD, MEMBERS, CHUNK,
            )  # fmt: skip


def decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotary: Rotary | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    schedule: DecodeSchedule,
    out: torch.Tensor,
    workspace: DecodeWorkspace,
    *,
    scale: float,
    tiles: DecodeTiles,
    early: bool = False,
) -> None:
    """Store each lane's key and value, and attend with its query: `ops.rotate_`, `cache_write` and attention in one.

    Args:
        q: [L, heads, head_dim], may be strided; the last dimension is contiguous. Not changed.
        k, v: [L, kv_heads, head_dim], likewise.
        rotary: applied to q and k; None if there is nothing to apply.
        keys, values: one layer's cache, [num_blocks, kv_heads, block_size, head_dim], contiguous.
        table: int32 [R + 1, M], the block table of the layer's group.
        slots: int64 [>= L], block * block_size + offset of each lane's newest position. Dead lanes write nothing.
        schedule: of the step, see `make_schedule`.
        out: [>= L, heads, head_dim], contiguous; a dead lane gets zeros.
        workspace: for `schedule.extra` at least; free again when the kernel has run.
        scale: factor on the scores.
        tiles: see `DecodeTiles`; its positions are those of the schedule.
        early: start while the kernel before ends (programmatic dependent launch, compute capability 9.0 and later).
            Not right behind the kernel that writes the schedule.
    """
    (lanes, heads, head_dim), kv_heads = q.shape, keys.shape[1]
    group, dim_pad = heads // kv_heads, next_power_of_2(head_dim)
    members = next_power_of_2(group)
    cos, sin, q_weight, k_weight, eps = rotary or (q, q, None, None, 0.0)
    decode_kernel[(kv_heads, lanes + schedule.extra)](
        q, k, v, cos, sin, q if q_weight is None else q_weight, k if k_weight is None else k_weight,
        keys, values, table, slots, schedule.words, *workspace[:3], out, eps, scale * LOG2_E,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), table.stride(0),
        KV_HEADS=kv_heads, GROUP=group, GROUP_PAD=max(16, members), HEAD_DIM=head_dim, DIM_PAD=dim_pad,
        BLOCK_SIZE=keys.shape[2], TILE=tiles.positions,
        ROTARY=rotary is not None, Q_NORM=q_weight is not None, K_NORM=k_weight is not None,
        MEMBERS=members, CHUNK=max(1, 4096 // (members * dim_pad)), PDL=early, AHEAD=tiles.ahead,
        LINE_DIMS=min(dim_pad, 128 // keys.element_size()),
        num_warps=tiles.warps, num_stages=tiles.stages, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
