"""The host's memory for blocks, and the copies between it and the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

SLAB_BYTES = 256 << 20
"""Most bytes that are allocated at once: pinned memory is handed out in powers of two."""

STAGING_BYTES = 64 << 20
"""Most bytes of the device's buffer that blocks pass through."""


class Cache(Protocol):
    """The device's cache, see `attention.interface.Attention`."""

    def pack_blocks(self, blocks: torch.Tensor, packed: torch.Tensor) -> None: ...
    def unpack_blocks(self, packed: torch.Tensor, blocks: torch.Tensor) -> None: ...


class HostBlocks:
    """Host slots, each of which holds one block of all layers side by side.

        save   blocks of the cache --pack--> staging (device) --copy--> slots (host)
        load   slots (host) --copy--> staging (device) --unpack--> blocks of the cache

    A block lies in as many pieces as there are layers, times two. They are gathered on the device, since the way to the
    host is fast for large pieces only. Neighbouring slots are copied at once.

    All is queued on the current stream, always the same one, which orders it: the staging buffer needs no other guard.

    Args:
        cache: whose blocks these are.
        num_slots: blocks that there is room for.
        block_bytes: of one block in all layers, a multiple of 4.
        host_buffer: makes host memory of so many int32, which asynchronous copies may read and write.
        device: of the cache.
    """

    def __init__(
        self,
        cache: Cache,
        num_slots: int,
        block_bytes: int,
        host_buffer: Callable[[int], torch.Tensor],
        device: torch.device,
    ) -> None:
        self._cache = cache
        self._per_slab = max(1, SLAB_BYTES // block_bytes)
        words = block_bytes // 4
        sizes = [min(self._per_slab, num_slots - first) for first in range(0, num_slots, self._per_slab)]
        self._slabs = [host_buffer(size * words).view(torch.uint8).view(size, block_bytes) for size in sizes]
        staged = max(1, min(num_slots, STAGING_BYTES // block_bytes))
        self._staging = torch.zeros(staged, block_bytes, dtype=torch.uint8, device=device)

    def save(self, blocks: torch.Tensor, slots: Sequence[int]) -> None:
        """Copy `blocks`, int32 [n] on the device, to `slots`."""
        for begin, end, staging in self._rounds(len(slots)):
            self._cache.pack_blocks(blocks[begin:end], staging)
            for first, last, host in self._runs(slots[begin:end]):
                host.copy_(staging[first:last], non_blocking=True)

    def load(self, slots: Sequence[int], blocks: torch.Tensor) -> None:
        """Copy `slots` to `blocks`, int32 [n] on the device."""
        for begin, end, staging in self._rounds(len(slots)):
            for first, last, host in self._runs(slots[begin:end]):
                staging[first:last].copy_(host, non_blocking=True)
            self._cache.unpack_blocks(staging, blocks[begin:end])

    def free(self) -> None:
        """Let go of the memory; nothing is copied any more."""
        self._slabs, self._staging = [], self._staging.new_empty(0)

    def _rounds(self, count: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Cut so many blocks into what the staging buffer holds: begin, end, and the part of the buffer."""
        most = len(self._staging)
        for begin in range(0, count, most):
            end = min(begin + most, count)
            yield begin, end, self._staging[: end - begin]

    def _runs(self, slots: Sequence[int]) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Cut `slots` into those that lie side by side in memory: begin, end, and their memory uint8 [n, bytes]."""
        begin = 0
        for end in range(1, len(slots) + 1):
            if end < len(slots) and slots[end] == slots[end - 1] + 1 and slots[end] % self._per_slab:
                continue
            slab, first = divmod(slots[begin], self._per_slab)
            yield begin, end, self._slabs[slab][first : first + end - begin]
            begin = end
