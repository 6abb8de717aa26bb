"""The life of an engine: its loop and its delivery, how they fail, and how they end."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .build import Parts
from .calls import Calls
from .errors import EngineClosed, EngineDead, TwostrokeError, clear_frames, told
from .inbox import Command, Inbox
from .loop import AsyncLoop, SyncLoop
from .watched import Watched

LOOPS = {"async": AsyncLoop, "sync": SyncLoop}

_STARTED: weakref.WeakSet[Lifecycle] = weakref.WeakSet()


class Lifecycle:
    """Runs a loop and a delivery, each in a thread of its own, until it is closed or something fails.

        running --close--> closed    every request gets its final output; those cut short, with reason `cancelled`
            \\-----fail---> dead      every request raises EngineDead

    It does not know the `Engine` in front of it, so one that was forgotten can be collected, and closed by that. In
    each case the memory of weights and cache is free then, whoever still holds the engine.

    Args:
        make_delivery: makes what takes the loop's output; called with whom to tell of a failure there.
    """

    def __init__(
        self, parts: Parts, loop: str, make_delivery: Callable[[Callable[[BaseException], None]], Any]
    ) -> None:
        self.inbox = Inbox()
        self.calls = Calls(self.inbox)
        self.delivery = make_delivery(self._fail)
        watched = Watched(parts.scheduler, self.delivery.put, parts.runner.activity)
        self._loop = LOOPS[loop](watched, parts.runner, parts.slots, self.inbox, watched.deliver)
        parts.scheduler.on_late_masks(self._leave)
        self._parts = parts
        self._thread = threading.Thread(target=self._run, name="twostroke-loop", daemon=True)
        self._thread.start()
        _STARTED.add(self)

    def close(self) -> None:
        """End the loop; wait until every output is handed over, all threads have ended, and memory is free."""
        self._end(EngineClosed("the engine is closed"))
        self._thread.join()

    def close_forgotten(self) -> None:
        """Close for want of an owner: when that was collected, or at exit."""
        if threading.current_thread() is threading.main_thread():
            self.close()
        else:  # the collector runs in any thread, those of the engine too, where to wait for the end would prevent it
            self._end(EngineClosed("the engine was collected"))

    def end_in_child(self) -> None:
        """End in a forked child, where no thread of the engine is: nobody may wait for one."""
        reason = EngineClosed("the engine runs in the process that made it, and not in a forked child")
        self.inbox.end_in_child(reason)
        self.delivery.end_in_child(reason)
        self.calls.end_in_child(reason)

    def _run(self) -> None:
        try:
            with torch.inference_mode(), self._parts.device.current():
                self._loop.run()
        except BaseException as error:
            self._fail(error)
            clear_frames(error)
        self.calls.end(EngineClosed("the engine is closed"))
        self._parts.constraints.close()
        self.delivery.close()
        with contextlib.suppress(Exception):  # a device that failed fails again here; callers have its error already
            self._parts.device.close()
        self._parts.free()
        del self._loop, self._parts

    def _fail(self, error: BaseException) -> None:
        """Every waiting caller gets the error now, later ones at once; called by either thread."""
        dead = EngineDead(f"the engine failed: {told(error)}")
        dead.__cause__ = error
        self._end(dead)
        self.delivery.fail(dead)
        self.calls.end(dead)

    def _leave(self, command: Command) -> None:
        """Leave the loop a command; after its end there is nothing left to do."""
        with contextlib.suppress(TwostrokeError):
            self.inbox.put(command)

    def _end(self, reason: EngineClosed | EngineDead) -> None:
        self.inbox.close(reason, last=lambda scheduler: scheduler.abandon())


def _end_in_child() -> None:
    for life in tuple(_STARTED):
        life.end_in_child()


if hasattr(os, "register_at_fork"):  # where there is no fork, there is none to see to
    os.register_at_fork(after_in_child=_end_in_child)
