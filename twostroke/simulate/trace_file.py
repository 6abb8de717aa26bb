"""Traces from files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InvalidRequest, shown
from .arrivals import Arrival, own_tokens

_FIELDS = {"arrival", "prompt", "prompt_tokens", "hashes", "output_tokens", "max_tokens", "priority"}
_MOST = 1 << 24
"""Of any number of tokens: more is a mistake."""


class TraceFile:
    """Reads JSON lines, one request each, by time of arrival.

        {"arrival": 0.25, "prompt_tokens": 700, "output_tokens": 120}
        {"arrival": 0.31, "prompt_tokens": 1500, "hashes": ["a1", "b7"], "output_tokens": 80, "priority": 1}
        {"arrival": 0.40, "prompt": [5, 17, 256], "output_tokens": 10, "max_tokens": 100}

    A prompt is given by its token ids, or by their number. Then `hashes` may say what others share: each stands for
    the next `hash_tokens` tokens, the last one possibly for fewer; equal hashes are equal tokens. All else in it is its
    own.

    Args:
        path: the file; it is read as it is needed, anew by each iteration.
        hash_tokens: tokens that one hash stands for.
    """

    def __init__(self, path: Path, hash_tokens: int) -> None:
        self._path, self._hash_tokens = path, hash_tokens

    def __iter__(self) -> Iterator[Arrival]:
        """The arrivals.

        Raises:
            InvalidRequest: the file cannot be read, or a line is none; the message has its number.
        """
        before = 0.0
        for number, line in self._lines():
            try:
                arrival = self._arrival(number, line)
                if arrival.time < before:
                    raise InvalidRequest(f"arrival={arrival.time} is earlier than that before it, {before}")
            except InvalidRequest as error:
                raise InvalidRequest(f"{self._path}, line {number + 1}: {error}") from None
            before = arrival.time
            yield arrival

    def _lines(self) -> Iterator[tuple[int, str]]:
        """The lines that are not blank, each with its number, counted from 0."""
        try:
            with self._path.open(encoding="utf-8-sig") as lines:
                for number, line in enumerate(lines):
                    if line.strip():
                        yield number, line
        except OSError as error:
            raise InvalidRequest(f"{self._path} cannot be read: {error.strerror or error}") from None
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"{self._path} is not UTF-8 text: {error}") from None

    def _arrival(self, number: int, line: str) -> Arrival:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise InvalidRequest(f"{shown(fields)} must be an object")
        if unknown := sorted(fields.keys() - _FIELDS):
            raise InvalidRequest(f"{unknown[0]!r} is unknown; known are {', '.join(sorted(_FIELDS))}")
        outputs = _integer(fields, "output_tokens", 1)
        return Arrival(
            time=_seconds(fields),
            prompt=self._prompt(number, fields),
            output_tokens=outputs,
            max_tokens=_integer(fields, "max_tokens", outputs) if "max_tokens" in fields else outputs,
            priority=_integer(fields, "priority", -1000, 1000) if "priority" in fields else 0,
        )

    def _prompt(self, number: int, fields: dict[str, Any]) -> np.ndarray:
        if ("prompt" in fields) == ("prompt_tokens" in fields):
            raise InvalidRequest("one of prompt and prompt_tokens is needed")
        if "prompt" in fields:
            return _ids(fields["prompt"])
        count, hashes = _integer(fields, "prompt_tokens", 1), fields.get("hashes", [])
        if not isinstance(hashes, list) or not all(isinstance(name, str | int) for name in hashes):
            raise InvalidRequest(f"hashes={shown(hashes)} must be a list of strings or integers")
        pieces = [_tokens_of(str(name), self._hash_tokens) for name in hashes[: -(-count // self._hash_tokens)]]
        shared = min(count, self._hash_tokens * len(pieces))
        return np.concatenate([*pieces, own_tokens(number, count - shared)])[:count]


@lru_cache(1 << 14)
def _tokens_of(name: str, count: int) -> np.ndarray:
    seed = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
    return np.random.default_rng(seed).integers(0, 1 << 31, count).astype(np.int32)


def _ids(prompt: object) -> np.ndarray:
    if not isinstance(prompt, list) or not prompt or not all(type(token) is int for token in prompt):
        raise InvalidRequest(f"prompt={shown(prompt)} must be a list of token ids")
    if not 0 <= min(prompt) <= max(prompt) < 1 << 31:
        raise InvalidRequest(f"prompt={shown(prompt)} has a token id outside of [0, 2**31)")
    return np.array(prompt, np.int32)


def _seconds(fields: dict[str, Any]) -> float:
    value = fields.get("arrival")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise InvalidRequest(f"arrival={shown(value)} must be seconds, 0 or more")
    return float(value)


def _integer(fields: dict[str, Any], name: str, low: int, high: int = _MOST) -> int:
    value = fields.get(name)
    if type(value) is not int or not low <= value <= high:
        raise InvalidRequest(f"{name}={shown(value)} must be an integer in [{low}, {high}]")
    return value
