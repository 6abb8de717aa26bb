"""What a batch will be: its tokens, counted without an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..openai.errors import ApiError
from .batch_input import Line
from .batch_request import RequestReader


@dataclass(frozen=True)
class Estimate:
    """Counts of a batch.

    Attributes:
        requests: lines. failed: those of them that cannot be answered.
        prompt_tokens: of the others; a prompt counts once, however many samples it has.
        completion_tokens: that they may have at most; stop tokens end most texts before that.
    """

    requests: int
    failed: int
    prompt_tokens: int
    completion_tokens: int


def estimate(lines: Iterator[Line], reader: RequestReader, on_error: Callable[[int, ApiError], None]) -> Estimate:
    """Read all lines as a run would."""
    requests = failed = prompt = completion = 0
    for line in lines:
        requests += 1
        try:
            request = reader.read(line)
        except ApiError as error:
            failed += 1
            on_error(line.number, error)
            continue
        prompt += sum(map(len, request.prompts))
        completion += request.samples * request.tokens
    return Estimate(requests, failed, prompt, completion)
