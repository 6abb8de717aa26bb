"""The operations of `ops`, with results for a token that do not depend on the tokens beside it, to the bit.

The Triton kernels work token by token anyway. On the CPU each token is computed on its own, since PyTorch computes the
end of a vector otherwise than its middle, and where the end lies depends on the shape.
"""

from __future__ import annotations

import torch

from . import ops


def embed(
    ids: torch.Tensor,
    positions: torch.Tensor,
    embedding: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    inv_freq: torch.Tensor,
    factor: float,
) -> ops.Embedded:
    """See `ops.embed`."""
    rest = (embedding, weight, eps, inv_freq, factor)
    if ids.is_cuda:
        return ops.embed(ids, positions, *rest)
    tokens = (ops.embed(id_, at, *rest) for id_, at in zip(ids.split(1), positions.split(1), strict=True))
    return ops.Embedded(*map(torch.cat, zip(*tokens, strict=True)))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `ops.rms_norm`."""
    if x.is_cuda:
        return ops.rms_norm(x, weight, eps)
    return torch.cat([ops.rms_norm(token, weight, eps) for token in x.split(1)])


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `ops.silu_mul`."""
    if gate_up.is_cuda:
        return ops.silu_mul(gate_up)
    return torch.cat([ops.silu_mul(token) for token in gate_up.split(1)])
