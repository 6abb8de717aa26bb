"""The gate: who keeps the scheduler from planning, who waits for the quiet that follows, and who stands outside."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from ..request import Sample
from .queue import Queue


class Gate:
    """Holds, by name, before the queue. Each keeps out everything, or, if it drains, only what has not begun.

    open      no hold
    draining  what has begun goes on to its end, nothing else begins
    shut      nothing is planned; what runs keeps its row and its blocks

    While it is not open, samples that have not begun stand outside, and not in the queue.

    Args:
        queue: behind the gate.
        has_begun: whether a sample that waits, or another one of its request, has run already.
    """

    def __init__(self, queue: Queue, has_begun: Callable[[Sample], bool]) -> None:
        self._queue = queue
        self._has_begun = has_begun
        self._outside: Queue | None = None
        self._drains: dict[str, bool] = {}
        self._calls: dict[str, list[Callable[[], None]]] = defaultdict(list)

    @property
    def is_open(self) -> bool:
        return not self._drains

    @property
    def is_shut(self) -> bool:
        return not all(self._drains.values())

    def holds(self, name: str) -> bool:
        """Whether there is a hold of that name."""
        return name in self._drains

    @property
    def outside(self) -> Iterable[Sample]:
        """Samples that wait, but not in the queue."""
        return self._outside or ()

    def __len__(self) -> int:
        """How many samples stand outside."""
        return len(self._outside or ())

    def push(self, sample: Sample) -> None:
        """Let a sample wait that was not in the queue so far."""
        self._place_of(sample).push(sample)

    def count_out(self, sample: Sample) -> None:
        """Note that a waiting sample has ended."""
        self._place_of(sample).count_out()

    def _place_of(self, sample: Sample) -> Queue:
        """Where a sample stands that waits."""
        return self._queue if self._outside is None or self._has_begun(sample) else self._outside

    def is_awaited(self, *, begun: bool) -> bool:
        """Whether somebody waits for quiet, and not for what has begun while that is kept out; see `settle`."""
        return any(not (self._drains[name] and begun) for name in self._calls)

    def hold(self, name: str, *, drain: bool, on_quiet: Callable[[], None]) -> None:
        """Hold, or change a hold; `on_quiet` is called once it has come about, or is released."""
        self._drains[name] = drain
        self._calls[name].append(on_quiet)
        if self._outside is None:
            self._outside = self._queue.part(self._has_begun)

    def release(self, name: str) -> None:
        """Take back a hold, if there is one; who waits for it waits no longer."""
        self._drains.pop(name, None)
        self._call(name)
        if self.is_open and self._outside is not None:
            for sample in self._outside:
                self._queue.push(sample)
            self._outside = None

    def settle(self, *, in_flight: bool, begun: bool) -> None:
        """Tell those who wait, given whether steps are in flight, and whether anything that has begun is left."""
        for name in [name for name, drains in self._drains.items() if not in_flight and not (drains and begun)]:
            self._call(name)

    def _call(self, name: str) -> None:
        for call in self._calls.pop(name, ()):
            call()
