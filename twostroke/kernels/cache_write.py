"""Storing a step's keys and values in the paged cache."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .sizes import cdiv, next_power_of_2


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "first_ptr"])
def cache_write_kernel(
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    slots_ptr,
    first_ptr,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    HEADS: tl.constexpr,
):
    """One program per token and `HEADS` heads."""
    token = tl.program_id(0).to(tl.int64)
    if token < tl.load(first_ptr):
        return
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, DIM_PAD)
    inside = (head < KV_HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
    slot = tl.load(slots_ptr + token)
    block = slot // BLOCK_SIZE
    # int64 from here on: a cache of more than 2**31 elements is common.
    target = ((block * KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE)[:, None] * HEAD_DIM + dim[None, :]
    k = tl.load(k_ptr + token * k_token_stride + head[:, None] * k_head_stride + dim[None, :], mask=inside)
    v = tl.load(v_ptr + token * v_token_stride + head[:, None] * v_head_stride + dim[None, :], mask=inside)
    tl.store(keys_ptr + target, k, mask=inside)
    tl.store(values_ptr + target, v, mask=inside)


def cache_write(
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    first: torch.Tensor,
) -> None:
    """Store k and v [T, kv_heads, head_dim] at `slots`, int64 [T], of one layer's cache, from token `first[0]` on.

    `first` is int32 [>= 1]; it is read on the device. The cache tensors are [num_blocks, kv_heads, block_size,
    head_dim], contiguous; a slot is block * block_size + offset. Tokens that share a slot (padding, in the dummy block)
    overwrite each other in any order.
    """
    tokens, kv_heads, head_dim = k.shape
    dim_pad = next_power_of_2(head_dim)
    heads = min(next_power_of_2(kv_heads), max(1, 1024 // dim_pad))
    cache_write_kernel[(tokens, cdiv(kv_heads, heads))](
        k, v, keys, values, slots, first, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        KV_HEADS=kv_heads, BLOCK_SIZE=keys.shape[2], HEAD_DIM=head_dim, DIM_PAD=dim_pad, HEADS=heads,
    )  # fmt: skip
