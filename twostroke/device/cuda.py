"""Streams and events on CUDA."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from .streams import Device, Event


class CudaEvent:
    """A CUDA event that blocks the waiting thread instead of spinning; if `timed`, it keeps when it was done."""

    def __init__(self, device: torch.device, timed: bool) -> None:
        with torch.cuda.device(device):
            self.raw = torch.cuda.Event(blocking=True, enable_timing=timed)

    def synchronize(self) -> None:
        self.raw.synchronize()

    def is_done(self) -> bool:
        return bool(self.raw.query())


class CudaStream:
    """A non-default CUDA stream; `run` calls the work at once, and what it launches is queued here.

    Args:
        device: the GPU.
        home: the stream that is the calling thread's before and after a call of `run`; None is this one, to which the
            thread need not turn then.
    """

    def __init__(self, device: torch.device, home: CudaStream | None = None) -> None:
        self.raw = torch.cuda.Stream(device)
        self._home = home

    def run(self, work: Callable[[], object]) -> None:
        if self._home is None:
            work()
            return
        # NOTE: not `torch.cuda.stream`, which takes as long as the copy that is to be queued.
        torch.cuda.set_stream(self.raw)
        try:
            work()
        finally:
            torch.cuda.set_stream(self._home.raw)

    def record(self, event: Event) -> None:
        event.raw.record(self.raw)  # type: ignore[attr-defined]  # a CUDA event has one

    def wait(self, event: Event) -> None:
        event.raw.wait(self.raw)  # type: ignore[attr-defined]


class _EventPairs:
    """Pairs of timing events recorded on a stream. Read events are used again, so reading never waits."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._free: list[torch.cuda.Event] = []
        self._running: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def begin(self) -> None:
        began, ended = self._take(), self._take()
        began.record(self._stream)
        self._running.append((began, ended))

    def end(self) -> None:
        self._running[-1][1].record(self._stream)

    def _take(self) -> torch.cuda.Event:
        return self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)


class CudaMeter(_EventPairs):
    """Measures the compute stream by a chain of timing events: each step's times are relative to the last step's end.

    A chain, since CUDA gives the time between two events as a float32: over a minute it would be off by microseconds.

    Attributes:
        known: an event and its time on this meter's clock: the end of the step read last, or what set the clock.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        super().__init__(stream)
        self.known = self._mark()

    def set_clock(self) -> None:
        """Set the clock by the host's; no step that was begun is left to be read."""
        self._free.append(self.known[0])
        self.known = self._mark()

    def _mark(self) -> tuple[torch.cuda.Event, float]:
        mark = self._take()
        mark.record(self._stream)
        mark.synchronize()
        return mark, time.perf_counter()

    def read(self) -> tuple[float, float]:
        begin, end = self._running.popleft()
        mark, marked_at = self.known
        began = marked_at + _seconds(mark, begin)
        ended = began + _seconds(begin, end)
        self._free += (begin, mark)
        self.known = end, ended
        return began, ended

    def time_of(self, event: CudaEvent) -> float:
        mark, marked_at = self.known
        return marked_at + _seconds(mark, event.raw)


class CudaCopyMeter(_EventPairs):
    """Measures a copy stream, relative to the end of the step that the compute stream's meter read last."""

    def __init__(self, stream: torch.cuda.Stream, reference: CudaMeter) -> None:
        super().__init__(stream)
        self._reference = reference

    def read(self) -> tuple[float, float]:
        begin, end = self._running.popleft()
        mark, marked_at = self._reference.known
        began = marked_at + _seconds(mark, begin)
        ended = began + _seconds(begin, end)
        self._free += (begin, end)
        return began, ended


def _seconds(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    """The time between two events that are done; negative if they are the other way round."""
    return begin.elapsed_time(end) * 1e-3


class CudaDevice(Device):
    """One GPU with four non-default streams.

    Raises:
        RuntimeError: torch's stream pool handed out the same stream twice.
    """

    def __init__(self, device: torch.device) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(self.torch_device)
        compute = CudaStream(self.torch_device)
        h2d, d2h, offload = (CudaStream(self.torch_device, compute) for _ in range(3))
        self._streams = [h2d, compute, d2h, offload]
        # NOTE: torch hands out streams from a pool of 32 in turn, so an old process can get one twice.
        handles = {stream.raw.cuda_stream for stream in self._streams}
        if len(handles) < 4 or torch.cuda.default_stream(self.torch_device).cuda_stream in handles:
            raise RuntimeError(f"the CUDA stream pool gave streams {sorted(handles)}: four different ones are needed")
        self.h2d, self.compute, self.d2h, self.offload = self._streams
        self._clock = self.meter = CudaMeter(compute.raw)
        self.copy_meters = CudaCopyMeter(h2d.raw, self._clock), CudaCopyMeter(d2h.raw, self._clock)
        self.offload_meter = CudaCopyMeter(offload.raw, self._clock)

    def event(self, *, timed: bool = False) -> CudaEvent:
        return CudaEvent(self.torch_device, timed)

    def host_buffer(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, pin_memory=True)

    def set_clock(self) -> None:
        self._clock.set_clock()

    def current(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._streams[1].raw)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def close(self) -> None:
        for stream in self._streams:
            stream.raw.synchronize()
