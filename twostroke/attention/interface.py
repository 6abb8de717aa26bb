"""The interface between a model and paged attention."""

from __future__ import annotations

import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..kernels import ops
from ..kernels.ops import Rotary
from ..kernels.step import StepInputs
from .groups import Room, block_bytes, rooms_of


class LayerSpec(NamedTuple):
    """The attention of one layer.

    Attributes:
        heads: query heads.
        kv_heads: key and value heads; divides `heads`.
        head_dim: size of a head.
        scale: factor on the scores before the softmax.
        window: a query sees its own position and the window - 1 before it; 0 sees all before it.
        group: the cache group whose block tables the layer uses.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    group: int = 0

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block's K and V in this layer."""
        return 2 * self.kv_heads * block_size * self.head_dim * dtype.itemsize


class Attention(ABC):
    """Writes a step's K and V into the paged cache and attends to it.

    The cache of a layer is two tensors [num_blocks, kv_heads, block_size, head_dim], which it shares with layers of
    other groups (`groups.Room`). They are allocated once, outside any graph pool, and zero at first, so that what
    padding reads is finite.

    NOTE: no block that lies outside of a query's window is ever read, not even to be masked: it may be another's by
    now, and the table's entry is left as it was.

    Attributes:
        keys, values: of each layer. caches: every tensor once.
    """

    def __init__(
        self, layers: list[LayerSpec], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers = layers
        self.block_size = block_size

        self._memory = num_blocks, dtype, device
        self.nbytes = num_blocks * block_bytes(layers, block_size, dtype)
        self.allocate()

    def allocate(self) -> None:
        """Make the cache, or make it anew."""
        num_blocks, dtype, device = self._memory
        rooms = rooms_of(self.layers)

        def caches() -> dict[Room, torch.Tensor]:
            return {
                room: _zeros(room.shape(num_blocks, self.block_size), dtype, device) for room in dict.fromkeys(rooms)
            }

        keys, values = caches(), caches()
        self.keys, self.values = [keys[room] for room in rooms], [values[room] for room in rooms]
        self.caches = [*keys.values(), *values.values()]

    def free(self) -> None:
        """Let go of the cache; no step may run until it is allocated again."""
        self.keys, self.values, self.caches = [], [], []

    def copy_blocks(self, pairs: torch.Tensor) -> None:
        """Copy block `pairs[i, 0]` to `pairs[i, 1]`, int32 [K, 2], in all layers; see `Plan.block_copies`."""
        source, target = pairs.long().T
        for cache in self.caches:
            cache.index_copy_(0, target, cache.index_select(0, source))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return sum(cache[0].nbytes for cache in self.caches)

    def pack_blocks(self, blocks: torch.Tensor, packed: torch.Tensor) -> None:
        """Copy `blocks`, int32 [n], to the lines of `packed`, uint8 [n, block_bytes]: all keys, then all values."""
        index = blocks.long()
        for cache, piece in self._pieces(packed):
            piece.copy_(cache.index_select(0, index))

    def unpack_blocks(self, packed: torch.Tensor, blocks: torch.Tensor) -> None:
        """Copy the lines of `packed`, as `pack_blocks` writes them, to `blocks`, int32 [n], which differ."""
        index = blocks.long()
        for cache, piece in self._pieces(packed):
            cache.index_copy_(0, index, piece)

    def _pieces(self, packed: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each cache as uint8 [num_blocks, bytes], and the part of `packed` that is its."""
        at = 0
        for cache in self.caches:
            lines = cache.view(len(cache), -1).view(torch.uint8)
            yield lines, packed[:, at : at + lines.shape[1]]
            at += lines.shape[1]

    @abstractmethod
    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: StepInputs) -> torch.Tensor:
        """Store k and v at `step.cache_slots`, then attend.

        Args:
            layer: index into `layers`.
            q: [T, heads, head_dim], rotary embedding applied. The last dimension is contiguous, others may be strided.
            k: [T, kv_heads, head_dim], likewise.
            v: [T, kv_heads, head_dim], likewise.
            step: the step.

        Returns:
            [T, heads, head_dim], contiguous, dtype of q. Dead lanes get finite values that nobody reads.
        """

    def forward_rotary(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Rotary, step: StepInputs
    ) -> torch.Tensor:
        """Apply `rotary` to q and k, then `forward`. q and k may be overwritten; other arguments as there."""
        ops.rotate_(q, k, *rotary)
        return self.forward(layer, q, k, v, step)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; on the CPU such as take no memory before they are written, so a cache costs what is used of it."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)
