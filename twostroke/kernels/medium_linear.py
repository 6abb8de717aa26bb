"""Linear layers for decode steps of some dozens to hundreds of tokens of a small model, by Triton.

Their products are too small for a device: what they wait for is each other. So norms, residual and activation are parts
of them, and a product starts while the one before it ends (programmatic dependent launch): until its input is there, it
asks for its weights into the L2 cache. Before it waits it reads nothing else, and it lets the next one start only after
its wait, so that all kernels but the one right ahead are done.

A program has a tile of tokens and rows, and all of k: sums have one order, whatever the timing.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import functional
from triton.tools.tensor_descriptor import TensorDescriptor

from .announced import Written
from .early import early, wait_for_kernel_ahead
from .norm import finish_norm
from .sizes import cdiv, next_power_of_2
from .thin_linear import Epilogue, Scaled

LANES = range(33, 257)
"""Of a step. Fewer have thin products, more the library's; measured with the shapes of a model of 0.6 billion
parameters."""
MAX_BYTES = 16 << 20
"""Of a weight. Reading it takes 4 us then; of a larger one's time a launch and the small kernels are a lesser part."""

_RESIDUAL = tl.constexpr(int(Epilogue.RESIDUAL))
_SILU = tl.constexpr(int(Epilogue.SILU))


class MediumTiles(NamedTuple):
    """How a product is cut.

    Attributes:
        tokens, rows, inputs: of a tile, powers of two; a gated tile has as many rows of each half.
        warps: per program.
        stages: tiles in flight.
    """

    tokens: int
    rows: int
    inputs: int
    warps: int
    stages: int


