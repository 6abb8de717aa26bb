"""The operations of `ops`, with results for a token that do not depend on the tokens beside it, to the bit.

The Triton kernels work token by token anyway. On the CPU each token is computed on its own, since PyTorch computes the
end of a vector otherwise than its middle, and where the end lies depends on the shape.
"""

from __future__ import annotations

import torch

from . import ops


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `ops.rms_norm`."""
    if x.is_cuda:
        return ops.rms_norm(x, weight, eps)
    return torch.cat([ops.rms_norm(token, weight, eps) for token in x.split(1)])


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.add_rms_norm`."""
    if x.is_cuda:
        return ops.add_rms_norm(x, residual, weight, eps)
    total = x + residual
    return rms_norm(total, weight, eps), total


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `ops.silu_mul`."""
    if gate_up.is_cuda:
        return ops.silu_mul(gate_up)
    return torch.cat([ops.silu_mul(token) for token in gate_up.split(1)])


def rotary_tables(positions: torch.Tensor, inv_freq: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.rotary_tables`."""
    if positions.is_cuda:
        return ops.rotary_tables(positions, inv_freq, factor)
    cos, sin = zip(*(ops.rotary_tables(position, inv_freq, factor) for position in positions.split(1)), strict=True)
    return torch.cat(cos), torch.cat(sin)
