"""What there is to hand over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..logprob_record import NO_RECORDS
from ..request import Sample
from .draft import NO_TOKENS


class Committed(NamedTuple):
    """What a commit, or a command between two steps, has to hand over.

    Attributes:
        finished: samples that ended, each reported once in its life.
        streamed: for each token of a sample that asked for its tokens as they come, that sample.
        tokens: int32, one per entry of `streamed`.
        records: `LOGPROB_RECORD`, one per entry of `streamed`, of use where the sample asked for log-probabilities; or
            none at all.
        scored: for each scored prompt position, its sample; the positions of a sample are in order.
        scores: `LOGPROB_RECORD`, one per entry of `scored`.
    """

    finished: list[Sample]
    streamed: list[Sample]
    tokens: np.ndarray
    records: np.ndarray = NO_RECORDS
    scored: Sequence[Sample] = ()
    scores: np.ndarray = NO_RECORDS


NOTHING = Committed([], [], NO_TOKENS)
