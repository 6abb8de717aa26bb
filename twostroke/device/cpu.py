"""Streams and events on the CPU: a stream is a worker thread, an event a counter with a condition.

This is not a mock: the asynchronous loop runs on it in production on machines without a GPU, and every race that the
CUDA streams could have can be had, and tested, here.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from .streams import Device, Event

_STOP = None


class CpuEvent:
    """Counts generations: `begun` when one is recorded, `done` when the stream gets there."""

    def __init__(self, failure: Failure, strict: bool) -> None:
        self._changed = threading.Condition()
        self._begun = 0
        self._done = 0
        self.done_at = 0.0
        self._failure = failure
        self._strict = strict

    def begin(self) -> int:
        """Start a new generation and return it."""
        with self._changed:
            self._begun += 1
            return self._begun

    def latest(self) -> int:
        """Return the latest generation begun; 0 if there is none, which is an error in strict mode."""
        if self._strict and self._begun == 0:
            raise RuntimeError("wait for an event that was never recorded")
        return self._begun

    def complete(self, generation: int) -> None:
        with self._changed:
            self.done_at = time.perf_counter()
            self._done = max(self._done, generation)
            self._changed.notify_all()

    def wait_until(self, generation: int) -> None:
        """Block until `generation` is done; raise what the device failed with, if it does."""
        with self._changed:
            while self._done < generation:
                self._failure.check()
                self._changed.wait()

    def wake(self) -> None:
        """Let waiting threads look at the failure."""
        with self._changed:
            self._changed.notify_all()

    def synchronize(self) -> None:
        self.wait_until(self.latest())
        self._failure.check()

    def is_done(self) -> bool:
        return self._done >= self.latest()


class Failure:
    """The first exception raised by any stream of a device. Once set, all waits raise it and no more work runs."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.events: list[CpuEvent] = []

    def set(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
        for event in self.events:
            event.wake()

    def check(self) -> None:
        if self.error is not None:
            raise self.error


class CpuStream:
    """An ordered worker thread."""

    def __init__(self, name: str, failure: Failure) -> None:
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._failure = failure
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=f"twostroke-{name}", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], object]) -> None:
        if self._closed:
            raise RuntimeError("this stream is closed: nothing would ever run what is queued on it")
        self._work.put(work)

    def record(self, event: Event) -> None:
        assert isinstance(event, CpuEvent)
        generation = event.begin()
        self.run(lambda: event.complete(generation))

    def wait(self, event: Event) -> None:
        assert isinstance(event, CpuEvent)
        generation = event.latest()
        self.run(lambda: event.wait_until(generation))

    def close(self) -> None:
        self._closed = True
        self._work.put(_STOP)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @torch.inference_mode()
    def _serve(self) -> None:
        while (work := self._work.get()) is not _STOP:
            if self._failure.error is not None:
                continue
            try:
                work()
            except BaseException as error:  # a dead worker must reach every waiter, whatever killed it
                self._failure.set(error)


class CpuMeter:
    """Time stamps taken by a stream's worker."""

    def __init__(self) -> None:
        self._spans: deque[tuple[float, float]] = deque()
        self._began = 0.0

    def begin(self) -> None:
        self._began = time.perf_counter()

    def end(self) -> None:
        self._spans.append((self._began, time.perf_counter()))

    def read(self) -> tuple[float, float]:
        return self._spans.popleft()


class CpuStepMeter(CpuMeter):
    """Measures the compute stream, and tells when an event was done."""

    def time_of(self, event: CpuEvent) -> float:
        return event.done_at


class CpuDevice(Device):
    """Four worker threads over host memory. `strict` makes a wait for an event never recorded an error."""

    def __init__(self, *, strict: bool = False) -> None:
        self.torch_device = torch.device("cpu")
        self._failure = Failure()
        self._strict = strict
        self._streams = [CpuStream(name, self._failure) for name in ("h2d", "compute", "d2h", "offload")]
        self.h2d, self.compute, self.d2h, self.offload = self._streams
        self.meter = CpuStepMeter()
        self.copy_meters = CpuMeter(), CpuMeter()
        self.offload_meter = CpuMeter()

    def event(self, *, timed: bool = False) -> CpuEvent:
        event = CpuEvent(self._failure, self._strict)
        self._failure.events.append(event)
        return event

    def host_buffer(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    def set_clock(self) -> None:
        pass  # the meters read the host's own

    def synchronize(self) -> None:
        pass  # what is built on the CPU is built when the call returns

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        self._streams = []
