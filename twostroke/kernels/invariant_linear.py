"""A linear layer whose result for a token does not depend on the tokens beside it, to the bit."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .sizes import cdiv


class LinearTiles(NamedTuple):
    """How a product is cut. It may depend on the weight's shape and dtype, never on the number of tokens.

    Attributes:
        tokens, outputs, inputs: sizes of a tile, powers of two >= 16; `inputs` are summed in this order.
        warps: per program.
        stages: tiles in flight while one is worked on.
    """

    tokens: int
    outputs: int
    inputs: int
    warps: int
    stages: int


def linear_tiles(capability: tuple[int, int], outputs: int, dtype: torch.dtype) -> LinearTiles:
    """Return the tiles for a compute capability; those of other than 9.0 fit into 99 KiB of shared memory.

    A decode step reads weights, so there are to be programs enough to keep all multiprocessors reading.
    """
    if dtype.itemsize == 4:
        return LinearTiles(32, 32, 32, warps=4, stages=2)
    stages = 4 if capability == (9, 0) else 3
    if outputs < 8192:
        return LinearTiles(64, 32, 128, warps=4, stages=stages)
    return LinearTiles(64, 128, 64, warps=4, stages=stages)


@triton.jit(do_not_specialize=["num_tokens"])
def invariant_linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    TOKENS: tl.constexpr,
    OUT_TILE: tl.constexpr,
    IN_TILE: tl.constexpr,
):
    """One program per tile of tokens and outputs. Programs that share a weight tile run next to each other."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    output = tl.program_id(1).to(tl.int64) * OUT_TILE + tl.arange(0, OUT_TILE)
    total = tl.zeros([TOKENS, OUT_TILE], tl.float32)
    for begin in range(0, INPUTS, IN_TILE):
        column = begin + tl.arange(0, IN_TILE)
        inside = (column < INPUTS)[None, :]
        x = tl.load(x_ptr + token[:, None] * INPUTS + column[None, :], (token < num_tokens)[:, None] & inside, 0.0)
        weight = tl.load(
            weight_ptr + output[:, None] * INPUTS + column[None, :], (output < OUTPUTS)[:, None] & inside, 0.0
        )
        total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias_ptr + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + token[:, None] * OUTPUTS + output[None, :]
    inside = (token < num_tokens)[:, None] & (output < OUTPUTS)[None, :]
    if ADD:
        total += tl.load(out_ptrs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=inside)


def invariant_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tiles: LinearTiles,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x @ weight.T + bias, summed in float32 and rounded once: [T, outputs], contiguous.

    Args:
        x: [T, inputs], contiguous.
        weight: [outputs, inputs], contiguous.
        bias: [outputs] or None.
        tiles: see `LinearTiles`.
        residual: [T, outputs], contiguous; the result is added to it, in place.
    """
    tokens, (outputs, inputs) = x.shape[0], weight.shape
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device) if residual is None else residual
    if tokens:
        invariant_linear_kernel[(cdiv(tokens, tiles.tokens), cdiv(outputs, tiles.outputs))](
            x, weight, weight if bias is None else bias, out, tokens,
            INPUTS=inputs, OUTPUTS=outputs, BIAS=bias is not None, ADD=residual is not None,
            TOKENS=tiles.tokens, OUT_TILE=tiles.outputs, IN_TILE=tiles.inputs,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    return out
