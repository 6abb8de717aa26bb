"""A linear layer behind which the fastest product for the device runs."""

from __future__ import annotations

import torch
from torch.nn import functional

_BLOCK_ROWS = 16

_PACKED_FOR_ROWS = 8
"""The row count that oneDNN chooses a packed layout for; decode batches on a CPU are about this size."""


class Linear:
    """y = x @ weight.T + bias, for x [T, inputs] and weight [outputs, inputs].

    On the CPU in float32, `pack` puts the weight into oneDNN's own layout: thin products then run about twice as fast
    as in the plain one. Everywhere else, and where this torch lacks the operators, it is `functional.linear`.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        self.weight: torch.Tensor | None = torch.empty(outputs, inputs, dtype=dtype, device=device)
        self.bias = torch.empty(outputs, dtype=dtype, device=device) if bias else None
        self._packed: torch.Tensor | None = None

    @classmethod
    def tied(cls, weight: torch.Tensor) -> Linear:
        """A layer without bias on a weight that somebody else owns too."""
        layer = cls.__new__(cls)
        layer.weight, layer.bias, layer._packed = weight, None, None
        return layer

    def tensors(self) -> list[torch.Tensor]:
        """Weight and bias, before packing."""
        return [tensor for tensor in (self.weight, self.bias) if tensor is not None]

    def pack(self) -> None:
        """Let go of the plain weight where a packed one can take its place. Call it once the weight has its values."""
        if self.weight is None or self.weight.device.type != "cpu" or self.weight.dtype != torch.float32:
            return
        self._packed = pack_weight(self.weight)
        if self._packed is not None:
            self.weight = None

    def unpack(self) -> None:
        """Undo `pack`: the weight lies in the plain layout again."""
        if self._packed is not None:
            self.weight, self._packed = self._packed.to_dense(), None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, inputs] -> [T, outputs], dtype of x."""
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        assert self.weight is not None
        return functional.linear(x, self.weight, self.bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add what the layer makes of x [T, inputs] to `residual` [T, outputs], contiguous, in place; return that."""
        if self.bias is not None or self._packed is not None:
            return residual.add_(self(x))
        assert self.weight is not None
        return residual.addmm_(x, self.weight.t())  # no pass of its own, and rounded once


class InvariantLinear(Linear):
    """A `Linear` whose result for a token does not depend on the tokens beside it, to the bit.

    On the CPU, products always have the same shape, since libraries choose the order of their sums by it: tokens are
    taken in blocks of 16, the last one filled up with zeros.
    """

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, inputs] -> [T, outputs], dtype of x."""
        if x.is_cuda:
            return self._on_cuda(x, None)
        filled = functional.pad(x, (0, 0, 0, -len(x) % _BLOCK_ROWS))
        product = super().__call__
        return torch.cat([product(block) for block in filled.split(_BLOCK_ROWS)])[: len(x)]

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See `Linear.add_to`."""
        return self._on_cuda(x, residual) if x.is_cuda else residual.add_(self(x))

    def _on_cuda(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        from ..kernels.invariant_linear import invariant_linear, linear_tiles

        assert self.weight is not None
        tiles = linear_tiles(torch.cuda.get_device_capability(x.device), len(self.weight), x.dtype)
        return invariant_linear(x, self.weight, self.bias, tiles, residual)


def pack_weight(weight: torch.Tensor) -> torch.Tensor | None:
    """The float32 CPU weight [outputs, inputs] in oneDNN's layout, or None if the operators are missing or fail.

    The operators are private to torch, so a small product is tried with the result before it is relied on.
    """
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        probe = torch.ops.mkldnn._linear_pointwise(weight.new_ones(1, weight.shape[1]), packed, None, "none", [], "")
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return None
    return packed if torch.allclose(probe[0], weight.sum(dim=1), rtol=1e-3, atol=1e-3) else None
