"""Tasks of maintenance in the engine process."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..engine import Engine
from .wire import Done, Failed, Maintain, Pause, ResetPrefixCache, Resume, Sleep, Task, UpdateWeights, Wake


def begin(engine: Engine, message: Maintain, answer: Callable[[Done | Failed], None]) -> None:
    """Do a task in a thread of its own, since it may take long, and what comes after it must not wait.

    It is done to its end, also when whoever asked for it is gone.
    """

    def work() -> None:
        try:
            answer(Done(message.number, _do(engine, message.task)))
        except Exception as error:
            answer(Failed(message.number, type(error).__name__, str(error)))

    threading.Thread(target=work, name="twostroke-task", daemon=True).start()


def _do(engine: Engine, task: Task) -> int:
    """Do a task; return the version of the weights."""
    match task:
        case Pause(mode):
            engine.pause(mode)
        case Resume():
            engine.resume()
        case Sleep():
            engine.sleep()
        case Wake():
            engine.wake()
        case ResetPrefixCache():
            engine.reset_prefix_cache()
        case UpdateWeights(weights, recompute, partial):
            return engine.update_weights(weights, recompute=recompute, partial=partial)
    return engine.weight_version
