"""Linear layers for the few tokens of a decode step: CUDA C++ for compute capability 9.0, see `thin_linear.cuh`."""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch

from .announced import Announced, Announcements, Written
from .compiler import load_library
from .tensor_map import MAP_BYTES, check, check_size, place_in, zeroed

MAX_TOKENS = 64
SLICE = 128
CLUSTER = 2
MIN_COLUMNS = SLICE * CLUSTER
TILES = (64, 56, 48, 40, 32)
"""Rows that a tile may have, most first: each tile reads all of the input, so large ones read less."""
MOST_PRODUCTS = 4
"""In a chain."""

_SOURCE = Path(__file__).with_suffix(".cu")


class Epilogue(IntEnum):
    """What is done to a product's sums: scaled by the norm of its input, added to the residual, or gated."""

    SCALE = 0
    RESIDUAL = 1
    SILU = 2


class Scaled(NamedTuple):
    """A residual on its way through a norm: norm(residual)[t] = values[t] / sqrt(sum(squares[:, t]) / N + eps).

    Attributes:
        residual: bf16 [T, N].
        values: bf16 [T, N], residual x weight of the norm.
        squares: float32 [parts, T], sums of squares of the residual's parts; None: values are the norm's result.
        announced: tells of the values.
    """

    residual: torch.Tensor
    values: torch.Tensor
    squares: torch.Tensor | None
    announced: Announced | None = None


class _Product(ctypes.Structure):
    """`Product` of the source, its terms included."""

    _fields_ = [
        ("w", ctypes.c_char * MAP_BYTES),
        ("x", ctypes.c_char * MAP_BYTES),
        *((name, ctypes.c_int) for name in ("epilogue", "tile", "tiles", "slices", "tokens", "rows", "out_stride")),
        *((name, ctypes.c_int) for name in ("second_half", "in_parts")),
        ("in_mean_factor", ctypes.c_float),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("in_columns", "in_count")),
        *((name, ctypes.c_void_p) for name in ("in_ready", "out_ready")),
        *(
            (name, ctypes.c_void_p)
            for name in ("in_squares", "bias", "out", "residual", "norm", "scaled", "out_squares")
        ),
    ]


class _Chain(ctypes.Structure):
    """`Chain` of the source."""

    _fields_ = [
        ("products", _Product * MOST_PRODUCTS),
        ("count", ctypes.c_int),
        ("_padding", ctypes.c_char * 124),
    ]


