"""Paged attention by Triton kernels: the default on CUDA. Capturable; nothing waits for the device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..kernels.cache_write import cache_write
from ..kernels.compiler import CAPABILITY, CompilerMissing
from ..kernels.decode_schedule import DecodeSchedule, make_schedule
from ..kernels.early import early
from ..kernels.ops import Rotary
from ..kernels.paged_decode import (
    DecodeTiles,
    DecodeWorkspace,
    decode_attention,
    decode_tiles,
    extra_programs,
    is_crowded,
)
from ..kernels.paged_prefill import prefill_attention, prefill_tiles
from ..kernels.prefill_schedule import PrefillSchedule, make_prefill_schedule
from ..kernels.rotary_write import rotate_and_write
from ..kernels.step import StepInputs
from ..kernels.streamed_decode import StreamedDecode, streamed_tiles
from ..kernels.streamed_prefill import StreamedPrefill, tile_tokens
from .interface import LayerSpec
from .triton_cache import TritonCache

_log = logging.getLogger(__name__)


class _Kind(NamedTuple):
    """What layers that share the schedule of a step have in common."""

    window: int
    extra: int
    tiles: DecodeTiles
    attend: Callable[..., None]


class TritonAttention(TritonCache):
    """Lanes go through the split-KV kernel, prompt chunks through the tiled one (both in CUDA C++ where there is one),
    into one output.

    Layers of one kind share the schedules of a step, which its first layer writes. Those of lanes, and the workspace,
    are allocated here, once: layers and graphs run one after the other on the compute stream and share them.

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
        self._capability, self._processors = _device_facts(device)
        # Programmatic dependent launch; see `decode_attention`.
        self._early = early(device)["PDL"]
        self._prefill = [
            prefill_tiles(self._capability, spec.heads // spec.kv_heads, spec.head_dim, dtype) for spec in layers
        ]
        self._dtype = dtype
        self._streamed = _streamed_for(layers, block_size, dtype, device, self._capability)
        self._streamed_prefill = _streamed_prefill_for(layers, block_size, dtype, device, self._capability)
        self._tile_tokens = [
            tile_tokens(spec.heads, spec.kv_heads) if _has_streamed_prefill(spec, block_size, dtype) else 0
            for spec in layers
        ]
        self._prefill_schedules: dict[int, PrefillSchedule] = {}
        kinds = {self._kind(spec, lanes) for spec in set(layers) for lanes in range(1, max_lanes + 1)}
        self._schedules = {kind: DecodeSchedule.empty(max_lanes, kind.extra, device) for kind in kinds}
        results = max((2 * kind.extra for kind in kinds), default=0) * max((spec.heads for spec in layers), default=0)
        self._workspace = DecodeWorkspace.zeros(results, max((spec.head_dim for spec in layers), default=0), device)
        self._step: StepInputs | None = None

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: StepInputs) -> torch.Tensor:
        return self._attend(layer, q, k, v, None, step)

    def forward_rotary(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Rotary, step: StepInputs
    ) -> torch.Tensor:
        return self._attend(layer, q, k, v, rotary, step)

    def _attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Rotary | None, step: StepInputs
    ) -> torch.Tensor:
        # NOTE: layer 0 always starts anew: a slot may hand over the same step with new contents in its tensors.
        starts = layer == 0 or step is not self._step
        if starts:
            self._start(step)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lanes = step.num_lanes
        if lanes:
            spec = self.layers[layer]
            kind = self._kind(spec, lanes)
            kind.attend(
                q[:lanes], k[:lanes], v[:lanes], rotary, self.keys[layer], self.values[layer],
                step.block_tables[spec.group], step.cache_slots[spec.group], self._schedules[kind], out,
                self._workspace, scale=spec.scale, tiles=kind.tiles, early=self._early and not starts,
            )  # fmt: skip
        if step.num_chunks or q.shape[0] > lanes:
            # NOTE: after the lanes, since those that are not in use write zeros where chunk tokens are.
            self._attend_chunks(layer, q, k, v, rotary, step, out)
        return out

    def free(self) -> None:
        """Let go of the cache, and of the last step, whose memory may be that of graphs."""
        super().free()
        self._step, self._prefill_schedules = None, {}

    def _start(self, step: StepInputs) -> None:
        """Write the schedules of a step, while what is ahead still makes queries, keys and values."""
        lanes = step.num_lanes
        if lanes > self.max_lanes:
            raise ValueError(f"a step of {lanes} lanes: the schedules were made for max_lanes={self.max_lanes}")
        self._step = step
        if lanes:
            for kind in {self._kind(spec, lanes) for spec in self.layers}:
                make_schedule(
                    self._schedules[kind], step.lane_rows, step.lane_lengths, window=kind.window,
                    tile=kind.tiles.positions, min_share=kind.tiles.min_share, rounds=kind.tiles.rounds,
                )  # fmt: skip
        self._prefill_schedules = {}
        tokens = step.input_ids.shape[0]
        if self._streamed_prefill is not None and (step.num_chunks or tokens > lanes):
            chunks = (step.chunk_rows, step.chunk_starts, step.chunk_offsets)
            for size in set(self._tile_tokens) - {0}:
                self._prefill_schedules[size] = make_prefill_schedule(*chunks, tokens=tokens, tile_tokens=size)

    def _kind(self, spec: LayerSpec, lanes: int) -> _Kind:
        """Return the kind of a layer in steps of so many lanes."""
        attend: Callable[..., None] = decode_attention
        if self._streamed is not None and _is_streamed(spec, self.block_size, self._dtype):
            tiles, attend = streamed_tiles(lanes, spec.kv_heads, self._processors), self._streamed
        else:
            crowded = is_crowded(lanes, spec.kv_heads, self._processors)
            tiles = decode_tiles(self._capability, spec.head_dim, self._dtype, crowded=crowded)
        return _Kind(spec.window, extra_programs(spec.kv_heads, self._processors, tiles), tiles, attend)

    def _attend_chunks(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: Rotary | None,
        step: StepInputs,
        out: torch.Tensor,
    ) -> None:
        """Store the keys and values of the tokens from the first chunk on, and attend with their queries."""
        spec, keys, values = self.layers[layer], self.keys[layer], self.values[layer]
        slots, offsets = step.cache_slots[spec.group], step.chunk_offsets
        streamed = self._streamed_prefill if self._tile_tokens[layer] else None
        if rotary is None:
            cache_write(k, v, keys, values, slots, offsets)
        else:
            on_their_way = streamed is not None and streamed.rotates(len(q), spec.heads, spec.kv_heads)
            rotate_and_write(q, k, v, *rotary, keys, values, slots, offsets, rotate_queries=not on_their_way)
            rotary = rotary if on_their_way else None
        table = step.block_tables[spec.group]
        if streamed is not None:
            schedule = self._prefill_schedules[self._tile_tokens[layer]]
            streamed(q, keys, values, table, schedule, out, scale=spec.scale, rotary=rotary, early=self._early)
            return
        prefill_attention(
            q, keys, values, table, step.chunk_rows, step.chunk_starts, offsets, out,
            scale=spec.scale, window=spec.window, tiles=self._prefill[layer],
        )  # fmt: skip


