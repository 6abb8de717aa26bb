"""RMS norm, and the rest of one that a product began."""

# Kernel parameters are pointers and scalars of Triton's own types, which mypy does not know.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .early import early, wait_for_kernel_ahead
from .sizes import next_power_of_2


@triton.jit
def normed_row(x, weight, eps, WIDTH: tl.constexpr):
    """The norm of a token's numbers `x` in their dtype, with zeros behind `WIDTH`."""
    x32 = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x32 * x32, 0) / WIDTH + eps)
    return ((x32 * inverse).to(x.dtype).to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def rms_norm_kernel(x_ptr, weight_ptr, normed_ptr, eps, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    # Asked for with the token's numbers: behind the sum's barrier its latency would come on top.
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    x = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0)
    tl.store(normed_ptr + token * WIDTH + column, normed_row(x, weight, eps, WIDTH), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def finish_norm_kernel(
    values_ptr,
    squares_ptr,
    normed_ptr,
    num_tokens,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per token."""
    wait_for_kernel_ahead(PDL)
    token = tl.program_id(0).to(tl.int64)
    column, part = tl.arange(0, BLOCK), tl.arange(0, PARTS_PAD)
    inside = column < WIDTH
    values = tl.load(values_ptr + token * WIDTH + column, mask=inside, other=0.0)
    squares = tl.load(squares_ptr + part * num_tokens + token, mask=part < PARTS, other=0.0)
    inverse = tl.rsqrt(tl.sum(squares, 0) / WIDTH + eps)
    normed = values.to(tl.float32) * inverse
    tl.store(normed_ptr + token * WIDTH + column, normed.to(values.dtype), mask=inside)


def norm_warps(width: int) -> int:
    """With few tokens a program's own latency counts: a thread has one load of 16 bytes per bf16 tensor."""
    return max(1, min(16, next_power_of_2(width) // 256))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Triton twin of `ops.rms_norm`."""
    tokens, width = x.shape
    normed = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    rms_norm_kernel[(tokens,)](
        x, weight, normed, eps, x.stride(0),
        WIDTH=width, BLOCK=next_power_of_2(width), num_warps=norm_warps(width),
    )  # fmt: skip
    return normed


def finish_norm(values: torch.Tensor, squares: torch.Tensor, eps: float) -> torch.Tensor:
    """Return values / sqrt(sum of squares / N + eps), dtype of values.

    Args:
        values: [T, N], contiguous, x times the weight of its norm.
        squares: float32 [parts, T], contiguous, sums of squares of the parts of x.
    """
    tokens, width = values.shape
    normed = torch.empty_like(values)
    finish_norm_kernel[(tokens,)](
        values, squares, normed, tokens, eps, WIDTH=width, BLOCK=next_power_of_2(width),
        PARTS=len(squares), PARTS_PAD=next_power_of_2(len(squares)), num_warps=norm_warps(width),
        **early(values.device),
    )  # fmt: skip
    return normed