@dataclass(frozen=True)
class ThinWeight:
    """A weight that thin products multiply with, made by `ThinLinears`.

    Attributes:
        weight: bf16 [N, K], contiguous. With the epilogue SILU, its first half are gate rows, its second half up rows.
        bias: bf16 [N], or None.
        tile: rows of a tile. tiles: their number.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    epilogue: Epilogue
    tile: int
    tiles: int

    @property
    def out_columns(self) -> int:
        """Columns of the output that a tile gives."""
        return self.tile // 2 if self.epilogue is Epilogue.SILU else self.tile

    @staticmethod
    def fits(weight: torch.Tensor, *, gated: bool = False) -> bool:
        """Whether there is a thin product with `weight`."""
        rows, columns = weight.shape
        whole = rows % (16 if gated else 8) == 0
        return weight.dtype == torch.bfloat16 and whole and columns % 8 == 0 and columns >= MIN_COLUMNS


class _Queued(NamedTuple):
    """A product that waits for its launch, and what holds the memory that it uses: nobody else may get it till then."""

    product: _Product
    weight: ThinWeight
    tensors: list[torch.Tensor | None]


class ThinLinears:
    """Launches thin products, of at most `MAX_TOKENS` tokens in bf16, in chains:

        scaled | residual  gated  residual  scaled | residual  gated  residual  scaled |
        launch |                            launch |                            launch |

    A product is queued until `scaled` ends its chain, or the chain has `MOST_PRODUCTS`. A chain is one kernel, free to
    start before the kernel ahead has ended.

    The products of a chain wait for each other while they run, so all blocks of its kernel must run at once, and two
    such kernels of one device could keep each other from that for ever. So of those of one device that live at a time,
    in this process, the first alone makes chains, and when it is gone the next that begins a step or is made. Others
    launch product by product, each of which waits for kernels ahead of it alone. Who lets go of one sees to it that
    nothing it launched still runs, nor any graph of it.

    Args:
        device: a GPU of compute capability 9.0.
        eps: of all norms.

    Attributes:
        chains: whether this one makes chains; found again at the beginning of each step.

    Raises:
        CompilerMissing: the kernel cannot be compiled here.
        RuntimeError: no two blocks of it run at once here, or CUDA cannot say.
    """

    _chaining: ClassVar[weakref.WeakValueDictionary[int, ThinLinears]] = weakref.WeakValueDictionary()
    """By the index of their device."""
    _claim: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, device: torch.device, eps: float) -> None:
        self._library = load_library(_SOURCE)
        check_size(_Chain, self._library.chain_bytes())
        self._device = device
        self._eps = eps
        self._clusters = self._clusters_at_once()
        self._parts = 0
        self._told: Announcements | None = None
        self._queue: list[_Queued] = []
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self.chains = self._may_chain()

    def begin(self) -> None:
        """Start a step on the current stream, of at most one product with each weight, which tell each other how far
        they are. Until the first step there are no chains, and each product waits for the kernel ahead to be done.
        """
        self.chains = self._may_chain()  # the one that did may be gone
        self._queue.clear()  # a step that failed may have left some
        if self._told is None:
            self._told = Announcements(self._parts, self._device)
        self._told.begin()

    def scaling(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> ThinWeight:
        """A weight for `scaled`."""
        return self._weight(weight, bias, Epilogue.SCALE)

    def gating(self, weight: torch.Tensor) -> ThinWeight:
        """A weight for `gated`."""
        return self._weight(weight, None, Epilogue.SILU)

    def adding(self, weight: torch.Tensor) -> ThinWeight:
        """A weight for `residual`."""
        return self._weight(weight, None, Epilogue.RESIDUAL)

    def scaled(self, x: Scaled, weight: ThinWeight) -> torch.Tensor:
        """Return norm(x) @ weight.T + bias, bf16 [T, N]. It ends a chain: see `launch`."""
        out = Written(_output(x.values, weight.weight.shape[0]))
        self._normed(x, weight, out)
        self.launch()
        return out.values

    def gated(self, x: Scaled, weight: ThinWeight) -> Written:
        """Return silu(norm(x) @ gate.T) * (norm(x) @ up.T), bf16 [T, N / 2], for a product that follows."""
        out = Written(_output(x.values, weight.weight.shape[0] // 2), self._announced(weight))
        self._normed(x, weight, out)
        return out

    def residual(self, x: Written, weight: ThinWeight, residual: torch.Tensor, norm: torch.Tensor) -> Scaled:
        """Return residual + x @ weight.T, scaled by the weight of the next norm, for a product that follows.

        Args:
            x: bf16 [T, K], contiguous.
            residual: bf16 [T, N].
            norm: bf16 [N].
        """
        rows, tokens = weight.weight.shape[0], len(x.values)
        squares = torch.empty(weight.tiles, tokens, dtype=torch.float32, device=x.values.device)
        made = Scaled(_output(x.values, rows), _output(x.values, rows), squares, self._announced(weight))
        product = self._product(x, weight, Written(made.residual, made.announced))
        product.residual = residual.data_ptr()
        product.norm = norm.data_ptr()
        product.scaled = made.values.data_ptr()
        product.out_squares = squares.data_ptr()
        self._take(product, weight, [x.values, residual, norm, *made[:3]])
        return made

    def launch(self) -> None:
        """Launch all products so far on the current stream.

        Raises:
            RuntimeError: CUDA refused a launch. The products behind it are dropped.
        """
        waiting, self._queue = self._queue, []
        most = MOST_PRODUCTS if self.chains and self._told is not None else 1
        for first in range(0, len(waiting), most):
            self._launch([queued.product for queued in waiting[first : first + most]])

    def _launch(self, products: list[_Product]) -> None:
        chain = zeroed(_Chain)
        for place, product in enumerate(products):
            # NOTE: bytes are copied, which leaves the maps as they are: they hold no address of their own.
            chain.products[place] = product
        chain.count = len(products)
        clusters = min(self._clusters, max(product.tiles for product in products))
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        check(self._library.launch_chain(ctypes.byref(chain), clusters, stream), "thin_linear: launch")

    def _may_chain(self) -> bool:
        with self._claim:
            return self._chaining.setdefault(self._index, self) is self

    def _take(self, product: _Product, weight: ThinWeight, tensors: list[torch.Tensor | None]) -> None:
        self._queue.append(_Queued(product, weight, tensors))
        if len(self._queue) == MOST_PRODUCTS:
            self.launch()

    def _weight(self, weight: torch.Tensor, bias: torch.Tensor | None, epilogue: Epilogue) -> ThinWeight:
        tile = self._tile(weight.shape[0], 16 if epilogue is Epilogue.SILU else 8)
        tiles = math.ceil(weight.shape[0] / tile)
        self._parts += tiles
        return ThinWeight(weight, bias, epilogue, tile, tiles)

    def _tile(self, rows: int, multiple: int) -> int:
        """Return the rows of the largest tile with which no cluster has 5% more rows than with the best one."""
        tiles = [tile for tile in TILES if tile % multiple == 0]
        most_rows = [math.ceil(math.ceil(rows / tile) / self._clusters) * tile for tile in tiles]
        return next(tile for tile, most in zip(tiles, most_rows, strict=True) if most <= 1.05 * min(most_rows))

    def _clusters_at_once(self) -> int:
        """Return how many pairs of blocks run at once."""
        with torch.cuda.device(self._device):
            clusters: int = self._library.clusters_at_once()
        if clusters <= 0:
            raise RuntimeError(f"thin_linear: occupancy failed with CUDA error {-clusters}")
        return clusters

    def _announced(self, weight: ThinWeight) -> Announced | None:
        return None if self._told is None else self._told.take(weight.tiles, weight.out_columns)

    def _normed(self, x: Scaled, weight: ThinWeight, out: Written) -> None:
        product = self._product(Written(x.values, x.announced), weight, out)
        if x.squares is not None:
            product.in_squares = x.squares.data_ptr()
            product.in_parts = x.squares.shape[0]
        product.in_mean_factor = 1.0 / weight.weight.shape[1]
        if weight.bias is not None:
            product.bias = weight.bias.data_ptr()
        self._take(product, weight, [x.values, x.squares, out.values])

    def _product(self, x: Written, weight: ThinWeight, out: Written) -> _Product:
        rows, columns = weight.weight.shape
        product = zeroed(_Product)
        product.epilogue = weight.epilogue
        product.tile, product.tiles, product.slices = weight.tile, weight.tiles, math.ceil(columns / SLICE)
        (product.tokens, product.rows), product.out_stride = out.values.shape, out.values.shape[1]
        product.second_half = rows // 2
        product.eps = self._eps
        product.out = out.values.data_ptr()
        if x.announced is not None:
            counts, product.in_columns = x.announced
            product.in_ready, product.in_count = counts.data_ptr(), len(counts)
        if out.announced is not None:
            product.out_ready = out.announced.counts.data_ptr()
        # NOTE: the weight too at each launch: an engine that slept has its weights at other addresses.
        few = product.tokens <= 32
        gated = weight.epilogue is Epilogue.SILU
        box_rows = weight.tile // 2 if gated else weight.tile
        self._describe(product, _Product.w.offset, weight.weight, box_rows, promoted=not few)
        self._describe(product, _Product.x.offset, x.values, 32 if few else 64, promoted=True)
        return product

    def _describe(self, product: _Product, offset: int, matrix: torch.Tensor, box_rows: int, *, promoted: bool) -> None:
        """Write the map by which the tensor memory accelerator reads a bf16 matrix into a product.

        Args:
            promoted: reads of 128 bytes bring 256 into the L2 cache. It costs products of few tokens 2%, and saves
                those of more tokens as much; measured, see bench/NOTES.md.
        """
        rows, columns = matrix.shape
        places = (place_in(product, offset), ctypes.c_void_p(matrix.data_ptr()))
        sizes = (ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_uint32(box_rows), int(promoted))
        check(self._library.describe_matrix(*places, *sizes), "thin_linear: describe")


def _output(x: torch.Tensor, columns: int) -> torch.Tensor:
    return torch.empty(x.shape[0], columns, dtype=torch.bfloat16, device=x.device)
