"""CUDA graphs of decode steps."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Graphs:
    """Captured work by key, all in one memory pool: two graphs never run at once, so they may share their memory.

    What outlives a replay (slot buffers, batch state, cache) was allocated before, outside the pool.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[object, torch.cuda.CUDAGraph] = {}

    def capture(self, key: object, work: Callable[[], object]) -> None:
        """Run `work` once (first calls compile and allocate), then capture it under `key`."""
        with torch.cuda.stream(self._stream):
            work()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # NOTE: thread-local, since other threads (a watchdog, another engine) may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        self._graphs[key] = graph

    def replay(self, key: object) -> None:
        """Launch the graph of `key` on the current stream."""
        self._graphs[key].replay()

    def __contains__(self, key: object) -> bool:
        return key in self._graphs

    def __len__(self) -> int:
        return len(self._graphs)
