"""A paged cache whose blocks Triton kernels move: all layers, keys and values, in one launch."""

from __future__ import annotations

import torch

from ..kernels.block_copy import BlockCopy
from ..kernels.block_pack import BlockPack
from .interface import Attention


class TritonCache(Attention):
    """What the attention backends of Triton share. Their kernels keep addresses, so they are made with the cache."""

    def allocate(self) -> None:
        super().allocate()
        self._copy = BlockCopy(self.caches)
        self._pack = BlockPack(self.caches)

    def copy_blocks(self, pairs: torch.Tensor) -> None:
        self._copy(pairs)

    def pack_blocks(self, blocks: torch.Tensor, packed: torch.Tensor) -> None:
        self._pack.pack(blocks, packed)

    def unpack_blocks(self, packed: torch.Tensor, blocks: torch.Tensor) -> None:
        self._pack.unpack(packed, blocks)
