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
        cached_blocks: those of them whose content the prefix cache still knows.
        prefix_hit_tokens: tokens that admissions found in the prefix cache, since the start.
        preemptions: since the start.
        steps: planned since the start.
    """

    waiting: int
    running: int
    free_blocks: int
    cached_blocks: int
    prefix_hit_tokens: int
    preemptions: int
    steps: int
