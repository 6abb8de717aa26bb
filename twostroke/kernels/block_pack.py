"""Gathering the pieces of cache blocks, and scattering them: all layers, keys and values, in one launch."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl

_TILE = 2048


# NOTE: the blocks to be loaded stand behind those to be saved, wherever that is.
@triton.jit(do_not_specialize_on_alignment=["blocks"])
def _copy_pieces(blocks, caches, sizes, offsets, packed, line, PACK: tl.constexpr, TILE: tl.constexpr):
    """One program per block and cache; sizes and offsets are in words of 2 bytes, `line` those of a packed block."""
    block = tl.load(blocks + tl.program_id(0)).to(tl.int64)
    cache = tl.load(caches + tl.program_id(1)).to(tl.pointer_type(tl.int16))
    size = tl.load(sizes + tl.program_id(1))
    piece = cache + block * size
    place = packed + tl.program_id(0).to(tl.int64) * line + tl.load(offsets + tl.program_id(1))
    for first in range(0, size, TILE):
        word = first + tl.arange(0, TILE)
        inside = word < size
        if PACK:
            tl.store(place + word, tl.load(piece + word, mask=inside), mask=inside)
        else:
            tl.store(piece + word, tl.load(place + word, mask=inside), mask=inside)


class BlockPack:
    """Packs blocks of some caches, contiguous tensors [num_blocks, ...] of 2 or 4 bytes an element, cache after cache.

    It keeps their addresses, so they must not move.
    """

    def __init__(self, caches: Sequence[torch.Tensor]) -> None:
        device = caches[0].device
        self._addresses = torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.int64, device=device)
        words = [cache[0].nbytes // 2 for cache in caches]
        self._words = torch.tensor(words, dtype=torch.int32, device=device)
        self._offsets = torch.tensor([0, *accumulate(words)][:-1], dtype=torch.int32, device=device)

    def pack(self, blocks: torch.Tensor, packed: torch.Tensor) -> None:
        """Copy `blocks`, int32 [n], to the lines of `packed`, uint8 [n, bytes of a block]."""
        self._copy(blocks, packed, pack=True)

    def unpack(self, packed: torch.Tensor, blocks: torch.Tensor) -> None:
        """Copy the lines of `packed`, uint8 [n, bytes of a block], to `blocks`, int32 [n]; they differ."""
        self._copy(blocks, packed, pack=False)

    def _copy(self, blocks: torch.Tensor, packed: torch.Tensor, *, pack: bool) -> None:
        words = packed.view(torch.int16)
        _copy_pieces[(len(blocks), len(self._addresses))](
            blocks, self._addresses, self._words, self._offsets, words, words.shape[1], PACK=pack, TILE=_TILE
        )  # fmt: skip
