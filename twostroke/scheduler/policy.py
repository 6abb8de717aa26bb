"""What the scheduler asks of a policy, and the policies by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..request import Sample
from .policies.first_come import FirstCome
from .policies.priority import Priority
from .policies.shortest_prompt import ShortestPrompt

PATIENCE = 30.0
"""Seconds, where nobody says how many."""


class Policy(Protocol):
    """In which order samples get rows, and lose them.

    Of two samples the one of smaller rank goes first, of equal ones the one that came first. A rank is given at submit
    and never changes. That is enough for aging: where every sample gains on later ones at the same pace, a lead that is
    worth so many seconds at the beginning is worth as many at the end, so a rank is a moment in time.

    *No starvation*: whatever came later than its lead after a sample ranks behind it. So before a sample gets a row,
    only those go that were there when it came, or came within the largest lead that any can have over it.

    Attributes:
        takes_rows: whether a waiting sample may take the place of running ones that it outranks.
    """

    takes_rows: bool

    def rank(self, sample: Sample) -> float:
        """The rank of a sample that is submitted."""
        ...


POLICIES: dict[str, Callable[[float], Policy]] = {
    "fcfs": lambda patience: FirstCome(),
    "priority": Priority,
    "shortest": ShortestPrompt,
}


def make_policy(name: str, patience: float | None) -> Policy:
    """The policy of that name; `patience` in seconds, None for `PATIENCE`."""
    return POLICIES[name](PATIENCE if patience is None else patience)
