"""An engine with a process of its own, as the process sees it that started it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .attached_engine import AttachedEngine
from .engine_child import EngineChild, Target, run_engine_process


class RemoteEngine(AttachedEngine):
    """A front to an engine process that is started for it, and ends with it.

    Args:
        arguments: those of `Engine`.
        on_end: called once, by a thread of this object, if the engine process ends without `close`.
        target: what the process runs.

    Raises:
        InvalidConfig, UnsupportedModel, ...: the engine could not start; see `Engine`.
        EngineDead: its process ended before it was ready.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        *,
        on_end: Callable[[], None] = lambda: None,
        target: Target = run_engine_process,
    ) -> None:
        self._child = child = EngineChild(arguments, on_end=on_end, target=target)
        try:
            super().__init__(child.attach(), child.ready, arguments.get("seed"), on_end=child.hang_up)
        except BaseException:
            child.close()
            raise

    @property
    def alive(self) -> bool:
        return self._child.alive and super().alive

    @property
    def exitcode(self) -> int | None:
        """That of the engine process; None before its end."""
        return self._child.exitcode

    def close(self) -> None:
        """Cancel what is running, hand over every output, and end the process. Safe to call twice."""
        super().close()
        self._child.close()

    def _death(self) -> Exception:
        return self._child.death()
