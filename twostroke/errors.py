"""The errors that twostroke raises. Every one of them is a `TwostrokeError`."""

import copy
import reprlib
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

E = TypeVar("E", bound=BaseException)
Item = TypeVar("Item")
Made = TypeVar("Made")

_REPR = reprlib.Repr()
_REPR.maxlist = _REPR.maxtuple = 40
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 500

_MOST_TOLD = 2000
"""Characters of an error's message."""


class TwostrokeError(Exception):
    """Base class of all errors raised on purpose by twostroke."""


class InvalidRequest(TwostrokeError, ValueError):
    """A prompt or a sampling parameter was refused at submit; the message names it and its value."""


class CannotFollow(TwostrokeError, RuntimeError):
    """A text was begun that its grammar cannot be followed through; the message names the parameter and the reason."""


class QueueFull(TwostrokeError, RuntimeError):
    """As many requests wait as may: this one was not taken, and may be tried again later."""


class InvalidConfig(TwostrokeError, ValueError):
    """An argument of the engine was refused; the message names it and its value."""


class InvalidWeights(TwostrokeError, ValueError):
    """New weights were refused before anything was written; the message names the tensor."""


class NotEnoughMemory(TwostrokeError, RuntimeError):
    """Memory that was given back is not there any more; the message has the numbers."""


class EngineAsleep(TwostrokeError, RuntimeError):
    """The call needs an engine that is awake: its weights are put away."""


class BatchStopped(TwostrokeError, RuntimeError):
    """A batch ended before its last request; what it has done is kept, and the same command goes on from there."""


class UnsupportedModel(TwostrokeError, ValueError):
    """The model needs something that the chosen implementation does not have; the message names it."""


class EngineClosed(TwostrokeError, RuntimeError):
    """The engine was closed before, or while, the call ran."""


class EngineDead(TwostrokeError, RuntimeError):
    """The loop or one of its workers failed; `__cause__` is the first failure.

    Every waiting caller receives it, and every later call fails with it at once.
    """


def fresh(error: E) -> E:
    """Return a copy of an error that several callers get: one instance would collect the frames of all its raises."""
    again = copy.copy(error)
    again.__cause__ = error.__cause__
    return again


def clear_frames(error: BaseException) -> None:
    """Clear the frames of an error and of those it comes from: callers keep it, and tensors would stay with them."""
    cleared: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and not any(cause is known for known in cleared):
        traceback.clear_frames(cause.__traceback__)
        cleared.append(cause)
        cause = cause.__cause__


def each_of(name: str, items: Sequence[Item], act: Callable[[Item], Made]) -> list[Made]:
    """Return what `act` makes of each item. If it refuses one of several, the message says which."""
    made: list[Made] = []
    for item in items:
        try:
            made.append(act(item))
        except InvalidRequest as error:
            if len(items) == 1:
                raise
            raise InvalidRequest(f"{error}, in {name}[{len(made)}]") from error
    return made


def counted(number: int, noun: str, nouns: str = "") -> str:
    """Return a number with its noun for a message; `nouns` are several, where that is not the noun and an s."""
    return f"{number} {noun if number == 1 else nouns or f'{noun}s'}"


def shown(value: object) -> str:
    """Return `repr(value)` for a message, cut short if it is long. Never raises, whatever a caller passed in."""
    try:
        return _REPR.repr(value)
    except Exception as error:  # such as an integer of more than 4,300 digits
        return f"<{type(value).__name__}: {error}>"


def told(error: BaseException) -> str:
    """Return an error's type and message, cut short if that is long. Never raises, whoever wrote the error's class."""
    try:
        message = str(error)
    except BaseException as another:
        message = f"its message cannot be read: {type(another).__name__}"
    cut = message if len(message) <= _MOST_TOLD else f"{message[:_MOST_TOLD]}..."
    return f"{type(error).__name__}: {cut}"
