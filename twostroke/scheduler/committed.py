"""What the commit of a step brought."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..request import Sample


class Committed(NamedTuple):
    """What a commit or a cancel brought.

    Attributes:
        finished: samples that ended, each reported once in its life.
        streamed: samples that asked for their tokens as they come and got one.
        tokens: int32, one per streamed sample, in the same order.
    """

    finished: list[Sample]
    streamed: list[Sample]
    tokens: np.ndarray