def _is_streamed(spec: LayerSpec, block_size: int, dtype: torch.dtype) -> bool:
    return StreamedDecode.fits(spec.heads, spec.kv_heads, spec.head_dim, block_size, dtype)


def _streamed_for(
    layers: list[LayerSpec], block_size: int, dtype: torch.dtype, device: torch.device, capability: tuple[int, int]
) -> StreamedDecode | None:
    """Return the kernel in CUDA C++ for lanes; None where device, shapes or a missing compiler forbid it."""
    if device.type != "cuda" or capability != CAPABILITY:
        return None
    if not any(_is_streamed(spec, block_size, dtype) for spec in layers):
        return None
    try:
        return StreamedDecode(device)
    except CompilerMissing as error:
        _log.warning("attention of decode lanes takes the slower path: %s", error)
        return None


def _has_streamed_prefill(spec: LayerSpec, block_size: int, dtype: torch.dtype) -> bool:
    return StreamedPrefill.fits(spec.heads, spec.kv_heads, spec.head_dim, block_size, dtype, spec.window)


def _streamed_prefill_for(
    layers: list[LayerSpec], block_size: int, dtype: torch.dtype, device: torch.device, capability: tuple[int, int]
) -> StreamedPrefill | None:
    """Return the kernel in CUDA C++ for prompt chunks; None where device, shapes or a missing compiler forbid it."""
    if device.type != "cuda" or capability != CAPABILITY:
        return None
    if not any(_has_streamed_prefill(spec, block_size, dtype) for spec in layers):
        return None
    try:
        return StreamedPrefill(device)
    except CompilerMissing as error:
        _log.warning("attention of prompt chunks takes the slower path: %s", error)
        return None


def _device_facts(device: torch.device) -> tuple[tuple[int, int], int]:
    """Return compute capability and number of multiprocessors; elsewhere (the interpreter) those of a small GPU."""
    if device.type != "cuda":
        return (8, 0), 8
    return torch.cuda.get_device_capability(device), torch.cuda.get_device_properties(device).multi_processor_count
