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
        """Return the logits to go on with: those given, changed in place, or others of the same shape on the same
        device, in any floating-point type.

        Args:
            logits: float32 [R, V] on the engine's device, as the model made them. On CUDA nothing may wait for it.
            rows: what is known of each row, R of them: every token is real, the last one too.
        """
        ...


def run_processors(logits: torch.Tensor, calls: Sequence[ProcessorCall]) -> None:
    """Let the processors of `calls` change `logits`, float32 [K, V]. A row for which one raises becomes NaN."""
    for call in calls:
        own = logits[call.start : call.stop]
        # NOTE: whatever they raise, an exit or a cancelled task among it, is theirs: this is no thread to end.
        try:
            own.copy_(_processed(own.clone(), call, call.rows))
        except BaseException:
            for place, tokens in enumerate(call.rows):
                _run_alone(own[place : place + 1], place, tokens, call)


def _run_alone(logits: torch.Tensor, place: int, tokens: RowTokens, call: ProcessorCall) -> None:
    try:
        logits.copy_(_processed(logits.clone(), call, (tokens,)))
    except BaseException as error:
        logits.fill_(math.nan)
        call.fail(place, error)


def _processed(logits: torch.Tensor, call: ProcessorCall, rows: Sequence[RowTokens]) -> torch.Tensor:
    # NOTE: taken before the calls, since a processor can also change the shape of what it was given.
    shape, device = list(logits.shape), logits.device
    for processor in call.processors:
        logits = processor(logits, rows)
        if not isinstance(logits, torch.Tensor):
            raise TypeError(f"a logits processor returned {type(logits).__name__}, not logits of shape {shape}")
        if list(logits.shape) != shape or logits.device != device or not logits.is_floating_point():
            raise TypeError(
                f"a logits processor returned {_kind(logits)}, not logits of shape {shape} on {device} in a "
                "floating-point type"
            )
    return logits


def _kind(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} on {tensor.device} in {tensor.dtype}"
