"""The gate: who keeps the scheduler from planning, and who waits for the quiet that follows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable


class Gate:
    """Holds, by name. Each keeps out everything, or, if it drains, only what has not begun.

    open      no hold
    draining  what has begun goes on to its end, nothing else begins
    shut      nothing is planned; what runs keeps its row and its blocks
    """

    def __init__(self) -> None:
        self._drains: dict[str, bool] = {}
        self._calls: dict[str, list[Callable[[], None]]] = defaultdict(list)

    @property
    def is_open(self) -> bool:
        return not self._drains

    @property
    def is_shut(self) -> bool:
        return not all(self._drains.values())

    def is_awaited(self, *, begun: bool) -> bool:
        """Whether somebody waits for quiet, and not for what has begun while that is kept out; see `settle`."""
        return any(not (self._drains[name] and begun) for name in self._calls)

    def hold(self, name: str, *, drain: bool, on_quiet: Callable[[], None]) -> None:
        """Hold, or change a hold; `on_quiet` is called once it has come about, or is released."""
        self._drains[name] = drain
        self._calls[name].append(on_quiet)

    def release(self, name: str) -> None:
        """Take back a hold, if there is one; who waits for it waits no longer."""
        self._drains.pop(name, None)
        self._call(name)

    def settle(self, *, in_flight: bool, begun: bool) -> None:
        """Tell those who wait, given whether steps are in flight, and whether anything that has begun is left."""
        for name in [name for name, drains in self._drains.items() if not in_flight and not (drains and begun)]:
            self._call(name)

    def _call(self, name: str) -> None:
        for call in self._calls.pop(name, ()):
            call()
