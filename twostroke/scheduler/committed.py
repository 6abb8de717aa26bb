"""What there is to hand over."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..request import Sample
from .draft import NO_TOKENS


class Committed(NamedTuple):
    """What a commit, or a command between two steps, has to hand over.

    Attributes:
        finished: samples that ended, each reported once in its life.
        streamed: for each token of a sample that asked for its tokens as they come, that sample.
        tokens: int32, one per entry of `streamed`.
    """

    finished: list[Sample]
    streamed: list[Sample]
    tokens: np.ndarray


NOTHING = Committed([], [], NO_TOKENS)
