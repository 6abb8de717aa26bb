"""A constraint: says token by token what a sample may say next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Constraint(Protocol):
    """Follows one sample. One thread at a time calls it.

    Attributes:
        held_from: index of the next output token, behind the one that `fill` is asked about, which cannot be sampled
            without a mask. Between the two every token is allowed, whatever comes.
    """

    held_from: int

    def advance(self, tokens: Sequence[int]) -> None:
        """Take in the tokens that came since the last call."""

    def fill(self, mask: np.ndarray) -> None:
        """Write what the next token may be: int32 [ceil(V / 32)], see `HeldInput.masks`."""

    def forced(self) -> list[int]:
        """The next tokens, as far as they are taken without sampling; none of them ends the sample."""


def allow(mask: np.ndarray, token: int) -> None:
    """Set the bit of `token`."""
    mask.view(np.uint32)[token // 32] |= np.uint32(1 << (token % 32))


def bar(mask: np.ndarray, token: int) -> None:
    """Clear the bit of `token`."""
    mask.view(np.uint32)[token // 32] &= np.uint32(0xFFFFFFFF ^ (1 << (token % 32)))
