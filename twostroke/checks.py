"""What values are checked with: each check names the parameter and the value that it refuses."""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Sequence

import numpy as np

from .errors import InvalidRequest, shown
from .plain_ids import plain_ids


def is_listed(value: object) -> bool:
    """Whether `value` is a sequence or an array of dimensions. Text and bytes are none here, though Python says so."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def require_utf8(name: str, text: str) -> None:
    """Raise `InvalidRequest` that names the parameter and the value for a string with a lone surrogate."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{name}={shown(text)} holds a lone surrogate at position {error.start}, which is in no text"
        ) from error


def require_number(name: str, value: object) -> float:
    """Return `value` as a float, or raise `InvalidRequest` that names the parameter and the value."""
    # NOTE: the plain types first, since a look into the abstract ones takes microseconds.
    if type(value) in (float, int) or (isinstance(value, numbers.Real) and not isinstance(value, bool)):
        with contextlib.suppress(OverflowError):  # an integer beyond all floats
            number = float(value)  # type: ignore[arg-type]
            if math.isfinite(number):
                return number
    raise InvalidRequest(f"{name}={shown(value)} must be a finite number")


def require_within(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> float:
    """Return `value` as a float in [low, high], or in (low, high]; raise `InvalidRequest` for any other."""
    number = require_number(name, value)
    if number < low or number > high or (open_low and number == low):
        interval = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if high == math.inf else ']'}"
        raise InvalidRequest(f"{name}={shown(value)} must be in {interval}")
    return number


def require_int(name: str, value: object, *, low: int | None = None, high: int | None = None) -> int:
    """Return `value` as an int, or raise `InvalidRequest` that names the parameter, the value and the range."""
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, numbers.Integral)):
        raise InvalidRequest(f"{name}={shown(value)} must be an integer")
    number = int(value)
    if low is not None and number < low:
        raise InvalidRequest(f"{name}={shown(value)} must be at least {low}")
    if high is not None and number > high:
        raise InvalidRequest(f"{name}={shown(value)} must be at most {high}")
    return number


def require_token_ids(name: str, ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """Return `ids` as a new int32 array, or raise `InvalidRequest` that names the first bad id and its place."""
    if not is_listed(ids):
        raise InvalidRequest(f"{name}={shown(ids)} must be a list of token ids")
    array = _as_integers(name, ids)
    if not len(array) or (array.min() >= 0 and array.max() < vocab_size):
        return array.astype(np.int32)
    place = int(np.flatnonzero((array < 0) | (array >= vocab_size))[0])
    raise InvalidRequest(f"{name}[{place}]={shown(int(array[place]))} must be a token id in [0, {vocab_size})")


def _as_integers(name: str, ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return `ids` as an array of integers, or raise `InvalidRequest` for the first that is none."""
    # NOTE: a masked array is looked at one by one: what is masked there is no number. Of other kinds of arrays only the
    # plain part is taken, since the loop cannot do with what a user's kind makes of an operation.
    if isinstance(ids, np.ndarray) and not isinstance(ids, np.ma.MaskedArray):
        ids = np.asarray(ids)
        if ids.dtype.kind in "iu" and ids.ndim == 1:
            return ids
    if (plain := plain_ids(ids)) is not None:
        return plain
    # NOTE: checked one by one, since numpy would turn [1, True] or [1, 2.0] into numbers without a word.
    tokens = [require_int(f"{name}[{place}]", token) for place, token in enumerate(ids)]
    try:
        return np.array(tokens, np.int64)
    except OverflowError:  # some are in no vocabulary
        return np.array(tokens, object)
