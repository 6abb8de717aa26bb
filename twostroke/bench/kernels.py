"""Where the device's time goes, kernel by kernel, in a window of steady steps."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from ..engine import Engine
    from ..request import SamplingParams
    from ..text.handle import Handle

WINDOW_STEPS = 100
POLL_SECONDS = 1e-3


class Interval(NamedTuple):
    """One run of a kernel (or a copy) on the device, microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class KernelTimes:
    """Kernels of steady steps, as a profiler saw them. It slows them a little, so their sum exceeds a step's time.

    Attributes:
        active: share of the window in which a kernel or copy ran, 0 to 1.
        us: microseconds per step by kernel. runs: runs per step.
    """

    active: float
    us: dict[str, float]
    runs: dict[str, float]

    @classmethod
    def of(cls, intervals: Iterable[Interval], steps: int) -> KernelTimes:
        """Sum up the intervals of `steps` steps."""
        ordered = sorted(intervals, key=lambda interval: interval.start)
        us: dict[str, float] = defaultdict(float)
        runs: dict[str, float] = defaultdict(float)
        for name, start, end in ordered:
            us[name] += (end - start) / steps
            runs[name] += 1 / steps
        return cls(_covered(ordered), dict(sorted(us.items(), key=lambda item: -item[1])), dict(runs))


def _covered(ordered: Sequence[Interval]) -> float:
    """The share of the time from the first start to the last end that some interval covers; ordered by start."""
    if not ordered:
        return 0.0
    covered, reached = 0.0, ordered[0].start
    for _, start, end in ordered:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered / (reached - ordered[0].start)


def watch_kernels(
    engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams], after_steps: int
) -> KernelTimes:
    """Answer `prompts` as far as it takes to profile `WINDOW_STEPS` steps, from step `after_steps` on; then cancel.

    Raises:
        RuntimeError: the work ended before the window did.
    """
    with profile(activities=[ProfilerActivity.CUDA]):  # its first start takes seconds, in which the work would go on
        torch.cuda.synchronize()
    first = engine.stats().steps + after_steps
    handles = [engine.submit(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    try:
        _wait_for(engine, handles, first)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            began = engine.stats().steps
            _wait_for(engine, handles, began + WINDOW_STEPS)
            steps = engine.stats().steps - began
    finally:
        for handle in handles:
            handle.cancel()
    events = profiler.events() or ()
    on_device = (event for event in events if event.device_type == DeviceType.CUDA)
    return KernelTimes.of((Interval(e.name, e.time_range.start, e.time_range.end) for e in on_device), steps)


def _wait_for(engine: Engine, handles: Sequence[Handle], step: int) -> None:
    while engine.stats().steps < step:
        if all(handle.done for handle in handles):
            raise RuntimeError(f"the work ended at step {engine.stats().steps}, before step {step}")
        time.sleep(POLL_SECONDS)
    torch.cuda.synchronize()
