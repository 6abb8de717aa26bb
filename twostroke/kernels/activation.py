"""The gated activation of the feed-forward layer."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .sizes import cdiv

BLOCK = 1024


@triton.jit
def silu_mul_kernel(gate_up_ptr, out_ptr, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """silu(first half) * second half of a row; one program per token and `BLOCK` columns."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up_ptr + token * stride + column, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + token * stride + WIDTH + column, mask=inside, other=0.0)
    dtype = gate.dtype
    gate = gate.to(tl.float32)
    silu = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    tl.store(out_ptr + token * WIDTH + column, (silu * up.to(tl.float32)).to(dtype), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Triton twin of `ops.silu_mul`."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    grid = (tokens, cdiv(width, BLOCK))
    silu_mul_kernel[grid](gate_up, out, gate_up.stride(0), WIDTH=width, BLOCK=BLOCK)
    return out
