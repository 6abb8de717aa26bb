"""Streams and events on CUDA."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from .streams import Device, Event


class CudaEvent:
    """A CUDA event that blocks the waiting thread instead of spinning."""

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            self.raw = torch.cuda.Event(blocking=True)

    def synchronize(self) -> None:
        self.raw.synchronize()


class CudaStream:
    """A non-default CUDA stream; `run` calls the work at once, and what it launches is queued here."""

    def __init__(self, device: torch.device) -> None:
        self.raw = torch.cuda.Stream(device)

    def run(self, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self.raw):
            work()

    def record(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        event.raw.record(self.raw)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self.raw.wait_event(event.raw)


class CudaMeter:
    """Pairs of timing events on the compute stream, a ring of them, so that reading one never waits."""

    def __init__(self) -> None:
        self._free: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._running: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._last: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def begin(self) -> None:
        pair = self._free.pop() if self._free else (_timing_event(), _timing_event())
        pair[0].record()
        self._running.append(pair)

    def end(self) -> None:
        self._running[-1][1].record()

    def read(self) -> tuple[float, float]:
        pair = self._running.popleft()
        gap = 0.0
        if self._last is not None:
            gap = self._last[1].elapsed_time(pair[0]) * 1e-3
            self._free.append(self._last)
        self._last = pair
        return gap, pair[0].elapsed_time(pair[1]) * 1e-3


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


class CudaDevice(Device):
    """One GPU with three non-default streams.

    Raises:
        RuntimeError: torch's stream pool handed out the same stream twice.
    """

    def __init__(self, device: torch.device) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(self.torch_device)
        self._streams = [CudaStream(self.torch_device) for _ in range(3)]
        # NOTE: torch hands out streams from a pool of 32 in turn, so an old process can get one twice.
        handles = {stream.raw.cuda_stream for stream in self._streams}
        if len(handles) < 3 or torch.cuda.default_stream(self.torch_device).cuda_stream in handles:
            raise RuntimeError(f"the CUDA stream pool gave streams {sorted(handles)}: three different ones are needed")
        self.h2d, self.compute, self.d2h = self._streams
        self.meter = CudaMeter()

    def event(self) -> CudaEvent:
        return CudaEvent(self.torch_device)

    def host_buffer(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, pin_memory=True)

    def building(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._streams[1].raw)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def close(self) -> None:
        for stream in self._streams:
            stream.raw.synchronize()
