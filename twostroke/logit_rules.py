"""Logit rules: which tokens a request favours, and which it must not have, resolved for one vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .checks import is_listed, require_token_ids, require_utf8
from .errors import InvalidRequest, counted, shown
from .sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, SamplingParams

Encode = Callable[[str], list[int]]
"""A text to token ids, without special tokens around it."""


@dataclass(frozen=True)
class LogitRules:
    """`logit_bias`, `allowed_token_ids` and `bad_words` of a request, as the device is told of them.

    Attributes:
        restricted: ids without a bias cannot be sampled.
        bias_ids: int32 [B], each once. biases: float32 [B], added to their logits; -inf bars a token.
        sequences: bad words of several tokens.
    """

    restricted: bool
    bias_ids: np.ndarray
    biases: np.ndarray
    sequences: tuple[tuple[int, ...], ...]

    @classmethod
    def create(cls, params: SamplingParams, vocab_size: int, encode: Encode | None) -> LogitRules:
        """Check what `SamplingParams.validate` left; `encode` is None for a model without a tokenizer.

        Raises:
            InvalidRequest: one of them is malformed, names no token, or they leave no token to sample.
        """
        biases = _logit_bias(params.logit_bias, vocab_size)
        allowed = _allowed_ids(params.allowed_token_ids, vocab_size)
        words = _bad_words(params.bad_words, vocab_size, encode)
        if allowed is not None:
            biases = {token: biases.get(token, 0.0) for token in allowed}
        barred = {word[0] for word in words if len(word) == 1}
        if not (vocab_size - len(barred) if allowed is None else len(biases.keys() - barred)):
            raise InvalidRequest(f"bad_words={shown(params.bad_words)} leave no token to sample")
        biases |= dict.fromkeys(barred, -np.inf)
        return cls(
            restricted=allowed is not None,
            bias_ids=np.array([*biases], np.int32),
            biases=np.array([*biases.values()], np.float32),
            sequences=tuple(word for word in words if len(word) > 1),
        )

    def bad_words(self) -> list[list[int]]:
        """All bad words, as token ids."""
        return [[int(token)] for token in self.bias_ids[np.isneginf(self.biases)]] + [[*ids] for ids in self.sequences]


def _logit_bias(bias: Mapping[int, float] | None, vocab_size: int) -> dict[int, float]:
    if bias is None:
        return {}
    for token in bias:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"logit_bias[{shown(token)}] must be the bias of a token id in [0, {vocab_size})")
    return {int(token): float(value) for token, value in bias.items()}


def _allowed_ids(allowed: Sequence[int] | None, vocab_size: int) -> list[int] | None:
    if allowed is None:
        return None
    ids = require_token_ids("allowed_token_ids", allowed, vocab_size)
    if not len(ids):
        raise InvalidRequest("allowed_token_ids=[] leaves no token to sample; None is off")
    found: list[int] = np.unique(ids).tolist()
    return found


def _bad_words(words: object, vocab_size: int, encode: Encode | None) -> list[tuple[int, ...]]:
    """The bad words as token ids, each once."""
    if words is None:
        return []
    if not is_listed(words):
        raise InvalidRequest(f"bad_words={shown(words)} must be a list of strings, or of lists of token ids")
    found: dict[tuple[int, ...], None] = {}
    for place, word in enumerate(words):  # type: ignore[var-annotated, arg-type]
        name = f"bad_words[{place}]"
        spellings = _spellings(name, word, encode) if isinstance(word, str) else [word]
        for ids in spellings:
            tokens = tuple(require_token_ids(name, ids, vocab_size).tolist())
            if not tokens:
                raise InvalidRequest(f"{name}={shown(word)} is empty: at least one token is needed")
            found[tokens] = None
    long = [word for word in found if len(word) > 1]
    tokens_of_long = sum(map(len, long))
    if len(long) > MAX_BAD_WORDS or tokens_of_long > MAX_BAD_WORD_TOKENS:
        raise InvalidRequest(
            f"bad_words={shown(words)} have {counted(len(long), 'word')} of several tokens, {tokens_of_long} tokens "
            f"together; at most {MAX_BAD_WORDS} words and {MAX_BAD_WORD_TOKENS} tokens are supported"
        )
    return [*found]


def _spellings(name: str, word: str, encode: Encode | None) -> list[list[int]]:
    """A word's tokens at the beginning of a text, and behind a space, as words inside a text are."""
    if encode is None:
        raise InvalidRequest(f"{name}={shown(word)}: this model has no tokenizer, give token ids")
    require_utf8(name, word)
    bare = word.lstrip(" ")
    if not bare:
        raise InvalidRequest(f"{name}={shown(word)} must have a character that is not a space")
    return [encode(bare), encode(" " + bare)]
