"""Tasks of maintenance, as an API process has them done by the engine process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future

from .. import errors
from ..errors import TwostrokeError
from .wire import Done, Failed, Maintain, Message, Task


class RemoteTasks:
    """Numbers the tasks, and hands over what came of them. They may overtake one another: one drains, another resumes.

    Args:
        send: sends a message to the engine process.
    """

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._next_number = itertools.count()
        self._open: dict[int, Future[int]] = {}

    def begin(self, task: Task) -> Future[int]:
        """Have a task done; the future gets the version of the weights, or the error of `Engine`'s method.

        Whoever no longer waits for it does not undo it.

        Raises:
            EngineDead, EngineClosed: the engine has ended; also raised by the future.
        """
        number, outcome = next(self._next_number), Future[int]()
        outcome.set_running_or_notify_cancel()
        self._open[number] = outcome
        try:
            self._send(Maintain(number, task))
        except BaseException:
            self._open.pop(number, None)
            raise
        return outcome

    def take(self, answer: Done | Failed) -> None:
        outcome = self._open.pop(answer.number)
        if isinstance(answer, Done):
            outcome.set_result(answer.weight_version)
        else:
            outcome.set_exception(_error(answer))

    def end(self, reason: Exception) -> None:
        """The engine has ended: all that wait get the reason."""
        while self._open:
            self._open.popitem()[1].set_exception(reason)


def _error(failed: Failed) -> TwostrokeError:
    kind = getattr(errors, failed.kind, None)
    if isinstance(kind, type) and issubclass(kind, TwostrokeError):
        return kind(failed.text)
    return TwostrokeError(f"{failed.kind}: {failed.text}")
