"""Grammars: compiled from what a user asked for, and followed by samples."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CannotFollow, InvalidRequest, counted, shown
from ..structured import StructuredOutput
from ..text.tokenizer import Tokenizer
from .bounds import check_bounds
from .constraint import allow, bar

# NOTE: imported where it is used, so that an engine without grammars starts without it.
if TYPE_CHECKING:
    import llguidance

_KEPT = 64
"""Compiled grammars that are kept for requests to come."""

_TRIED = 8
"""First tokens that are tried at submit, before a grammar is refused because none can be followed."""

_REASON_CHARS = 400
"""Of a reason's beginning, and as many of its end: it may quote all that the user gave."""

_SILENT = 0

_JSON: Any = {"whitespace_pattern": r"[ \n\r\t]{0,16}"}
"""Between the tokens of JSON is room for a line break and indentation, but no model can go on with them for ever."""


class Grammars:
    """Compiles grammars for one tokenizer, with limits on their size and on the work of a mask. Thread-safe.

    Args:
        tokenizer: of the model. vocab_size: the model's logits; ids without a token are never allowed.
        eos_ids: the model's end-of-sequence ids.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._lock = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._kept: OrderedDict[tuple[str, str], llguidance.LLMatcher] = OrderedDict()

    def compile(self, structured: StructuredOutput) -> llguidance.LLMatcher:
        """Return a matcher at the beginning of the text; callers copy it.

        Raises:
            InvalidRequest: it does not compile, is too large, or nothing fits it.
        """
        import llguidance

        name, text = source = structured.source()
        with self._lock:
            if (known := self._kept.get(source)) is not None:
                self._kept.move_to_end(source)
                return known
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
        try:
            grammar = _grammar(name, text)
            # NOTE: text that is forced would be cut as in a prompt, into special tokens, which are no text here.
            if self._tokenizer.holds_special(_literal(name, text)):
                grammar = _unforced(grammar)
        except ValueError as error:
            raise InvalidRequest(f"structured.{name}={shown(text)}: {_shortened(str(error))}") from error
        # NOTE: its default limits bound the time to about a second, and that of a mask to some milliseconds.
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=_SILENT)
        if (reason := _try(matcher)) is not None:
            raise InvalidRequest(f"structured.{name}={shown(text)} cannot be followed: {reason}")
        with self._lock:
            self._kept[source] = matcher
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return matcher

    def begin(self, structured: StructuredOutput, stop_ids: Sequence[int], jumps: bool = False) -> GrammarConstraint:
        """Return a constraint at the beginning of the text; `stop_ids` end the sample. `jumps`: it forces tokens."""
        matcher, (name, _) = self.compile(structured).deep_copy(), structured.source()
        assert self._vocabulary is not None
        eos_ids, ends = [self._vocabulary.eos_token, *self._eos_ids], [*self._eos_ids, *stop_ids]
        return GrammarConstraint(matcher, eos_ids, ends, self.vocab_size if jumps else 0, name=name)

    def _make_vocabulary(self) -> llguidance.LLTokenizer:
        import llguidance

        eos = self._eos_ids[0] if self._eos_ids else None
        size = max(self.vocab_size, self._tokenizer.vocab_size)
        return llguidance.LLTokenizer(self._tokenizer.to_json(), n_vocab=size, eos_token=eos)


class GrammarConstraint:
    """Follows one sample through a grammar; see `Constraint`.

    Args:
        eos_ids: end-of-sequence ids, of the model and of the matcher, which knows one.
        ends: what a sample may say once its text is complete. If that does not stop it, it says nothing else any more.
        forcible: tokens below this one are forced where only one text can follow; 0 for none.
        name: of what the user gave, for messages.
    """

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        eos_ids: Sequence[int],
        ends: Sequence[int],
        forcible: int = 0,
        *,
        name: str = "grammar",
    ) -> None:
        self.held_from = 0
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._ends = ends
        self._forcible = forcible
        self._ended = False
        self._name = name
        self._taken = 0

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._ended = self._ended or token in self._eos_ids
            if not self._ended and not self._matcher.consume_token(token):
                raise self._failure()
            self._taken += 1

    def fill(self, mask: np.ndarray) -> None:
        complete = self._ended or self._matcher.is_accepting()
        if self._ended:
            mask[:] = 0
        else:
            words = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
            if self._matcher.is_error():
                raise self._failure()
            mask[:] = words[: len(mask)]
        for token in self._eos_ids:
            bar(mask, token)
        for token in self._ends if complete else ():
            allow(mask, token)

    def _failure(self) -> CannotFollow:
        return CannotFollow(
            f"structured.{self._name} cannot be followed behind {counted(self._taken, 'token')}: "
            f"{_reason(self._matcher)}"
        )

    def forced(self) -> list[int]:
        if not self._forcible or self._ended:
            return []
        barred = {*self._eos_ids, *self._ends}
        tokens = self._matcher.compute_ff_tokens()
        return list(takewhile(lambda token: token < self._forcible and token not in barred, tokens))


def _try(matcher: llguidance.LLMatcher) -> str | None:
    """Why no text can be followed, as far as the first masks tell; None if one can.

    NOTE: the work of a mask is limited, and some grammars take too much only once a token was taken.
    """
    trial = matcher.deep_copy()
    mask = b"" if trial.is_error() else trial.compute_bitmask()
    if trial.is_error():
        return _reason(trial)
    reason = None
    for token in np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))[:_TRIED].tolist():
        second = trial.deep_copy()
        if second.consume_token(token) and (second.is_stopped() or second.compute_bitmask()) and not second.is_error():
            return None
        reason = _reason(second)
    return reason


def _grammar(name: str, text: str) -> str:
    import llguidance

    if name == "json_schema":
        grammar = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=_JSON)
        check_bounds(json.loads(text))
        return grammar
    if name == "json_object":
        return llguidance.LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=_JSON)
    if name == "regex":
        return llguidance.LLMatcher.grammar_from_regex(text)
    if name == "choice":
        return llguidance.LLMatcher.grammar_from_lark("start: " + " | ".join(map(_quoted, json.loads(text))))
    return llguidance.grammar_from("grammar", text)


def _quoted(text: str) -> str:
    """A string of a Lark grammar, which is one of JSON but for the one character that must not stand there as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _literal(name: str, text: str) -> str:
    """The source of a grammar in which what stands for itself does so without escapes."""
    flat = json.dumps(json.loads(text), ensure_ascii=False) if name in ("json_schema", "choice") else text
    return flat.replace("\\", "")


def _unforced(grammar: str) -> str:
    """The same language as a Lark grammar, where text that alone can follow may be cut into any tokens."""
    if grammar.startswith('{"grammars"'):
        (part,) = json.loads(grammar)["grammars"]
        grammar = part["lark_grammar"] or f"start: %json {json.dumps(part['json_schema'])}"
    return f'%llguidance {{"no_forcing": true}}\n{grammar}'


def _reason(matcher: llguidance.LLMatcher) -> str:
    """The error without the dump of the parser's state that follows it."""
    reason = matcher.get_error().split("<state>")[0].strip()
    return "no text matches it" if "NoExtensionBias" in reason else _shortened(reason)


def _shortened(reason: str) -> str:
    if len(reason) <= 2 * _REASON_CHARS:
        return reason
    return f"{reason[:_REASON_CHARS]} ... {reason[-_REASON_CHARS:]}"
