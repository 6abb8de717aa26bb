"""Copying whole blocks of the paged cache: all layers, keys and values, in one launch."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_TILE = 2048


@triton.jit
def _copy_blocks(pairs, caches, sizes, TILE: tl.constexpr):
    """One program per pair and cache; a block is copied in words of 2 bytes."""
    source = tl.load(pairs + 2 * tl.program_id(0)).to(tl.int64)
    target = tl.load(pairs + 2 * tl.program_id(0) + 1).to(tl.int64)
    cache = tl.load(caches + tl.program_id(1)).to(tl.pointer_type(tl.int16))
    size = tl.load(sizes + tl.program_id(1))
    for first in range(0, size, TILE):
        word = first + tl.arange(0, TILE)
        inside = word < size
        tl.store(cache + target * size + word, tl.load(cache + source * size + word, mask=inside), mask=inside)


class BlockCopy:
    """Copies blocks within each of some caches, contiguous tensors [num_blocks, ...], of 2 or 4 bytes an element.

    It keeps their addresses, so they must not move.
    """

    def __init__(self, caches: Sequence[torch.Tensor]) -> None:
        device = caches[0].device
        self._addresses = torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.int64, device=device)
        words = [cache[0].nbytes // 2 for cache in caches]
        self._words = torch.tensor(words, dtype=torch.int32, device=device)

    def __call__(self, pairs: torch.Tensor) -> None:
        """Copy block `pairs[i, 0]` to `pairs[i, 1]`, int32 [K, 2]; no target is a source or another's target."""
        grid = (len(pairs), len(self._addresses))
        _copy_blocks[grid](pairs, self._addresses, self._words, TILE=_TILE)
