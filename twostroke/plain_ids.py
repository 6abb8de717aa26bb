"""Lists of plain Python ints as arrays, many at once.

`generate` has all token ids of a call go through here while the device waits. `marshal` is the fastest way to bring
them together, and tells of each object what it is: `struct` and numpy would take True for a number, and numpy 2.0, too.
"""

from __future__ import annotations

import itertools
import marshal
from collections.abc import Sequence
from typing import Any

import numpy as np

_VERSION = 2
"""Of marshal's format: in later ones an object that comes again is only referred to."""

_OBJECT = np.dtype([("code", "u1"), ("value", "<i4")])
"""An int of 32 bits, or the head of a list or a tuple with its length."""

_INT = ord("i")


def plain_ids(ids: Sequence[Any] | np.ndarray) -> np.ndarray | None:
    """Integers as a new array, int32; None if they are not all plain Python ones of that range."""
    found = plain_lists([ids if type(ids) in (list, tuple) else list(ids)])
    return None if found is None else found[0]


def plain_lists(lists: Sequence[Any]) -> list[np.ndarray] | None:
    """Lists and tuples of such integers as arrays, which are parts of a new one; None if any is something else."""
    if not {list, tuple}.issuperset(map(type, lists)) or not all(map(_may_be_plain, lists)):
        return None
    try:
        data = b"".join([marshal.dumps(ids, _VERSION) for ids in lists])  # faster than all in one call
    except ValueError:  # it does not know some object
        return None
    heads = list(itertools.accumulate((1 + len(ids) for ids in lists), initial=0))
    if len(data) != heads[-1] * _OBJECT.itemsize:
        return None
    objects = np.frombuffer(data, _OBJECT)
    # NOTE: up to the first object of another kind they lie as if all were ints, so its code is seen, whatever follows.
    if not np.array_equal(np.flatnonzero(objects["code"] != _INT), heads[:-1]):
        return None
    values = objects["value"].copy()
    return [values[head + 1 : end] for head, end in itertools.pairwise(heads)]


def _may_be_plain(ids: Sequence[Any]) -> bool:
    """Whether it begins and ends with an int: chats and texts, which may be long, are not to be written out in vain."""
    return not ids or (type(ids[0]) is int and type(ids[-1]) is int)
