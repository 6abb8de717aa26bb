"""Outputs that are told of part by part, so that who reads them need not wait for the whole."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Announced(NamedTuple):
    """Which columns of an output are written.

    Attributes:
        counts: int32 [parts], how often each part has been announced: as often as blocks write it, in the end.
        columns: of a part; the last one may have fewer.
    """

    counts: torch.Tensor
    columns: int


class Written(NamedTuple):
    """An output, [T, N], and what tells of it while it is being written; None: it is there when its kernel is done."""

    values: torch.Tensor
    announced: Announced | None = None


class Announcements:
    """The counts of a step, in memory that all steps share: they run one after the other.

    Args:
        parts: that a step announces at most.
    """

    def __init__(self, parts: int, device: torch.device) -> None:
        self._counts = torch.zeros(parts, dtype=torch.int32, device=device)
        self._taken = 0

    def begin(self) -> None:
        """Start a step, on the current stream: nothing has been announced."""
        self._counts.fill_(0)  # by a kernel: the product behind it may be one that starts early
        self._taken = 0

    def take(self, parts: int, columns: int) -> Announced:
        """Return the counts of the step's next output."""
        begin, self._taken = self._taken, self._taken + parts
        if self._taken > len(self._counts):
            raise RuntimeError(f"a step announces {self._taken} parts at least: there is room for {len(self._counts)}")
        return Announced(self._counts[begin : self._taken], columns)
