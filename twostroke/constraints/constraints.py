"""Constraints: which one a request has, and the threads that follow samples beside the loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from ..checks import require_token_ids, require_utf8
from ..errors import InvalidRequest, counted, shown
from ..limits import Limits
from ..request import Request
from ..sampling_params import MAX_MARKER_TOKENS, SamplingParams
from ..terms import Terms
from ..text.tokenizer import Tokenizer
from .constraint import Constraint
from .grammars import Grammars
from .thinking import ThinkingBudget

_THREADS = 8
"""Most masks that are filled at once."""


class Constraints:
    """Makes the constraints of requests, and runs work on them. Thread-safe.

    Args:
        tokenizer: None for a model without one.
        limits: facts of the model.
    """

    def __init__(self, tokenizer: Tokenizer | None, limits: Limits) -> None:
        self.mask_words = -(-limits.vocab_size // 32)
        self._tokenizer = tokenizer
        self._limits = limits
        self._grammars = Grammars(tokenizer, limits.vocab_size, limits.eos_ids) if tokenizer else None
        threads = min(_THREADS, os.cpu_count() or 1)
        self._workers = ThreadPoolExecutor(threads, thread_name_prefix="twostroke-masks")

    def check(self, terms: Terms) -> None:
        """Raise `InvalidRequest` if what `terms` ask for cannot be followed; a grammar is compiled for it."""
        params = terms.params
        if params.structured is not None:
            if self._grammars is None:
                raise InvalidRequest(f"structured={shown(params.structured)}: this model has no tokenizer")
            if not self._limits.eos_ids and not len(terms.stop_ids):
                raise InvalidRequest(
                    f"structured={shown(params.structured)}: without an end-of-sequence id of the model, only "
                    "stop_token_ids can end the text: give some"
                )
            self._grammars.compile(params.structured)
        if params.max_thinking_tokens is not None:
            self._thinking_ids(params)

    def begin(self, request: Request) -> Constraint | None:
        """Return the constraint of a new sample of `request`, which was checked; None if it has none."""
        params, terms, answer = request.params, request.terms, None
        if params.structured is not None:
            assert self._grammars is not None
            jumps = params.structured.jump_forward and terms.is_forcible
            answer = self._grammars.begin(params.structured, terms.stop_ids.tolist(), jumps)
        if params.max_thinking_tokens is None:
            return answer
        start, end = self._thinking_ids(params)
        # NOTE: no sample is longer than that, and the rows' counters could not hold every integer.
        budget = min(int(params.max_thinking_tokens), self._limits.max_model_len)
        return ThinkingBudget(request.prompt.tolist(), start, end, budget, answer)

    def run(self, work: Callable[[], None]) -> Future[None]:
        """Let a worker call `work`."""
        return self._workers.submit(work)

    def close(self) -> None:
        """End the workers; what they have not begun is dropped."""
        self._workers.shutdown(wait=True, cancel_futures=True)

    def _thinking_ids(self, params: SamplingParams) -> tuple[list[int], list[int]]:
        return (
            self._marker("thinking_start", params.thinking_start, "<think>"),
            self._marker("thinking_end", params.thinking_end, "</think>"),
        )

    def _marker(self, name: str, given: str | Sequence[int] | None, usual: str) -> list[int]:
        """The token ids that a user gave for the begin or end of thinking, or those of the usual token."""
        if given is not None and not isinstance(given, str):
            ids = require_token_ids(name, given, self._limits.vocab_size).tolist()
        elif self._tokenizer is None:
            raise InvalidRequest(f"{name}={shown(given)}: this model has no tokenizer, give token ids")
        elif given is not None:
            require_utf8(name, given)
            ids = self._tokenizer.encode(given, special_tokens=False)
        elif (token := self._tokenizer.token_id(usual)) is not None:
            ids = [token]
        else:
            raise InvalidRequest(f"{name}=None: this model has no token {usual!r}, give {name}")
        if not ids:
            raise InvalidRequest(f"{name}={shown(given)} must be at least one token")
        if len(ids) > MAX_MARKER_TOKENS:
            raise InvalidRequest(
                f"{name}={shown(given)} has {counted(len(ids), 'token')}, at most {MAX_MARKER_TOKENS} are supported"
            )
        return ids
