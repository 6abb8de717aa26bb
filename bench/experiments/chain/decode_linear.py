"""Chains of linear layers of decode steps, by a CUDA C++ kernel that never lets the reading of weights pause.

See `decode_linear.cu` for how. At most 32 tokens, bf16, compute capability 9.0.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple

import torch
from compiler import load_library

MAX_TOKENS = 32
MAX_PRODUCTS = 4
TILE_ROWS = 128
SLICE = 64

_SOURCE = Path(__file__).with_suffix(".cu")
_TARGET = "90a"
_SCALE, _RESIDUAL, _SILU = range(3)
_MAP_BYTES = 128
_ALIGNMENT = 128


class Scaled(NamedTuple):
    """A residual stream with the next norm half applied: its weight is in, the scale of each token is not yet.

    Attributes:
        residual: bf16 [T, H].
        values: bf16 [T, H], residual * norm weight.
        squares: float32 [parts, 32], sums of squares of parts of the residual; their sum over parts is that of a token.
    """

    residual: torch.Tensor
    values: torch.Tensor
    squares: torch.Tensor


class _Phase(ctypes.Structure):
    """`Phase` of the source."""

    _fields_ = [
        ("w", ctypes.c_char * _MAP_BYTES),
        ("x", ctypes.c_char * _MAP_BYTES),
        *((name, ctypes.c_int) for name in ("epilogue", "tiles", "slices", "out_stride", "second_half", "in_parts")),
        ("in_mean_factor", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("in_squares", "out", "residual", "norm", "scaled", "out_squares")),
        ("_padding", ctypes.c_char * 48),
    ]


class _Chain(ctypes.Structure):
    """`Chain` of the source."""

    _fields_ = [
        ("phases", _Phase * MAX_PRODUCTS),
        ("count", ctypes.c_int),
        ("tokens", ctypes.c_int),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("partials", "arrivals", "finished")),
        ("_padding", ctypes.c_char * 88),
    ]


class DecodeWeight:
    """A weight that decode steps multiply with.

    Args:
        weight: bf16 [N, K], contiguous; K a multiple of 64, N of 128. With `gated`, its first half are gate rows, its
            second half up rows.
    """

    def __init__(self, weight: torch.Tensor, *, gated: bool = False) -> None:
        self.weight = weight
        self.gated = gated
        self.map = _describe(weight, TILE_ROWS // 2)

    @property
    def tiles(self) -> int:
        return self.weight.shape[0] // TILE_ROWS

    @staticmethod
    def fits(weight: torch.Tensor) -> bool:
        """Whether the kernel can multiply with `weight`."""
        rows, columns = weight.shape
        return weight.dtype == torch.bfloat16 and rows % TILE_ROWS == 0 and columns % SLICE == 0


class DecodeChain:
    """Products that run one after the other in one launch, each on the output of the one before.

    Args:
        linears: launches it.
        tokens: of the step, at most 32.
        eps: of all norms.
    """

    def __init__(self, linears: DecodeLinears, tokens: int, eps: float) -> None:
        self._linears = linears
        self._chain = _aligned(_Chain)
        self._chain.tokens = tokens
        self._chain.eps = eps

    def scaled(self, x: Scaled, weight: DecodeWeight) -> torch.Tensor:
        """Add norm(x) @ weight.T; its bf16 [T, N] is there once the chain has run."""
        return self._normed(_SCALE, x, weight, weight.weight.shape[0])

    def gated(self, x: Scaled, weight: DecodeWeight) -> torch.Tensor:
        """Add silu(norm(x) @ gate.T) * (norm(x) @ up.T), bf16 [T, N / 2]."""
        return self._normed(_SILU, x, weight, weight.weight.shape[0] // 2)

    def residual(self, x: torch.Tensor, weight: DecodeWeight, residual: torch.Tensor, norm: torch.Tensor) -> Scaled:
        """Add residual + x @ weight.T, scaled by the weight of the next norm.

        Args:
            x: bf16 [T, K], contiguous.
            residual: bf16 [T, N].
            norm: bf16 [N].
        """
        rows = weight.weight.shape[0]
        squares = torch.empty(weight.tiles, MAX_TOKENS, dtype=torch.float32, device=x.device)
        made = Scaled(_output(x, rows), _output(x, rows), squares)
        phase = self._add(_RESIDUAL, x, weight, made.residual)
        phase.residual = residual.data_ptr()
        phase.norm = norm.data_ptr()
        phase.scaled = made.values.data_ptr()
        phase.out_squares = squares.data_ptr()
        return made

    def launch(self) -> None:
        """Queue the chain on the current stream."""
        self._linears.launch(self._chain)

    def _normed(self, epilogue: int, x: Scaled, weight: DecodeWeight, columns: int) -> torch.Tensor:
        out = _output(x.values, columns)
        phase = self._add(epilogue, x.values, weight, out)
        phase.in_squares = x.squares.data_ptr()
        phase.in_parts = x.squares.shape[0]
        phase.in_mean_factor = 1.0 / weight.weight.shape[1]
        return out

    def _add(self, epilogue: int, x: torch.Tensor, weight: DecodeWeight, out: torch.Tensor) -> _Phase:
        rows, columns = weight.weight.shape
        phase: _Phase = self._chain.phases[self._chain.count]
        self._chain.count += 1
        phase.epilogue = epilogue
        phase.tiles, phase.slices = weight.tiles, columns // SLICE
        phase.out_stride, phase.second_half = out.shape[1], rows // 2
        phase.out = out.data_ptr()
        ctypes.memmove(ctypes.addressof(phase), weight.map, _MAP_BYTES)
        ctypes.memmove(ctypes.addressof(phase) + _MAP_BYTES, _describe(x, MAX_TOKENS), _MAP_BYTES)
        return phase


class DecodeLinears:
    """Launches chains, and holds the workspace that they share, since they run one after the other.

    Args:
        device: a GPU of compute capability 9.0.
        max_tiles: most tiles of a product.

    Raises:
        CompilerMissing: the kernel cannot be compiled here.
    """

    def __init__(self, device: torch.device, max_tiles: int) -> None:
        self._library = load_library(_SOURCE, _TARGET)
        if self._library.chain_bytes() != ctypes.sizeof(_Chain):
            raise RuntimeError(f"a chain has {self._library.chain_bytes()} bytes, not {ctypes.sizeof(_Chain)}")
        self._blocks = torch.cuda.get_device_properties(device).multi_processor_count
        self._partials = torch.empty(2 * self._blocks, TILE_ROWS * MAX_TOKENS, dtype=torch.float32, device=device)
        self._arrivals = torch.zeros(max_tiles, dtype=torch.int32, device=device)
        self._finished = torch.zeros(MAX_PRODUCTS + 1, dtype=torch.int32, device=device)
        self._device = device

    def launch(self, chain: _Chain) -> None:
        """Queue `chain` on the current stream."""
        chain.partials = self._partials.data_ptr()
        chain.arrivals = self._arrivals.data_ptr()
        chain.finished = self._finished.data_ptr()
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        _check(self._library.launch_chain(ctypes.byref(chain), self._blocks, stream), "launch")


def _output(x: torch.Tensor, columns: int) -> torch.Tensor:
    return torch.empty(x.shape[0], columns, dtype=torch.bfloat16, device=x.device)


def _aligned(kind: type) -> _Chain:
    """Return a zeroed structure at an address that the tensor maps in it may have."""
    raw = ctypes.create_string_buffer(ctypes.sizeof(kind) + _ALIGNMENT)
    return kind.from_buffer(raw, -ctypes.addressof(raw) % _ALIGNMENT)  # type: ignore[attr-defined]


def _describe(matrix: torch.Tensor, box_rows: int) -> ctypes.Array[ctypes.c_char]:
    """Return the tensor memory accelerator's map of a bf16 matrix."""
    raw = ctypes.create_string_buffer(_MAP_BYTES + _ALIGNMENT)
    made = (ctypes.c_char * _MAP_BYTES).from_buffer(raw, -ctypes.addressof(raw) % _ALIGNMENT)
    rows, columns = matrix.shape
    library = load_library(_SOURCE, _TARGET)
    pointer = ctypes.c_void_p(matrix.data_ptr())
    sizes = (ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_uint32(box_rows))
    _check(library.describe_matrix(made, pointer, *sizes), "describe")
    return made


def _check(code: int, what: str) -> None:
    if code != 0:
        raise RuntimeError(f"decode_linear: {what} failed with CUDA error {code}")
