"""Paged attention in plain PyTorch: the backend of CPUs, and the reference on CUDA."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from ..kernels.step import StepInputs
from .interface import Attention, LayerSpec


class _Visible(NamedTuple):
    """The W positions that queries look at, and what each query sees of them.

    Attributes:
        lines: int64, flat: [L, kv_heads, W] for lanes, [kv_heads, W] for a chunk. A line is one head at one position
            of the cache. Invisible positions repeat the line of a visible one: what else lies in a block may be the
            NaN of an earlier owner, and 0 * NaN would spread it.
        bias: added to the scores, 0 where visible and -inf elsewhere: [L, 1, 1, W] for lanes, [queries, W] for a chunk.
    """

    lines: torch.Tensor
    bias: torch.Tensor


class _Places(NamedTuple):
    """What the layers of one kind share in a step.

    Attributes:
        writes: int64 [T * kv_heads], the lines that the step's keys and values go to.
        lanes: what the lanes see.
        chunks: for each chunk the places of its tokens in the step, int64 (T, one past the end, for padding), and
            what they see.
    """

    writes: torch.Tensor
    lanes: _Visible
    chunks: list[tuple[torch.Tensor, _Visible]]


class TorchAttention(Attention):
    """Gathers the visible positions of all lanes, and of each prompt chunk, and attends with one call for each.

    Indices and masks are the same for all layers of one kind; they are made once per step. On CUDA nothing waits for
    the device: without `step.max_length`, and for prompt chunks, as many positions as the block table holds are
    gathered.
    """

    def __init__(
        self, layers: list[LayerSpec], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(layers, num_blocks, block_size, dtype, device)
        self._step: StepInputs | None = None
        self._places: dict[tuple[int, int, int], _Places] = {}

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: StepInputs) -> torch.Tensor:
        spec = self.layers[layer]
        places = self._places_of(layer, step, q.dtype)
        keys, values = self.keys[layer].view(-1, spec.head_dim), self.values[layer].view(-1, spec.head_dim)
        keys.index_copy_(0, places.writes, k.reshape(-1, spec.head_dim))
        values.index_copy_(0, places.writes, v.reshape(-1, spec.head_dim))
        if step.num_lanes == q.shape[0] and not step.num_chunks:
            return _attend_lanes(spec, q, keys, values, places.lanes)
        # One line more than tokens: the queries that only pad a chunk are written there.
        out = q.new_zeros(q.shape[0] + 1, *q.shape[1:])
        if step.num_lanes:
            out[: step.num_lanes] = _attend_lanes(spec, q[: step.num_lanes], keys, values, places.lanes)
        for tokens, visible in places.chunks:
            chunk_q = q.index_select(0, tokens.clamp(max=len(q) - 1))
            out.index_copy_(0, tokens, _attend_chunk(spec, chunk_q, keys, values, visible))
        return out[:-1]

    def _places_of(self, layer: int, step: StepInputs, dtype: torch.dtype) -> _Places:
        # NOTE: layer 0 always starts anew: a slot may hand over the same step with new contents in its tensors.
        if layer == 0 or step is not self._step:
            self._step, self._places = step, {}
        spec = self.layers[layer]
        kind = (spec.group, spec.kv_heads, spec.window)
        if kind not in self._places:
            self._places[kind] = _find_places(spec, step, self.block_size, dtype)
        return self._places[kind]


def _attend_lanes(
    spec: LayerSpec, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: _Visible
) -> torch.Tensor:
    """Return [L, heads, head_dim]. The heads of a group are the queries of one kv head."""
    shape = (len(q), spec.kv_heads, -1, spec.head_dim)
    k, v = keys.index_select(0, visible.lines).view(shape), values.index_select(0, visible.lines).view(shape)
    out = F.scaled_dot_product_attention(q.reshape(shape), k, v, attn_mask=visible.bias, scale=spec.scale)
    # A dead lane sees not even the first position: its mean over nothing must not spread as NaN.
    dead = visible.bias[:, 0, :, :1] < 0
    return out.reshape(q.shape).masked_fill_(dead, 0.0)


def _attend_chunk(
    spec: LayerSpec, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: _Visible
) -> torch.Tensor:
    """Return [queries, heads, head_dim]. Kv heads take the place of the batch, and their group that of the heads."""
    group = spec.heads // spec.kv_heads
    shape = (spec.kv_heads, 1, -1, spec.head_dim)
    k, v = (cache.index_select(0, visible.lines).view(shape).expand(-1, group, -1, -1) for cache in (keys, values))
    grouped = q.view(len(q), spec.kv_heads, group, spec.head_dim).permute(1, 2, 0, 3)
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=visible.bias, scale=spec.scale)
    return out.permute(2, 0, 1, 3).reshape(q.shape)


def _find_places(spec: LayerSpec, step: StepInputs, block_size: int, dtype: torch.dtype) -> _Places:
    slots = step.cache_slots[spec.group][:, None]
    writes = _lines(slots // block_size, slots % block_size, spec.kv_heads, block_size).flatten()
    chunks = [
        _place_chunk(spec, step, block_size, dtype, chunk, queries, positions)
        for chunk, (queries, positions) in enumerate(_chunk_bounds(step, block_size))
        if queries
    ]
    return _Places(writes, _place_lanes(spec, step, block_size, dtype), chunks)


def _lines(blocks: torch.Tensor, offsets: torch.Tensor, kv_heads: int, block_size: int) -> torch.Tensor:
    """Return int64 [..., kv_heads, W]: the lines of W positions given as blocks and offsets, int64 [..., W]."""
    heads = torch.arange(kv_heads, device=blocks.device)[:, None]
    return (blocks[..., None, :] * kv_heads + heads) * block_size + offsets[..., None, :]


def _place_lanes(spec: LayerSpec, step: StepInputs, block_size: int, dtype: torch.dtype) -> _Visible:
    lengths = step.lane_lengths.long()[:, None]
    table = step.block_tables[spec.group].index_select(0, step.lane_rows)
    width = step.max_length or table.shape[1] * block_size
    first = torch.zeros_like(lengths)
    if spec.window:
        width, first = min(width, spec.window), (lengths - spec.window).clamp_(min=0)
    position = first + torch.arange(width, device=lengths.device)
    bias = _bias(position < lengths, dtype)[:, None, None]
    position = torch.minimum(position, (lengths - 1).clamp_(min=0))
    blocks = table.gather(1, position // block_size).long()
    return _Visible(_lines(blocks, position % block_size, spec.kv_heads, block_size).flatten(), bias)


def _chunk_bounds(step: StepInputs, block_size: int) -> list[tuple[int, int]]:
    """Return (most tokens, most positions) of each chunk: exact on the CPU; on CUDA what the host knows anyway."""
    if step.chunk_offsets.is_cuda:
        return [(step.max_chunk, step.block_tables.shape[2] * block_size)] * step.num_chunks
    tokens = step.chunk_offsets.diff()
    return list(zip(tokens.tolist(), (step.chunk_starts + tokens).tolist(), strict=True))


def _place_chunk(
    spec: LayerSpec, step: StepInputs, block_size: int, dtype: torch.dtype, chunk: int, queries: int, positions: int
) -> tuple[torch.Tensor, _Visible]:
    begin, end = step.chunk_offsets[chunk].long(), step.chunk_offsets[chunk + 1].long()
    start = step.chunk_starts[chunk].long()
    index = torch.arange(queries, device=begin.device)
    tokens = torch.where(index < end - begin, begin + index, step.input_ids.shape[0])
    query = (start + index)[:, None]
    last = start + end - begin - 1
    first = torch.zeros_like(start)
    if spec.window:
        positions, first = min(positions, queries + spec.window - 1), (start - spec.window + 1).clamp_(min=0)
    position = first + torch.arange(positions, device=begin.device)
    visible = (position <= query) & (position <= last)
    if spec.window:
        visible &= position > query - spec.window
    position = torch.minimum(position, last).clamp_(min=0)
    row = step.block_tables[spec.group].index_select(0, step.chunk_rows[chunk : chunk + 1])[0]
    blocks = row.index_select(0, position // block_size).long()
    lines = _lines(blocks, position % block_size, spec.kv_heads, block_size).flatten()
    return tokens, _Visible(lines, _bias(visible, dtype))


def _bias(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
