"""The scheduler's counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts at one moment.

    Attributes:
        waiting: samples without a place, preempted ones included.
        running: samples that take part in steps.
        free_blocks: free blocks of each cache group, promised ones included.
        preemptions: since the start.
        steps: planned since the start.
    """

    waiting: int
    running: int
    free_blocks: int
    preemptions: int
    steps: int
