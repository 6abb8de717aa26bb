"""The scheduler's counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts at one moment.

    Attributes:
        waiting: samples without a place, preempted ones included.
        running: samples that take part in steps.
        free_blocks: free blocks, promised ones included.
        cached_blocks: those of them whose content the prefix cache still knows.
        prefix_hit_tokens: tokens that admissions found in the prefix cache, since the start.
        preemptions: since the start.
        steps: planned since the start.
        host_blocks: blocks that the host tier holds.
        offloaded_blocks, returned_blocks: copied to the host and back, since the start.
        host_hit_tokens: those of `prefix_hit_tokens` that came back from the host.
        block_save_seconds, block_load_seconds, block_compute_seconds: what is known of how long it takes to copy a
            block to the host, back, and to compute it; 0 while nothing is, or without a host tier.
    """

    waiting: int
    running: int
    free_blocks: int
    cached_blocks: int
    prefix_hit_tokens: int
    preemptions: int
    steps: int
    host_blocks: int = 0
    offloaded_blocks: int = 0
    returned_blocks: int = 0
    host_hit_tokens: int = 0
    block_save_seconds: float = 0.0
    block_load_seconds: float = 0.0
    block_compute_seconds: float = 0.0
