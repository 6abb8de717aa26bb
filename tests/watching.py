"""What tests of an engine's life share: requests that start together, acts at an exact turn of the loop, quiet ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from twostroke import Engine, Handle, SamplingParams

PATIENCE = 20.0
"""Seconds after which a wait that should be short counts as a hang."""


def make_handles(engine: Engine, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> list[Handle]:
    """Make requests for `engine._start`, which starts them between the same two steps: every run has the same steps."""
    return engine._make_handles(prompts, params)


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Wait for what another thread is about to do."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.001)


def quiet(engine: Engine) -> None:
    """Wait until nothing runs, and every block and row came back.

    All of it is waited for: the loop is on its way, gives back blocks just after their row, and then tells delivery.
    """
    scheduler, usable = engine._parts.scheduler, engine.limits.usable_blocks

    def came_back() -> bool:
        stats = scheduler.stats()
        rows = scheduler.rows
        counts = stats.waiting, stats.running, stats.free_blocks, len(rows.free), len(engine._life.delivery._handles)
        return counts == (0, 0, usable, len(rows.held), 0)

    wait_until(came_back)
    assert not scheduler.batch.row_of


class Turns:
    """Lets commands reach the loop at exact turns, counted from the one that takes the next submit (turn 0)."""

    def __init__(self, engine: Engine) -> None:
        self._take = engine._life.inbox.take
        self._turn: int | None = None
        self._commands: dict[int, Callable[[Any], Any]] = {}
        engine._life.inbox.take = self._take_and_add  # type: ignore[method-assign]
        passed = threading.Event()
        engine._life.inbox.put(lambda scheduler: passed.set())  # the loop may still wait in the method proper
        assert passed.wait(PATIENCE)

    def at(self, turn: int, *commands: Callable[[Any], Any]) -> None:
        """Have `commands` taken at `turn` and the turns after it; those of an earlier call are dropped."""
        self._commands = dict(enumerate(commands, turn))
        self._turn = None

    def _take_and_add(self, *, block: bool) -> list[Callable[[Any], Any]]:
        commands = self._take(block=block)
        if commands or self._turn is not None:
            self._turn = 0 if self._turn is None else self._turn + 1
            if (command := self._commands.pop(self._turn, None)) is not None:
                commands.append(command)
        return commands
