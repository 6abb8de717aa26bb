"""Prompts as callers write them: strings, token ids, chat messages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from .checks import require_token_ids, require_utf8
from .errors import InvalidRequest, each_of, shown
from .plain_ids import plain_ids, plain_lists
from .text.tokenizer import Tokenizer

Prompt: TypeAlias = str | Sequence[int] | np.ndarray | Sequence[Mapping[str, Any]]
"""A string, token ids, or the messages of a chat."""

_BYTES = (bytes, bytearray, memoryview)
"""Sequences of integers to Python, but a text that was not decoded is no list of token ids."""


def as_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """Return a list of prompts, whether one was given or several. A flat list of ints or of messages is one prompt."""
    if isinstance(prompts, (str, *_BYTES, Mapping)) or not isinstance(prompts, Iterable):
        return [prompts]  # type: ignore[list-item]
    if isinstance(prompts, np.ndarray):
        return list(prompts) if prompts.ndim == 2 else [prompts]
    listed: list[Any] = list(prompts)
    # NOTE: the plain type first: asking an abstract kind of each of so many token ids would take longer than all else.
    several = set(map(type, listed)) != {int} and any(isinstance(item, (str, Sequence, np.ndarray)) for item in listed)
    return listed if several or not listed else [listed]


def encode_prompts(prompts: Sequence[Prompt], tokenizer: Tokenizer | None) -> Sequence[Sequence[int] | np.ndarray]:
    """Return the token ids of each prompt, see `encode_prompt`; of several, an error says which was refused."""
    plain = plain_lists(prompts)
    return each_of("prompts", prompts, lambda prompt: encode_prompt(prompt, tokenizer)) if plain is None else plain


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> Sequence[int] | np.ndarray:
    """Return the token ids of a prompt, to be checked with the rest of the request: as an array if all are plain ints.

    Raises:
        InvalidRequest: it is not a prompt, is a text of no tokens, or needs a tokenizer that the model does not have.
    """
    if isinstance(prompt, np.ndarray) and prompt.ndim == 1:
        return prompt
    if isinstance(prompt, (*_BYTES, Mapping)) or not isinstance(prompt, Sequence):
        raise InvalidRequest(
            f"prompt={shown(prompt)} must be a string, a list of token ids, or a list of chat messages"
        )
    if not isinstance(prompt, str):
        if (ids := plain_ids(prompt)) is not None:
            return ids
        if not any(isinstance(item, Mapping) for item in prompt):
            return prompt  # type: ignore[return-value]
    if tokenizer is None:
        raise InvalidRequest(f"prompt={shown(prompt)}: this model has no tokenizer, give token ids")
    if isinstance(prompt, str):
        require_utf8("prompt", prompt)
        return require_tokens(prompt, tokenizer.encode(prompt))
    return tokenizer.apply_chat_template(prompt)  # type: ignore[arg-type]


def require_tokens(text: str, ids: list[int]) -> list[int]:
    """Return the token ids of a prompt that is a text, or raise `InvalidRequest` that shows the text if it has none."""
    if not ids:
        raise InvalidRequest(f"prompt={shown(text)} has no tokens: at least one is needed")
    return ids


def check_prompts(prompts: Sequence[Sequence[int] | np.ndarray], vocab_size: int) -> list[np.ndarray]:
    """Return the token ids of each prompt, int32 [P], which nobody else has.

    Those of several prompts are checked together, in one array, of which each prompt gets its part.

    Raises:
        InvalidRequest: an id is no token's; the message names the first one, its place, and its prompt's among several.
    """
    flat = _flat(prompts) if len(prompts) > 1 else None
    if flat is None or not len(flat) or flat.min() < 0 or flat.max() >= vocab_size:
        return each_of("prompts", prompts, lambda prompt: require_token_ids("prompt", prompt, vocab_size))
    ids = flat.astype(np.int32, copy=False)
    ids.flags.writeable = False
    ends = itertools.accumulate(map(len, prompts), initial=0)
    return [ids[start:end] for start, end in itertools.pairwise(ends)]


def _flat(prompts: Sequence[Any]) -> np.ndarray | None:
    """The ids of all prompts, one behind the other, a new array; None if they differ in type, or are no plain ones."""
    arrays: list[Any] = [prompt if isinstance(prompt, np.ndarray) else plain_ids(prompt) for prompt in prompts]
    if set(map(type, arrays)) != {np.ndarray} or len({(ids.dtype, ids.ndim) for ids in arrays}) > 1:
        return None
    return np.concatenate(arrays) if arrays[0].dtype.kind in "iu" and arrays[0].ndim == 1 else None
