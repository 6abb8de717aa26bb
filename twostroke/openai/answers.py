"""Parts of answers that several endpoints share."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from .. import __version__
from ..request import FinishReason
from ..text.output import RequestOutput
from .call import Call, samples

FINGERPRINT = f"twostroke-{__version__}"


class Answer(Protocol):
    """How an endpoint words what the engine says."""

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The body of the response."""

    def events(self, call: Call) -> AsyncIterator[bytes]:
        """The events of a stream."""


def head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    """The fields that an answer begins with, equal in all its pieces."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": FINGERPRINT,
    }


def token_counts(outputs: Sequence[RequestOutput]) -> tuple[int, int]:
    """Tokens in and out: prompts count once, however many samples they have."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    return prompt, sum(len(sample.token_ids) for sample in samples(outputs))


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Tokens in and out, and how many were in the cache."""
    prompt, completion = token_counts(outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.cached_tokens for output in outputs)},
    }


def finish(reason: FinishReason | None) -> str | None:
    """A finish reason as OpenAI's API has it. Requests that were cut short have none: an error follows."""
    return reason.value if reason in (FinishReason.STOP, FinishReason.LENGTH) else None
