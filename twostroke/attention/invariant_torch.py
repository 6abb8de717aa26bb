"""Paged attention in plain PyTorch that no batch mate can change: the backend of `deterministic` on the CPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from ..kernels import ops
from ..kernels.ops import Rotary
from ..kernels.step import StepInputs
from .interface import Attention


class _Query(NamedTuple):
    """A token of a step that attends: its place in the step, its row, and the positions that it sees."""

    token: int
    row: int
    length: int


class InvariantTorchAttention(Attention):
    """Each token attends on its own: its shapes, and so its bits, depend on its position alone."""

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: StepInputs) -> torch.Tensor:
        spec = self.layers[layer]
        slots = step.cache_slots[spec.group]
        for cache, new in ((self.keys[layer], k), (self.values[layer], v)):
            cache[slots // self.block_size, :, slots % self.block_size] = new
        table = step.block_tables[spec.group]
        out = torch.zeros(q.shape, dtype=q.dtype)
        for token, row, length in _queries(step):
            out[token] = self._attend(layer, q[token], table[row], length)
        return out

    def forward_rotary(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Rotary, step: StepInputs
    ) -> torch.Tensor:
        for token in map(slice, range(len(q)), range(1, len(q) + 1)):
            ops.rotate_(q[token], k[token], rotary.cos[token], rotary.sin[token], *rotary[2:])
        return self.forward(layer, q, k, v, step)

    def _attend(self, layer: int, q: torch.Tensor, blocks: torch.Tensor, length: int) -> torch.Tensor:
        """Return [heads, head_dim] for a query of that shape; `blocks` are those of its row."""
        spec = self.layers[layer]
        position = torch.arange(max(0, length - spec.window) if spec.window else 0, length)
        block, offset = blocks[position // self.block_size].long(), position % self.block_size
        # [1, kv_heads, W, head_dim]; the heads of a group are the queries of one kv head.
        k, v = (cache[layer][block, :, offset].transpose(0, 1).contiguous()[None] for cache in (self.keys, self.values))
        grouped = q.reshape(1, spec.kv_heads, -1, spec.head_dim)
        return F.scaled_dot_product_attention(grouped, k, v, scale=spec.scale).view(q.shape)


def _queries(step: StepInputs) -> list[_Query]:
    """The tokens of a step that attend; dead lanes and padding do not."""
    lanes = enumerate(zip(step.lane_rows.tolist(), step.lane_lengths.tolist(), strict=True))
    queries = [_Query(lane, row, length) for lane, (row, length) in lanes if length]
    offsets = step.chunk_offsets.tolist()
    for chunk, (row, start) in enumerate(zip(step.chunk_rows.tolist(), step.chunk_starts.tolist(), strict=True)):
        begin, end = offsets[chunk : chunk + 2]
        queries += [_Query(token, row, start + token - begin + 1) for token in range(begin, end)]
    return queries
