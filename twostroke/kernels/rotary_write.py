"""The way of a step's queries, keys and values from the projection to attention, in one kernel.

Keys are normed, rotated and stored in the paged cache, values stored there; queries are normed and rotated in place,
unless attention does it.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .sizes import cdiv, next_power_of_2


@triton.jit
def _normed_halves(x_ptrs, weight_ptr, pair, inside, eps, HALF: tl.constexpr, NORM: tl.constexpr, dtype: tl.constexpr):
    """Load both halves of some heads [HEADS, HALF_PAD], float32, normed where a weight is given."""
    a = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x_ptrs + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        inverse = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        weight_a = tl.load(weight_ptr + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
        weight_b = tl.load(weight_ptr + HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
        a = ((a * inverse).to(dtype).to(tl.float32) * weight_a).to(dtype).to(tl.float32)
        b = ((b * inverse).to(dtype).to(tl.float32) * weight_b).to(dtype).to(tl.float32)
    return a, b


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "first_ptr"])
def rotate_and_write_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    keys_ptr,
    values_ptr,
    slots_ptr,
    first_ptr,
    eps,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
):
    """One program per token and `HEADS` heads: tiles of k with the same heads of v, then of q, or none of these."""
    token = tl.program_id(0).to(tl.int64)
    if token < tl.load(first_ptr):
        return
    tile = tl.program_id(1)
    pair = tl.arange(0, HALF_PAD)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    cos = tl.load(cos_ptr + token * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    KV_TILES: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    if tile < KV_TILES:
        head = tile * HEADS + tl.arange(0, HEADS)
        inside = (head < KV_HEADS)[:, None] & (pair < HALF)[None, :]
        k_ptrs = k_ptr + token * k_token_stride + head[:, None] * k_head_stride + pair[None, :]
        v_ptrs = v_ptr + token * v_token_stride + head[:, None] * v_head_stride + pair[None, :]
        a, b = _normed_halves(k_ptrs, k_weight_ptr, pair, inside, eps, HALF, K_NORM, dtype)
        slot = tl.load(slots_ptr + token)
        # int64 from here on: a cache of more than 2**31 elements is common.
        line = ((slot // BLOCK_SIZE) * KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
        target = line[:, None] * (2 * HALF) + pair[None, :]
        tl.store(keys_ptr + target, (a * cos - b * sin).to(dtype), mask=inside)
        tl.store(keys_ptr + target + HALF, (b * cos + a * sin).to(dtype), mask=inside)
        tl.store(values_ptr + target, tl.load(v_ptrs, mask=inside, other=0.0), mask=inside)
        tl.store(values_ptr + target + HALF, tl.load(v_ptrs + HALF, mask=inside, other=0.0), mask=inside)
    else:
        head = (tile - KV_TILES) * HEADS + tl.arange(0, HEADS)
        inside = (head < Q_HEADS)[:, None] & (pair < HALF)[None, :]
        q_ptrs = q_ptr + token * q_token_stride + head[:, None] * q_head_stride + pair[None, :]
        a, b = _normed_halves(q_ptrs, q_weight_ptr, pair, inside, eps, HALF, Q_NORM, dtype)
        tl.store(q_ptrs, (a * cos - b * sin).to(dtype), mask=inside)
        tl.store(q_ptrs + HALF, (b * cos + a * sin).to(dtype), mask=inside)


def rotate_and_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    first: torch.Tensor,
    *,
    rotate_queries: bool = True,
) -> None:
    """`ops.rotate_` on q and k, then `cache_write` of k and v; q is changed in place, k is not.

    Args:
        q: [T, heads, D], may be strided; last dimension contiguous. k, v: [T, kv_heads, D], likewise.
        cos, sin: float32 [T, D / 2].
        q_weight, k_weight: [D] or None, weights of the heads' norms. eps: of these norms.
        keys, values: one layer's cache, [num_blocks, kv_heads, block_size, D], contiguous.
        slots: int64 [T], block * block_size + offset.
        first: int32 [>= 1]; tokens before first[0] are left alone. It is read on the device.
        rotate_queries: False: q is left alone.
    """
    tokens, q_heads, head_dim = q.shape
    kv_heads, half = k.shape[1], head_dim // 2
    half_pad = next_power_of_2(half)
    heads = min(next_power_of_2(max(q_heads, kv_heads)), max(1, 512 // half_pad))
    # NOTE: the grid alone tells whether queries are rotated: a warm-up of one of both ways compiles the other.
    tiles = cdiv(kv_heads, heads) + (cdiv(q_heads, heads) if rotate_queries else 0)
    rotate_and_write_kernel[(tokens, tiles)](
        q, k, v, cos, sin, q if q_weight is None else q_weight, k if k_weight is None else k_weight,
        keys, values, slots, first, eps,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        Q_HEADS=q_heads, KV_HEADS=kv_heads, HALF=half, HALF_PAD=half_pad, HEADS=heads, BLOCK_SIZE=keys.shape[2],
        Q_NORM=q_weight is not None, K_NORM=k_weight is not None,
    )  # fmt: skip
