"""The small operations of a decoder layer: Triton kernels for CUDA tensors, plain PyTorch for all others.

Results are rounded where transformers' modules round them: a norm multiplies the value already rounded to the dtype by
the weight, and the gate is rounded before it multiplies. The rotation alone stays in float32 to its end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812


class Rotary(NamedTuple):
    """How queries and keys are changed before attention.

    Attributes:
        cos, sin: float32 [T, head_dim / 2], of the step's positions.
        q_norm, k_norm: [head_dim] weights of a norm of each head, before the rotation; None for no norm.
        eps: of these norms.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float


class Embedded(NamedTuple):
    """What the first layer starts from.

    Attributes:
        normed: [T, H], the residual behind the layer's norm.
        residual: [T, H], the embeddings of the tokens.
        cos, sin: float32 [T, head_dim / 2], of the positions.
    """

    normed: torch.Tensor
    residual: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


def embed(
    ids: torch.Tensor,
    positions: torch.Tensor,
    embedding: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    inv_freq: torch.Tensor,
    factor: float,
) -> Embedded:
    """Return what the first layer starts from, contiguous.

    Args:
        ids, positions: int64 [T].
        embedding: [V, H], contiguous.
        weight: [H], of the first layer's norm. eps: its own.
        inv_freq, factor: as at `rotary_tables`.
    """
    if ids.is_cuda:
        from . import embed as kernels

        return kernels.embed(ids, positions, embedding, weight, eps, inv_freq, factor)
    residual = F.embedding(ids, embedding)
    return Embedded(_rms_norm(residual, weight, eps), residual, *rotary_tables(positions, inv_freq, factor))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) times weight: [T, H], contiguous, dtype of x.

    Args:
        x: [T, H], last dimension contiguous.
        weight: [H], dtype of x.
        eps: added to the mean square.
    """
    if x.is_cuda:
        from . import norm

        return norm.rms_norm(x, weight, eps)
    return _rms_norm(x, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, [T, I], of gate_up [T, 2 I] (gate first), last dimension contiguous."""
    if gate_up.is_cuda:
        from . import activation

        return activation.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def rotary_tables(positions: torch.Tensor, inv_freq: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cos, sin) of positions x inv_freq, times factor.

    Args:
        positions: int64 [T].
        inv_freq: float32 [D / 2], radians per position.
        factor: scale of both tables (YaRN's attention factor; 1 otherwise).

    Returns:
        Two float32 [T, D / 2].
    """
    # NOTE: plain PyTorch on CUDA too; a step's are made by `embed`.
    angles = torch.outer(positions.float(), inv_freq)
    return angles.cos().mul_(factor), angles.sin().mul_(factor)


def rotate_(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Apply each head's RMS norm where a weight is given, then the half-split rotary embedding, in place.

    Args:
        q: [T, query heads, D], may be a strided view; last dimension contiguous.
        k: [T, key heads, D], likewise.
        cos, sin: float32 [T, D / 2], from `rotary_tables`.
        q_weight, k_weight: [D] each, dtype of q, or None for no norm.
        eps: of the norms.
    """
    # NOTE: plain PyTorch on CUDA too; the fast path there is `rotary_write`, which needs no pass of its own.
    cos, sin = cos[:, None], sin[:, None]
    _rotate_heads_(q, cos, sin, q_weight, eps)
    _rotate_heads_(k, cos, sin, k_weight, eps)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x32 = x.float()
    inverse = x32.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (x32 * inverse).to(x.dtype) * weight


def _rotate_heads_(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> None:
    normed = (x if weight is None else _rms_norm(x, weight, eps)).float()
    a, b = normed.chunk(2, -1)
    a_sin = a * sin
    a.mul_(cos).addcmul_(b, sin, value=-1)
    b.mul_(cos).add_(a_sin)
    if normed is not x:
        x.copy_(normed)
