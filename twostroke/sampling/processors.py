"""Logits processors: what users hang in between the model and the sampler."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from ..held_input import ProcessorCall, RowTokens


class LogitsProcessor(Protocol):
    """Changes the logits of the rows that ask for it. Called in the midst of a step, so it must not be slow.

    Only its own rows wait for it. It is called once per step with all rows that have the same processors; if it raises,
    it is called again for each of them alone, and the samples for which it raises end with `error`.
    """

    def __call__(self, logits: torch.Tensor, rows: Sequence[RowTokens]) -> torch.Tensor:
        """Return the logits to go on with: those given, changed in place, or others of the same shape.

        Args:
            logits: float32 [R, V] on the engine's device, as the model made them. On CUDA nothing may wait for it.
            rows: what is known of each row, R of them: every token is real, the last one too.
        """
        ...


def run_processors(logits: torch.Tensor, calls: Sequence[ProcessorCall]) -> None:
    """Let the processors of `calls` change `logits`, float32 [K, V]. A row for which one raises becomes NaN."""
    for call in calls:
        own = logits[call.start : call.stop]
        try:
            own.copy_(_processed(own.clone(), call, call.rows))
        except Exception:
            for place, tokens in enumerate(call.rows):
                _run_alone(own[place : place + 1], place, tokens, call)


def _run_alone(logits: torch.Tensor, place: int, tokens: RowTokens, call: ProcessorCall) -> None:
    try:
        logits.copy_(_processed(logits.clone(), call, [tokens]))
    except Exception as error:
        logits.fill_(math.nan)
        call.fail(place, error)


def _processed(logits: torch.Tensor, call: ProcessorCall, rows: Sequence[RowTokens]) -> torch.Tensor:
    for processor in call.processors:
        given = processor(logits, rows)
        if not isinstance(given, torch.Tensor) or given.shape != logits.shape:
            what = list(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
            raise TypeError(f"a logits processor returned {what}, not logits of shape {list(logits.shape)}")
        logits = given
    return logits
