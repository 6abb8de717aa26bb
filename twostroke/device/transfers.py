"""Transfers: what plans copy between the cache and the host, on a stream of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch

from ..plan import Plan
from .streams import Device

_AT_ONCE = 4
"""Transfers in flight for which there are buffers from the start: to pin memory takes long."""


class Blocks(Protocol):
    """Copies blocks on the current stream, see `cache.offload.HostBlocks`."""

    def save(self, blocks: torch.Tensor, slots: Sequence[int]) -> None: ...
    def load(self, slots: Sequence[int], blocks: torch.Tensor) -> None: ...
    def free(self) -> None: ...


class Done(NamedTuple):
    """A transfer that is done: the step whose plan carried it, the blocks it saved and loaded, and what each took.

    Attributes:
        saving, loading: seconds.
    """

    step: int
    saved: int
    saving: float
    loaded: int
    loading: float


class _Transfer:
    """Events, and the numbers of the device's blocks, of one transfer in flight.

    The host writes the numbers again only after `done`.
    """

    def __init__(self, device: Device, most: int) -> None:
        self.index = device.host_buffer(most)
        self.free = device.event()
        self.done = device.event()
        self.step = self.saved = self.loaded = 0


class Transfers:
    """Queues the transfers of plans, in their order, and tells which are done. Nobody waits for them on the host.

        compute    step N - 1 |     step N      |  step N + 1, writes what was saved, reads what was loaded
        offload               | saves N, loads N|
                            free                done

    Saves read blocks whose steps are committed. Loads write to blocks that steps launched before may still read: they
    wait for these.

    Args:
        device: whose offload stream is used, by nobody else.
        blocks: makes the copies.
        num_blocks: of the cache.
    """

    def __init__(self, device: Device, blocks: Blocks, num_blocks: int) -> None:
        self._device = device
        self._blocks = blocks
        self._most = 2 * num_blocks
        self._spare = [_Transfer(device, self._most) for _ in range(_AT_ONCE)]
        self._in_flight: deque[_Transfer] = deque()

    def queue(self, plan: Plan) -> None:
        """Queue what `plan` copies, before its step."""
        if not len(plan.saves) and not len(plan.loads):
            return
        device, stream = self._device, self._device.offload
        transfer = self._spare.pop() if self._spare else _Transfer(device, self._most)
        transfer.step, transfer.saved, transfer.loaded = plan.step, len(plan.saves), len(plan.loads)
        numbers: np.ndarray = transfer.index.numpy()
        numbers[: transfer.saved + transfer.loaded] = np.concatenate([plan.saves[:, 0], plan.loads[:, 1]])
        if len(plan.loads):
            device.compute.record(transfer.free)
            stream.wait(transfer.free)
        stream.run(partial(self._copy, transfer, plan.saves[:, 1].tolist(), plan.loads[:, 0].tolist()))
        stream.record(transfer.done)
        self._in_flight.append(transfer)

    def _copy(self, transfer: _Transfer, saved: list[int], loaded: list[int]) -> None:
        """The work on the offload stream."""
        meter, count = self._device.offload_meter, len(saved) + len(loaded)
        # NOTE: allocated here, so that its memory belongs to this stream.
        blocks = transfer.index[:count].to(self._device.torch_device, non_blocking=True)
        if saved:
            meter.begin()
            self._blocks.save(blocks[: len(saved)], saved)
            meter.end()
        if loaded:
            meter.begin()
            self._blocks.load(loaded, blocks[len(saved) :])
            meter.end()

    def hold_back(self, step: int) -> None:
        """Hold back the compute stream until the transfer of the plan of `step`, and all before it, are done."""
        for transfer in self._in_flight:
            if transfer.step == step:
                self._device.compute.wait(transfer.done)

    def poll(self) -> list[Done]:
        """The transfers that were done since the last call, oldest first."""
        done = []
        while self._in_flight and self._in_flight[0].done.is_done():
            transfer = self._in_flight.popleft()
            saving, loading = (self._seconds() if count else 0.0 for count in (transfer.saved, transfer.loaded))
            done.append(Done(transfer.step, transfer.saved, saving, transfer.loaded, loading))
            self._spare.append(transfer)
        return done

    def _seconds(self) -> float:
        began, ended = self._device.offload_meter.read()
        return ended - began

    def finish(self) -> None:
        """Wait on the host until nothing is in flight: before the cache is let go of."""
        if self._in_flight:
            self._in_flight[-1].done.synchronize()

    def free(self) -> None:
        """Let go of the host's memory; nothing is in flight, and nothing will be."""
        self._blocks.free()
        self._spare.clear()
