"""The queue: the samples that wait for a row."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from ..request import Sample, SampleState

_SPARE = 64
"""Ended samples that the heap may hold in any case."""


class Queue:
    """A heap of waiting samples, by rank and arrival. Who waits costs nothing until it comes to the front.

    A sample that ends while it waits is only counted out: it stays in the heap, unseen, until it comes to the front, or
    until more than half of the heap is such.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sample]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sample]:
        """All, in their order; for looks at the whole, since it sorts."""
        return (sample for _, _, sample in sorted(self._heap) if sample.state is not SampleState.FINISHED)

    def push(self, sample: Sample) -> None:
        """Let `sample` wait."""
        heapq.heappush(self._heap, (sample.rank, sample.order, sample))
        self._count += 1

    @property
    def head(self) -> Sample | None:
        """Who goes next; None if nobody waits."""
        while self._heap and self._heap[0][2].state is SampleState.FINISHED:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> None:
        """Let the head go."""
        heapq.heappop(self._heap)
        self._count -= 1

    def part(self, stays: Callable[[Sample], bool]) -> Queue:
        """Move those that do not stay to a queue of their own."""
        parted = Queue()
        everybody = list(self)
        self._heap, self._count = [], 0
        for sample in everybody:
            (self if stays(sample) else parted).push(sample)
        return parted

    def count_out(self) -> None:
        """Note that a waiting sample has ended."""
        self._count -= 1
        if len(self._heap) > 2 * self._count + _SPARE:
            self._heap = [entry for entry in self._heap if entry[2].state is not SampleState.FINISHED]
            heapq.heapify(self._heap)
