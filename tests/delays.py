"""Test wrappers that widen every race: streams that sleep at random, buffers poisoned after their last use."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from twostroke.device.cpu import CpuDevice
from twostroke.device.shapes import StepShape
from twostroke.device.slot import Slot
from twostroke.device.streams import Device, Event, Stream
from twostroke.held_input import ProcessorCall
from twostroke.plan import Plan, StepOutput
from twostroke.runner import Runner

POISON = -1_234_567_890
"""No token, row, block or offset; as a float a tiny negative number."""


class DelayedStream:
    """A stream that sleeps a random while before each piece of work."""

    def __init__(self, stream: Stream, sleep: Callable[[float], None], seed: int, longest: float) -> None:
        self._stream = stream
        self._sleep = sleep
        self._random = random.Random(seed)
        self._longest = longest

    def run(self, work: Callable[[], object]) -> None:
        # NOTE: most pieces run at once and a few wait long: that reorders more than an even delay.
        seconds = self._random.random() ** 4 * self._longest
        self._stream.run(lambda: self._sleep(seconds))
        self._stream.run(work)

    def record(self, event: Event) -> None:
        self._stream.record(event)

    def wait(self, event: Event) -> None:
        self._stream.wait(event)

    @property
    def raw(self) -> torch.cuda.Stream:
        return self._stream.raw  # type: ignore[attr-defined]


class DelayedDevice(Device):
    """A device whose four streams are delayed, each by its own random sequence."""

    def __init__(self, device: Device | None = None, *, seed: int = 0, longest: float = 0.004) -> None:
        self._device = device or CpuDevice(strict=True)
        self.torch_device = self._device.torch_device
        sleep = time.sleep if self.torch_device.type == "cpu" else sleep_on_gpu
        self.h2d = DelayedStream(self._device.h2d, sleep, seed, longest)
        self.compute = DelayedStream(self._device.compute, sleep, seed + 1, longest)
        self.d2h = DelayedStream(self._device.d2h, sleep, seed + 2, longest)
        self.offload = DelayedStream(self._device.offload, sleep, seed + 3, longest)
        self.meter = self._device.meter
        self.copy_meters = self._device.copy_meters
        self.offload_meter = self._device.offload_meter

    def event(self, *, timed: bool = False) -> Event:
        return self._device.event(timed=timed)

    def host_buffer(self, *shape: int) -> torch.Tensor:
        return self._device.host_buffer(*shape)

    def set_clock(self) -> None:
        self._device.set_clock()

    def current(self) -> AbstractContextManager[object]:
        return self._device.current()

    def synchronize(self) -> None:
        self._device.synchronize()

    def close(self) -> None:
        self._device.close()


def sleep_on_gpu(seconds: float) -> None:
    """Queue a kernel that sleeps on the current stream."""
    torch.cuda._sleep(int(seconds * 1.5e9))


class PoisoningRunner(Runner):
    """A runner that poisons each buffer of a slot after its last allowed use, in stream order."""

    def copy_in(self, shape: StepShape, slot: Slot) -> None:
        super().copy_in(shape, slot)
        if self.device.torch_device.type == "cpu":
            slot.host_input.fill_(POISON)
            slot.held.host_positions.fill_(POISON)

    def copy_masks(self, count: int, slot: Slot) -> None:
        super().copy_masks(count, slot)
        if self.device.torch_device.type == "cpu":
            slot.held.host_places.fill_(POISON)
            slot.held.host_masks.fill_(POISON)

    def compute(self, shape: StepShape, slot: Slot) -> None:
        super().compute(shape, slot)
        slot.device_input.fill_(POISON)

    def compute_held(self, shape: StepShape, slot: Slot, count: int, calls: Sequence[ProcessorCall]) -> None:
        super().compute_held(shape, slot, count, calls)
        for buffer in (slot.held.positions, slot.held.places, slot.held.masks, slot.held.output):
            buffer.fill_(POISON)

    def copy_out(self, slot: Slot) -> None:
        super().copy_out(slot)
        slot.device_output.fill_(POISON)
        slot.device_records.fill_(POISON)
        slot.device_scores.fill_(POISON)

    def wait(self, plan: Plan, slot: Slot) -> StepOutput:
        output = super().wait(plan, slot)
        slot.host_output.fill_(POISON)
        slot.host_records.fill_(POISON)
        slot.host_scores.fill_(POISON)
        return output