@triton.jit
def _ask_ahead(weight_ptr, row, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, HALVES: tl.constexpr):
    """Ask for a tile's weights, into the L2 cache; the programs that have it share this out among them."""
    LINE: tl.constexpr = 64
    AT_ONCE: tl.constexpr = 1024
    lines = tl.cdiv(ROWS * INPUTS, LINE)
    begin = lines * tl.program_id(0) // tl.num_programs(0)
    end = lines * (tl.program_id(0) + 1) // tl.num_programs(0)
    for half in tl.static_range(HALVES):
        first = (half * OUTPUTS + row).to(tl.int64) * INPUTS
        for line in range(begin, end, AT_ONCE):
            place = tl.minimum(line + tl.arange(0, AT_ONCE), end - 1) * LINE
            place = tl.minimum(first + place, HALVES * OUTPUTS * INPUTS - 1)
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
                "=r,l",
                [(weight_ptr + place).to(tl.int64)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


@triton.jit(do_not_specialize=["num_tokens"])
def medium_linear_kernel(
    x,
    weight,
    weight_ptr,
    squares_ptr,
    bias_ptr,
    residual_ptr,
    norm_ptr,
    out_ptr,
    scaled_ptr,
    out_squares_ptr,
    num_tokens,
    eps,
    EPILOGUE: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PAD: tl.constexpr,
    BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    SLICE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per tile of tokens and outputs. Programs that share a tile of weights run next to each other.

    `x` and `weight` are descriptors of [T, INPUTS] and [halves, OUTPUTS, INPUTS]; PARTS 0: no scale.
    """
    HALVES: tl.constexpr = 2 if EPILOGUE == _SILU else 1
    # The last tile overlaps the one before rather than reach beyond the last token, which takes longer to read. Tokens
    # of both come out the same from either.
    first_token = tl.minimum(tl.program_id(0) * TOKENS, tl.maximum(num_tokens - TOKENS, 0))
    first_row = tl.program_id(1) * ROWS
    token = first_token + tl.arange(0, TOKENS)
    row = first_row + tl.arange(0, ROWS)
    if PDL:
        _ask_ahead(weight_ptr, first_row, ROWS, OUTPUTS, INPUTS, HALVES)
    wait_for_kernel_ahead(PDL)

    token_inside, row_inside = token < num_tokens, row < OUTPUTS
    out_places = token[:, None] * OUTPUTS + row[None, :]
    out_inside = token_inside[:, None] & row_inside[None, :]
    # What the epilogue needs is asked for ahead of the products.
    if PARTS > 0:
        part = tl.arange(0, PARTS_PAD)
        squares_inside = (part < PARTS)[:, None] & token_inside[None, :]
        squares = tl.load(squares_ptr + part[:, None] * num_tokens + token[None, :], squares_inside, 0.0)
    if EPILOGUE == _RESIDUAL:
        residual = tl.load(residual_ptr + out_places, out_inside, 0.0)
        norm = tl.load(norm_ptr + row, row_inside, 0.0)

    total = tl.zeros([TOKENS, HALVES * ROWS], tl.float32)
    for begin in range(0, INPUTS, SLICE):
        x_tile = x.load([first_token, begin])
        weight_tile = weight.load([0, first_row, begin]).reshape(HALVES * ROWS, SLICE)
        total = tl.dot(x_tile, weight_tile.T, total, input_precision="ieee")

    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if PARTS > 0:
        total *= tl.rsqrt(tl.sum(squares, 0) / INPUTS + eps)[:, None]
    if BIAS:
        total += tl.load(bias_ptr + row, row_inside, 0.0).to(tl.float32)[None, :]
    if EPILOGUE == _SILU:
        gate, up = tl.split(tl.permute(tl.reshape(total, [TOKENS, 2, ROWS]), [0, 2, 1]))
        total = gate * tl.sigmoid(gate) * up
    if EPILOGUE == _RESIDUAL:
        # The norm sees what the next product will read back: the sum rounded to its dtype.
        total = (total + residual.to(tl.float32)).to(dtype).to(tl.float32)
        tl.store(out_squares_ptr + tl.program_id(1) * num_tokens + token, tl.sum(total * total, 1), token_inside)
        tl.store(scaled_ptr + out_places, (total * norm.to(tl.float32)[None, :]).to(dtype), out_inside)
    tl.store(out_ptr + out_places, total.to(dtype), out_inside)


class MediumWeight(NamedTuple):
    """A weight that medium products multiply with, made by `MediumLinears`.

    Attributes:
        weight: [N, K], contiguous. With the epilogue SILU, its first half are gate rows, its second half up rows.
        bias: [N], or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    epilogue: Epilogue

    @property
    def halves(self) -> int:
        return 2 if self.epilogue == Epilogue.SILU else 1

    @property
    def outputs(self) -> int:
        return self.weight.shape[0] // self.halves

    @staticmethod
    def fits(weight: torch.Tensor) -> bool:
        """Whether there is a medium product with `weight`."""
        return weight.dtype == torch.bfloat16 and weight.shape[1] % 8 == 0

    @staticmethod
    def pays(weight: torch.Tensor) -> bool:
        """Whether it is faster than its parts one by one, in the middle of a layer."""
        return weight.nbytes <= MAX_BYTES


def medium_tiles(weight: MediumWeight, tokens: int) -> MediumTiles:
    """Return the tiles of a product with so many tokens, measured with the shapes of a model of 0.6 billion parameters:
    see bench/medium_linear.py.
    """
    many = tokens > 128
    if weight.epilogue == Epilogue.SILU:
        if tokens < 128:
            return MediumTiles(64, 32, 128, warps=4, stages=3)
        return MediumTiles(128, 32, 64, warps=4, stages=4) if many else MediumTiles(128, 32, 128, warps=8, stages=4)
    if weight.outputs < 2048:
        return MediumTiles(64, 32, 256, warps=4, stages=4)
    return MediumTiles(64, 128, 64, warps=4, stages=4) if many else MediumTiles(64, 64, 128, warps=4, stages=6)


class MediumLinears:
    """Launches medium products. On a GPU each is free to start before the kernel ahead has ended.

    Args:
        device: a GPU of compute capability 9.0 or later, or the CPU for Triton's interpreter.
        eps: of all norms.
        tiles: chooses those of a weight and a number of tokens.
    """

    def __init__(
        self, device: torch.device, eps: float, tiles: Callable[[MediumWeight, int], MediumTiles] = medium_tiles
    ) -> None:
        self._early = early(device)
        self._eps = eps
        self._tiles = tiles

    def begin(self) -> None:
        """Start a step: nothing, since each product waits for the whole one ahead."""

    def scaling(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> MediumWeight:
        """A weight for `scaled`."""
        return MediumWeight(weight, bias, Epilogue.SCALE)

    def gating(self, weight: torch.Tensor) -> MediumWeight:
        """A weight for `gated`."""
        return MediumWeight(weight, None, Epilogue.SILU)

    def adding(self, weight: torch.Tensor) -> MediumWeight:
        """A weight for `residual`."""
        return MediumWeight(weight, None, Epilogue.RESIDUAL)

    def scaled(self, x: Scaled, weight: MediumWeight) -> torch.Tensor:
        """Return norm(x) @ weight.T + bias, [T, N]; by the library where the weight is too large to pay."""
        if not MediumWeight.pays(weight.weight):
            normed = x.values if x.squares is None else finish_norm(x.values, x.squares, self._eps)
            return functional.linear(normed, weight.weight, weight.bias)
        return self._normed(x, weight)

    def gated(self, x: Scaled, weight: MediumWeight) -> Written:
        """Return silu(norm(x) @ gate.T) * (norm(x) @ up.T), [T, N / 2]."""
        return Written(self._normed(x, weight))

    def residual(self, x: Written, weight: MediumWeight, residual: torch.Tensor, norm: torch.Tensor) -> Scaled:
        """Return residual + x @ weight.T, scaled by the weight of the next norm.

        Args:
            x: [T, K], contiguous.
            residual: [T, N], contiguous.
            norm: [N].
        """
        values, tokens = x.values, len(x.values)
        tiles = self._tiles(weight, tokens)
        squares = torch.empty(cdiv(weight.outputs, tiles.rows), tokens, dtype=torch.float32, device=values.device)
        made = Scaled(_output(values, weight), _output(values, weight), squares)
        self._launch(values, weight, tiles, None, made.residual, (residual, norm), (made.values, squares))
        return made

    def _normed(self, x: Scaled, weight: MediumWeight) -> torch.Tensor:
        out = _output(x.values, weight)
        self._launch(x.values, weight, self._tiles(weight, len(out)), x.squares, out, (out, out), (out, out))
        return out

    def _launch(
        self,
        x: torch.Tensor,
        weight: MediumWeight,
        tiles: MediumTiles,
        squares: torch.Tensor | None,
        out: torch.Tensor,
        added: tuple[torch.Tensor, torch.Tensor],
        left: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Queue a product; `added` are residual and norm, `left` what the next norm needs, if the epilogue has them."""
        tokens, inputs, outputs, parts = *x.shape, weight.outputs, 0 if squares is None else len(squares)
        halves = weight.weight.view(weight.halves, outputs, inputs)
        x_tiles = TensorDescriptor.from_tensor(x, [tiles.tokens, tiles.inputs])
        weight_tiles = TensorDescriptor.from_tensor(halves, [weight.halves, tiles.rows, tiles.inputs])
        medium_linear_kernel[(cdiv(tokens, tiles.tokens), cdiv(outputs, tiles.rows))](
            x_tiles, weight_tiles, weight.weight, out if squares is None else squares,
            out if weight.bias is None else weight.bias, added[0], added[1], out, left[0], left[1], tokens, self._eps,
            EPILOGUE=int(weight.epilogue), INPUTS=inputs, OUTPUTS=outputs, PARTS=parts,
            PARTS_PAD=next_power_of_2(max(1, parts)), BIAS=weight.bias is not None,
            TOKENS=tiles.tokens, ROWS=tiles.rows, SLICE=tiles.inputs,
            num_warps=tiles.warps, num_stages=tiles.stages, **self._early,
        )  # fmt: skip


def _output(x: torch.Tensor, weight: MediumWeight) -> torch.Tensor:
    return torch.empty(x.shape[0], weight.outputs, dtype=x.dtype, device=x.device)
