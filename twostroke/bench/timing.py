"""Timing of device work by CUDA events."""

from __future__ import annotations

from collections.abc import Callable

import torch


def seconds_each(work: Callable[[], object], repetitions: int) -> list[float]:
    """Run `work` on the current stream so often; return the seconds that each run took on the device."""
    times = []
    for _ in range(repetitions):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return times


def graph_seconds(work: Callable[[], object], repetitions: int = 15) -> float:
    """Capture `work` in a CUDA graph, after one run that compiles; return the median time of its replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return sorted(seconds_each(graph.replay, repetitions))[repetitions // 2]
