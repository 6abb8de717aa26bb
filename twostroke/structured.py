"""Structured output: what a user may ask the text of a sample to be."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .checks import is_listed
from .errors import InvalidRequest, shown

MAX_GRAMMAR_CHARS = 1 << 20
"""Characters of a schema, an expression, a grammar, or of all choices together."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutput:
    """The language that the output's text must be a word of. Exactly one of the first five is given.

    Attributes:
        json_schema: a JSON schema, as a mapping or as JSON text. A keyword that is not implemented is refused, and so
            are bounds of numbers that cannot be kept.
        regex: a regular expression of the whole text, in the syntax of Rust's `regex` crate: no look-around, no
            back-references.
        choice: the texts to choose from.
        grammar: a context-free grammar, in GBNF (`root ::= ...`) or Lark (`start: ...`).
        json_object: any JSON object.
        jump_forward: where only one text can follow, take its usual tokens without sampling, several in one step. The
            text is held to the same language; but of several ways to cut the text into tokens the model has no choice
            then, so what follows may differ. Samples with log-probabilities, penalties, biases, bad words or logits
            processors sample every token all the same.
    """

    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    jump_forward: bool = False

    def source(self) -> tuple[str, str]:
        """Return what was given: its name, and its text (choices and mappings as JSON).

        Raises:
            InvalidRequest: none was given, several were, or it has a wrong type or is too long.
        """
        for name in ("json_object", "jump_forward"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"structured.{name}={shown(getattr(self, name))} must be True or False")
        texts = {name: getattr(self, name) for name in ("json_schema", "regex", "choice", "grammar")}
        given = {name: value for name, value in texts.items() if value is not None}
        given |= {"json_object": "{}"} if self.json_object else {}
        if len(given) != 1:
            raise InvalidRequest(
                f"structured={shown(self)} must have exactly one of json_schema, regex, choice, grammar, json_object"
            )
        ((name, value),) = given.items()
        text = _as_json(name, value) if name in ("json_schema", "choice") else value
        if not isinstance(text, str):
            what = "a mapping, or JSON text" if name == "json_schema" else "a string"
            raise InvalidRequest(f"structured.{name}={shown(value)} must be {what}")
        if len(text) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(
                f"structured.{name} has {len(text)} characters, at most {MAX_GRAMMAR_CHARS} are supported"
            )
        return name, text

    def frozen(self) -> StructuredOutput:
        """The same, checked, without lists and mappings that others may change."""
        if self.choice is not None:
            return replace(self, choice=tuple(self.choice))
        return replace(self, json_schema=self.source()[1]) if self.json_schema is not None else self


def _as_json(name: str, value: Any) -> Any:
    if name == "choice":
        if not is_listed(value) or not len(value):
            raise InvalidRequest(f"structured.choice={shown(value)} must be a list of at least one string")
        for place, text in enumerate(value):
            if not isinstance(text, str):
                raise InvalidRequest(f"structured.choice[{place}]={shown(text)} must be a string")
        return json.dumps(list(value))
    if isinstance(value, Mapping):
        try:
            return json.dumps(value, default=_plain)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"structured.json_schema={shown(value)} is not JSON: {error}") from error
    return value


def _plain(value: object) -> dict[Any, Any]:
    """A mapping that is no dict, as one."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} is none")
