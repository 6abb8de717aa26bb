"""What the runner asks of a device: ordered streams, events between them, and buffers.

The words mean what they mean in CUDA: work on a stream runs in the order it was queued; an event recorded on a stream
is done when everything queued there before it is done; a stream that waits for an event holds back its later work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A mark in a stream. `record` starts a new generation; a wait binds to the latest one recorded by then."""

    def synchronize(self) -> None:
        """Block the calling thread until the latest recorded generation is done.

        Raises:
            Exception: whatever work on a stream of this device raised.
        """

    def is_done(self) -> bool:
        """Whether the latest recorded generation is done; does not wait."""


class Stream(Protocol):
    """An ordered queue of device work."""

    def run(self, work: Callable[[], object]) -> None:
        """Queue `work`: on CUDA it is called now and what it launches is queued, on the CPU a worker calls it later.

        To be called within `Device.current`.
        """

    def record(self, event: Event) -> None:
        """Queue the completion of a new generation of `event`."""

    def wait(self, event: Event) -> None:
        """Hold back what is queued after this until the latest recorded generation of `event` is done."""


class Meter(Protocol):
    """Measures when work ran on a stream, in seconds on the device's clock; see `Device.set_clock`."""

    def begin(self) -> None:
        """Called on the stream before the first work to measure."""

    def end(self) -> None:
        """Called on the stream after the last."""

    def read(self) -> tuple[float, float]:
        """Return begin and end in seconds, of the oldest pair not read yet.

        The work must be done; pairs are read in the order in which they ran.
        """


class StepMeter(Meter, Protocol):
    """Measures the compute stream."""

    def time_of(self, event: Any) -> float:
        """Return when the latest generation of a timed event of this device was done, on the clock of `read`.

        It must be done; on CUDA the time is measured from the step read last.
        """


class Device(ABC):
    """A place where steps run.

    Attributes:
        torch_device: where device tensors live.
        h2d, compute, d2h: the three streams. Nothing of a step runs anywhere else.
        offload: the stream of copies between the cache and host memory.
        meter: of the compute stream.
        copy_meters: of the h2d and d2h streams, used while steps are looked at closely. They measure from the step that
            `meter` read last, so a step is read from `meter` first.
        offload_meter: of the offload stream.
    """

    torch_device: torch.device
    h2d: Stream
    compute: Stream
    d2h: Stream
    offload: Stream
    meter: StepMeter
    copy_meters: tuple[Meter, Meter]
    offload_meter: Meter

    @abstractmethod
    def event(self, *, timed: bool = False) -> Event:
        """Return a new event; if `timed`, the compute stream's meter can tell when it was done."""

    @abstractmethod
    def host_buffer(self, *shape: int) -> torch.Tensor:
        """Return zeroed int32 host memory that an asynchronous copy may read or write (pinned on CUDA)."""

    def buffer(self, *shape: int) -> torch.Tensor:
        """Return zeroed int32 device memory."""
        return torch.zeros(shape, dtype=torch.int32, device=self.torch_device)

    @abstractmethod
    def set_clock(self) -> None:
        """Set the meters' clock to `time.perf_counter`; no step that was begun is left to be read."""

    def current(self) -> AbstractContextManager[object]:
        """Return a context in which what the calling thread queues runs on this device, on the compute stream."""
        return nullcontext()

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all that was queued so far is done, so that any stream may use what was built."""

    @abstractmethod
    def close(self) -> None:
        """Let queued work end and stop the streams. Safe to call twice."""
