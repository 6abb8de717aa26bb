"""The tables of the rotary position embedding."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .sizes import next_power_of_2


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


def rotary_tables(positions: torch.Tensor, inv_freq: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Triton twin of `ops.rotary_tables`."""
    tokens, half = positions.shape[0], inv_freq.shape[0]
    cos = torch.empty(tokens, half, dtype=torch.float32, device=positions.device)
    sin = torch.empty_like(cos)
    rotary_tables_kernel[(tokens,)](
        positions, inv_freq, cos, sin, factor, HALF=half, HALF_PAD=next_power_of_2(half), num_warps=1
    )
    return cos, sin
