"""Endings: what becomes of a sample that ends, and of what it had."""

from __future__ import annotations

import time

from ..request import FinishReason, Sample, SampleState
from .batch import Batch
from .forks import Forks
from .gate import Gate
from .weight_versions import WeightVersions


class Endings:
    """Ends samples, wherever they stand.

    Args:
        batch: the samples that have rows. gate: in front of those that have none.
        forks: those that wait for another one's prompt.
        weights: notes which of them gave a sample's tokens.
    """

    def __init__(self, batch: Batch, gate: Gate, forks: Forks, weights: WeightVersions) -> None:
        self._batch = batch
        self._gate = gate
        self._forks = forks
        self._weights = weights

    def end(self, sample: Sample, reason: FinishReason, error: str | None = None, drop: int = 0, bad: int = 0) -> None:
        """End `sample` with its known tokens but the last `drop`; row and blocks wait to be returned.

        `bad` as in `Prefixes.publish`.
        """
        tokens = self._batch.known_tokens(sample)
        sample.tokens = tokens[: len(tokens) - drop]
        self._batch.leave(sample, bad)
        waited = sample.state is SampleState.WAITING and not self._forks.is_pending(sample)
        sample.state, sample.finish_reason, sample.error = SampleState.FINISHED, reason, error
        if waited:
            self._gate.count_out(sample)
        if (heir := self._forks.ended(sample)) is not None:
            heir.score_prompt()
            self._gate.push(heir)
        sample.chain.clear()
        self._weights.mark_end(sample)
        if sample.timings.admitted is None:
            self._batch.count_begun(sample)
        sample.timings.finished = time.perf_counter()
