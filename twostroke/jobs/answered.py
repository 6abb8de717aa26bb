"""Lines of a batch's output, and what takes them."""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..openai.errors import ApiError


class Answered(NamedTuple):
    """A line of the output.

    Attributes:
        line: number of the line of the input.
        text: the line itself, without its end.
        failed: whether it says what went wrong.
        prompt_tokens, completion_tokens: 0 if it failed.
    """

    line: int
    text: bytes
    failed: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Answers(ABC):
    """Takes answers and errors."""

    @abstractmethod
    def add(self, answered: Answered) -> None: ...

    @abstractmethod
    def due_in(self) -> float | None:
        """Seconds until `flush_if_due` should be called; None if nothing waits for that."""

    @abstractmethod
    def flush_if_due(self) -> None: ...

    @abstractmethod
    def flush(self) -> None:
        """Put away what was added."""

    def add_answer(self, line: int, custom_id: str, body: Mapping[str, Any], prompt: int, completion: int) -> None:
        """Add an answer.

        Args:
            prompt, completion: its tokens.
        """
        response = {"status_code": 200, "request_id": f"req_{uuid.uuid4().hex}", "body": body}
        self.add(Answered(line, _text(custom_id, response, None), False, prompt, completion))

    def add_error(self, line: int, custom_id: str, error: ApiError) -> None:
        """Add what went wrong with a line."""
        told = error.body()["error"] | {"status_code": error.status, "line": line}
        self.add(Answered(line, _text(custom_id, None, told), failed=True))


def _text(custom_id: str, response: Mapping[str, Any] | None, error: Mapping[str, Any] | None) -> bytes:
    fields = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    # NOTE: ASCII, since some readers of lines also split at U+0085 or U+2028, which JSON does not escape by itself.
    return json.dumps(fields, ensure_ascii=True).encode()
