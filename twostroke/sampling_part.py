"""The sampling part of a step: from the logits of the sampled positions to their tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from .device.batch_state import BatchState
from .plan import LEDGER_FEATURES, Feature
from .sampling.logprobs import write_logprobs
from .sampling.stage import Stage


class LedgerOps(Protocol):
    """The ledgers' operations, see `kernels.ledger.LedgerOps`."""

    def open(self, words: torch.Tensor, count: int) -> None: ...

    def enter(self, tokens: torch.Tensor, row_ids: torch.Tensor) -> None: ...


class SamplingPart:
    """Stages, sampling, log-probabilities, advance: what its launches depend on are the features and the sizes.

    Args:
        state: the device-resident batch.
        ledgers: kept after sampling.
        stages, sample: see `Runner`.
        advance: see `kernels.batch.BatchOps`.
    """

    def __init__(
        self,
        state: BatchState,
        ledgers: LedgerOps,
        stages: Sequence[Stage],
        sample: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, bool, torch.Tensor | None], None],
        advance: Callable[[BatchState, int, torch.Tensor], None],
    ) -> None:
        self._state = state
        self._ledgers = ledgers
        self._stages = stages
        self._sample = sample
        self._advance = advance

    def run(self, features: Feature, logits: torch.Tensor, output: torch.Tensor, records: torch.Tensor) -> None:
        """Sample one token from each row of `logits` for the rows that stand in the state's `sample_rows`.

        Args:
            features: what the rows ask for.
            logits: [n, V] as the model gave them. Only where a stage edits them is there a float32 copy of them.
            output, records: written, as at `StepBuffers`.
        """
        if features & LEDGER_FEATURES:
            self.run_edited(features, logits.to(torch.float32, copy=True), logits, output, records)
        else:
            self.run_edited(features, logits, logits, output, records)

    def run_edited(
        self, features: Feature, logits: torch.Tensor, raw: torch.Tensor, output: torch.Tensor, records: torch.Tensor
    ) -> None:
        """The same, where `logits`, which stages change in place, differ from those of the model, `raw`."""
        state, n = self._state, len(logits)
        rows, tokens = state.sample_rows[:n], state.tokens[:n]
        for stage in self._stages if features else ():
            if features & stage.feature:
                stage.edit(logits, rows)
        chances = state.chances[:n] if features & Feature.LOGPROBS else None
        self._sample(logits, rows, tokens, state.errors[:n], bool(features & Feature.TYPICAL), chances)
        if chances is not None:
            write_logprobs(raw, rows, state.logprobs, tokens, chances, records)
        if features & LEDGER_FEATURES:
            self._ledgers.enter(tokens, rows)
        self._advance(state, n, output)
