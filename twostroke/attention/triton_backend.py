"""Paged attention by Triton kernels: the default on CUDA. Capturable; nothing waits for the device."""

from __future__ import annotations

import torch

from ..kernels.block_copy import BlockCopy
from ..kernels.cache_write import cache_write
from ..kernels.paged_decode import (
    DecodeTiles,
    decode_attention,
    decode_splits,
    decode_tiles,
    workspace_size,
)
from ..kernels.paged_prefill import prefill_attention, prefill_tiles
from ..kernels.rotary_write import rotate_and_write
from ..kernels.step import StepInputs
from .interface import Attention, LayerSpec, Rotary


class TritonAttention(Attention):
    """Lanes go through the split-KV kernel, prompt chunks through the tiled one, both into one output.

    The workspace of the splits is allocated here, once: layers and graphs run one after the other on the compute
    stream and share it.

    Args:
        max_lanes: most lanes that a step may have, padding included.
    """

    def __init__(
        self,
        layers: list[LayerSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_lanes: int = 256,
    ) -> None:
        super().__init__(layers, num_blocks, block_size, dtype, device)
        self.max_lanes = max_lanes
        self._copy = BlockCopy([*self.keys, *self.values])
        capability, self._processors = _device_facts(device)
        self._decode = [decode_tiles(capability, spec.head_dim, dtype) for spec in layers]
        self._prefill = [
            prefill_tiles(capability, spec.heads // spec.kv_heads, spec.head_dim, dtype) for spec in layers
        ]
        needed = (
            workspace_size(lanes, spec.heads, spec.head_dim, self._splits(lanes, spec, tiles))
            for spec, tiles in set(zip(layers, self._decode, strict=True))
            for lanes in range(1, max_lanes + 1)
        )
        self._workspace = torch.empty(max(needed, default=0), dtype=torch.float32, device=device)

    def copy_blocks(self, pairs: torch.Tensor) -> None:
        self._copy(pairs)

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: StepInputs) -> torch.Tensor:
        group = self.layers[layer].group
        cache_write(k, v, self.keys[layer], self.values[layer], step.cache_slots[group])
        return self._attend(layer, q, step)

    def forward_rotary(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Rotary, step: StepInputs
    ) -> torch.Tensor:
        group = self.layers[layer].group
        rotate_and_write(q, k, v, *rotary, self.keys[layer], self.values[layer], step.cache_slots[group])
        return self._attend(layer, q, step)

    def _attend(self, layer: int, q: torch.Tensor, step: StepInputs) -> torch.Tensor:
        """Attention over the cache, which holds the step's keys and values already."""
        if step.num_lanes > self.max_lanes:
            raise ValueError(f"a step of {step.num_lanes} lanes: the workspace was made for max_lanes={self.max_lanes}")
        spec, keys, values = self.layers[layer], self.keys[layer], self.values[layer]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        table, lanes = step.block_tables[spec.group], step.num_lanes
        if lanes:
            tiles = self._decode[layer]
            decode_attention(
                q, keys, values, table, step.lane_rows, step.lane_lengths, out, self._workspace,
                scale=spec.scale, window=spec.window, splits=self._splits(lanes, spec, tiles), tiles=tiles,
            )  # fmt: skip
        if q.shape[0] > lanes:
            prefill_attention(
                q[lanes:], keys, values, table, step.chunk_rows, step.chunk_starts, step.chunk_offsets, out[lanes:],
                scale=spec.scale, window=spec.window, tiles=self._prefill[layer],
            )  # fmt: skip
        return out

    def _splits(self, lanes: int, spec: LayerSpec, tiles: DecodeTiles) -> int:
        return decode_splits(lanes, spec.kv_heads, self._processors, tiles)


def _device_facts(device: torch.device) -> tuple[tuple[int, int], int]:
    """Return compute capability and number of multiprocessors; elsewhere (the interpreter) those of a small GPU."""
    if device.type != "cuda":
        return (8, 0), 8
    return torch.cuda.get_device_capability(device), torch.cuda.get_device_properties(device).multi_processor_count
