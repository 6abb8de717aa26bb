"""Log-probabilities as OpenAI's APIs show them: raw, those of the model's logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..text.detokenizer import token_bytes
from ..text.output import TokenLogprob
from ..text.tokenizer import Tokenizer

LEAST = -9999.0
"""In place of the log-probability of what is impossible, which JSON cannot say."""


class LogprobWriter:
    """Words log-probabilities; without a tokenizer a token has no text."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def for_chat(self, logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        """`logprobs` of a chat's choice; None if they were not asked for."""
        if logprobs is None:
            return None
        content = [
            self._entry(one.token_id, one.logprob)
            | {"top_logprobs": [self._entry(token, logprob) for token, logprob in one.top.items()]}
            for one in logprobs
        ]
        return {"content": content, "refusal": None}

    def for_completion(self, logprobs: Sequence[TokenLogprob] | None, offset: int) -> dict[str, Any] | None:
        """`logprobs` of a completion's choice, whose text begins at character `offset`."""
        if logprobs is None:
            return None
        tokens = [self._text(one.token_id) for one in logprobs]
        offsets = [offset + sum(map(len, tokens[:place])) for place in range(len(tokens))]
        return {
            "tokens": tokens,
            "token_logprobs": [max(one.logprob, LEAST) for one in logprobs],
            "top_logprobs": [
                {self._text(token): max(logprob, LEAST) for token, logprob in one.top.items()} for one in logprobs
            ],
            "text_offset": offsets,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._text(token), "logprob": max(logprob, LEAST), "bytes": list(self._bytes(token))}

    def _text(self, token: int) -> str:
        return self._bytes(token).decode("utf-8", errors="replace")

    def _bytes(self, token: int) -> bytes:
        return token_bytes(self._tokenizer, token) if self._tokenizer else b""
