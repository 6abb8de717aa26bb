"""Rotary position embedding: the tables of a step, and the rotation of its queries and keys."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["positions_ptr"])
def rotary_tables_kernel(
    positions_ptr, inv_freq_ptr, cos_ptr, sin_ptr, factor, HALF: tl.constexpr, HALF_PAD: tl.constexpr
):
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF_PAD)
    inside = pair < HALF
    position = tl.load(positions_ptr + token).to(tl.float32)
    angle = position * tl.load(inv_freq_ptr + pair, mask=inside, other=0.0)
    tl.store(cos_ptr + token * HALF + pair, tl.cos(angle) * factor, mask=inside)
    tl.store(sin_ptr + token * HALF + pair, tl.sin(angle) * factor, mask=inside)


@triton.jit
def _rotate_heads(
    x_ptr,
    weight_ptr,
    cos,
    sin,
    first_head,
    heads,
    head_stride,
    eps,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
):
    """Norm and rotate `HEADS` heads of one token in place."""
    dtype = x_ptr.dtype.element_ty
    head = first_head + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF_PAD)
    inside = (head < heads)[:, None] & (pair < HALF)[None, :]
    x_ptrs = x_ptr + head[:, None] * head_stride + pair[None, :]
    a = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x_ptrs + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        inverse = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        weight_a = tl.load(weight_ptr + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
        weight_b = tl.load(weight_ptr + HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
        a = ((a * inverse).to(dtype).to(tl.float32) * weight_a).to(dtype).to(tl.float32)
        b = ((b * inverse).to(dtype).to(tl.float32) * weight_b).to(dtype).to(tl.float32)
    tl.store(x_ptrs, (a * cos - b * sin).to(dtype), mask=inside)
    tl.store(x_ptrs + HALF, (b * cos + a * sin).to(dtype), mask=inside)


@triton.jit
def rotate_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
):
    """One program per token and `HEADS` heads, those of q first."""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    pair = tl.arange(0, HALF_PAD)
    cos = tl.load(cos_ptr + token * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    Q_TILES: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    if tile < Q_TILES:
        _rotate_heads(
            q_ptr + token * q_token_stride, q_weight_ptr, cos, sin, tile * HEADS, Q_HEADS, q_head_stride, eps,
            HALF, HALF_PAD, HEADS, Q_NORM,
        )  # fmt: skip
    else:
        _rotate_heads(
            k_ptr + token * k_token_stride, k_weight_ptr, cos, sin, (tile - Q_TILES) * HEADS, K_HEADS, k_head_stride,
            eps, HALF, HALF_PAD, HEADS, K_NORM,
        )  # fmt: skip


def rotary_tables(positions: torch.Tensor, inv_freq: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Triton twin of `ops.rotary_tables`."""
    tokens, half = positions.shape[0], inv_freq.shape[0]
    cos = torch.empty(tokens, half, dtype=torch.float32, device=positions.device)
    sin = torch.empty_like(cos)
    rotary_tables_kernel[(tokens,)](
        positions, inv_freq, cos, sin, factor, HALF=half, HALF_PAD=triton.next_power_of_2(half), num_warps=1
    )
    return cos, sin


def rotate_(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
) -> None:
    """Triton twin of `ops.rotate_`."""
    tokens, q_heads, head_dim = q.shape
    k_heads, half = k.shape[1], head_dim // 2
    half_pad = triton.next_power_of_2(half)
    heads = min(triton.next_power_of_2(max(q_heads, k_heads)), max(1, 512 // half_pad))
    rotate_kernel[(tokens, triton.cdiv(q_heads, heads) + triton.cdiv(k_heads, heads))](
        q, k, cos, sin, q if q_weight is None else q_weight, k if k_weight is None else k_weight, eps,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        Q_HEADS=q_heads, K_HEADS=k_heads, HALF=half, HALF_PAD=half_pad, HEADS=heads,
        Q_NORM=q_weight is not None, K_NORM=k_weight is not None,
    )  # fmt: skip
