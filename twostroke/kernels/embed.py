"""From a step's tokens to what the first layer starts from, in one kernel: embedding, norm, and rotary tables."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .early import early, wait_for_kernel_ahead
from .norm import norm_warps, normed_row
from .ops import Embedded
from .sizes import next_power_of_2


@triton.jit(do_not_specialize_on_alignment=["ids_ptr", "positions_ptr"])
def embed_kernel(
    ids_ptr,
    positions_ptr,
    embedding_ptr,
    weight_ptr,
    inv_freq_ptr,
    residual_ptr,
    normed_ptr,
    cos_ptr,
    sin_ptr,
    eps,
    factor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per token."""
    wait_for_kernel_ahead(PDL)
    token = tl.program_id(0).to(tl.int64)
    column, pair = tl.arange(0, BLOCK), tl.arange(0, HALF_PAD)
    inside, pair_inside = column < WIDTH, pair < HALF
    line = tl.load(ids_ptr + token) * WIDTH
    position = tl.load(positions_ptr + token).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    inv_freq = tl.load(inv_freq_ptr + pair, mask=pair_inside, other=0.0)
    x = tl.load(embedding_ptr + line + column, mask=inside, other=0.0)
    angle = position * inv_freq
    tl.store(cos_ptr + token * HALF + pair, tl.cos(angle) * factor, mask=pair_inside)
    tl.store(sin_ptr + token * HALF + pair, tl.sin(angle) * factor, mask=pair_inside)
    tl.store(residual_ptr + token * WIDTH + column, x, mask=inside)
    tl.store(normed_ptr + token * WIDTH + column, normed_row(x, weight, eps, WIDTH), mask=inside)


def embed(
    ids: torch.Tensor,
    positions: torch.Tensor,
    embedding: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    inv_freq: torch.Tensor,
    factor: float,
) -> Embedded:
    """Triton twin of `ops.embed`."""
    tokens, width, half = len(ids), embedding.shape[1], len(inv_freq)
    residual = torch.empty(tokens, width, dtype=embedding.dtype, device=ids.device)
    cos = torch.empty(tokens, half, dtype=torch.float32, device=ids.device)
    made = Embedded(torch.empty_like(residual), residual, cos, torch.empty_like(cos))
    embed_kernel[(tokens,)](
        ids, positions, embedding, weight, inv_freq, made.residual, made.normed, made.cos, made.sin, eps, factor,
        WIDTH=width, BLOCK=next_power_of_2(width), HALF=half, HALF_PAD=next_power_of_2(half),
        num_warps=norm_warps(width), **early(ids.device),
    )  # fmt: skip
    return made
