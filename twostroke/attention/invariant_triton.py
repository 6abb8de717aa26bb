"""Paged attention by a Triton kernel that no batch mate can change: the backend of `deterministic` on CUDA."""

from __future__ import annotations

import torch

from ..kernels.cache_write import cache_write
from ..kernels.invariant_attention import invariant_attention, invariant_tiles
from ..kernels.ops import Rotary
from ..kernels.rotary_write import rotate_and_write
from ..kernels.step import StepInputs
from .interface import LayerSpec
from .triton_cache import TritonCache


class InvariantTritonAttention(TritonCache):
    """Writes, then attends; lanes and prompt chunks are treated alike. See `kernels.invariant_attention`."""

    def __init__(
        self, layers: list[LayerSpec], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(layers, num_blocks, block_size, dtype, device)
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)
        self._tiles = [invariant_tiles(capability, spec.head_dim, dtype) for spec in layers]
        self._first = torch.zeros(1, dtype=torch.int32, device=device)

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: StepInputs) -> torch.Tensor:
        slots = step.cache_slots[self.layers[layer].group]
        cache_write(k, v, self.keys[layer], self.values[layer], slots, self._first)
        return self._attend(layer, q, step)

    def forward_rotary(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Rotary, step: StepInputs
    ) -> torch.Tensor:
        slots = step.cache_slots[self.layers[layer].group]
        rotate_and_write(q, k, v, *rotary, self.keys[layer], self.values[layer], slots, self._first)
        return self._attend(layer, q, step)

    def _attend(self, layer: int, q: torch.Tensor, step: StepInputs) -> torch.Tensor:
        spec = self.layers[layer]
        return invariant_attention(
            q, self.keys[layer], self.values[layer], step.block_tables[spec.group], step,
            scale=spec.scale, window=spec.window, tiles=self._tiles[layer],
        )  # fmt: skip
