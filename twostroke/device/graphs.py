"""CUDA graphs of steps."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch


class Graphs:
    """Captured work by key, all in one memory pool: two graphs never run at once, so they may share their memory.

    What outlives a replay (slot buffers, batch state, cache) was allocated before, outside the pool.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def capture(self, key: Hashable, work: Callable[[], object]) -> None:
        """Capture `work` under `key`, without running it; it has run before, since first calls compile and allocate.

        The device goes on with what was queued before: unlike `torch.cuda.graph`, this waits for nothing.
        """
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        # NOTE: a collection could free what CUDA forbids to free within a capture.
        gc.disable()
        try:
            with torch.cuda.stream(self._stream):
                # NOTE: thread-local, since other threads (a watchdog, another engine) may call CUDA meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        self._graphs[key] = graph

    def replay(self, key: Hashable) -> None:
        """Launch the graph of `key` on the current stream."""
        self._graphs[key].replay()

    def drop(self, key: Hashable) -> None:
        """Let go of the graph of `key`, which no step in flight runs."""
        del self._graphs[key]

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def __len__(self) -> int:
        return len(self._graphs)


class Recurring:
    """Decides which work is captured while steps run: what is used the second time.

    The first use runs eagerly, which compiles kernels; the second is worth a capture; later ones replay. Of what was
    used, the `most` used last are remembered, and the graphs of the others dropped.

    Args:
        graphs: where they are captured.
        most: more than there can be steps in flight, so that what is dropped runs no more.
    """

    def __init__(self, graphs: Graphs, most: int) -> None:
        self._graphs = graphs
        self._most = most
        self._used: OrderedDict[Hashable, None] = OrderedDict()

    def due(self, key: Hashable) -> bool:
        """Note a use of `key`; return whether it is to be captured now."""
        again = key in self._used
        self._used[key] = None
        self._used.move_to_end(key)
        if len(self._used) > self._most:
            oldest, _ = self._used.popitem(last=False)
            if oldest in self._graphs:
                self._graphs.drop(oldest)
        return again and key not in self._graphs
