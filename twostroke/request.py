"""Requests and samples: what a user asked for, and one continuation of it.

Everything in this file is plain Python and numpy. Validation is in one place, `Request.create`, which runs at submit.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

import numpy as np

from .errors import InvalidRequest, shown

MAX_STOP_IDS = 32
"""Stop ids (end-of-sequence ids included) that a row of the device-resident batch has room for."""

MAX_STOPS = 64
"""Stop strings of a request."""

MAX_STOP_LENGTH = 256
"""Characters of a stop string."""

SEED_BITS = 64


class FinishReason(StrEnum):
    """Why a sample ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are chosen. Checked at submit, never silently changed.

    The kept tokens are found in the order temperature, top_k, top_p, min_p; the token is then drawn from them by
    argmax(logit / temperature + Gumbel noise).

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it. Finite and >= 0.
        top_k: keep the k most likely tokens (ties with the k-th stay); 0 or -1 is off, as is any k >= vocabulary.
        top_p: keep the smallest set of most likely tokens whose probability reaches top_p, in (0, 1]; 1 is off.
        min_p: keep tokens whose probability is at least min_p times the largest one, in [0, 1]; 0 is off.
        seed: key of the random numbers, in [0, 2**64). None: the engine draws one and returns it in the result.
        max_tokens: most tokens to generate, >= 1. None is up to the context limit; more than that is clamped to it.
        min_tokens: end-of-sequence and stop token ids cannot be sampled before this many tokens, >= 0.
        ignore_eos: the model's end-of-sequence ids do not stop the sample; `stop_token_ids` still do.
        stop_token_ids: further token ids that stop the sample. The stop token is part of
            the token ids, not of the text.
        stop: a string, or a list of them, that ends the sample where the text first contains one; of several that end
            at the same character, the longest. It is searched in the text of the output tokens behind the first
            `min_tokens`. The text ends right before it, the token ids with the last token whose text lies wholly
            before it. None or [] is off. Needs a tokenizer.
        include_stop: the text ends right behind the stop string, the token ids with the token that completes it.
        skip_special_tokens: special tokens have no text. A stop token has none in any case.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 128
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    stop: str | Sequence[str] | None = None
    include_stop: bool = False
    skip_special_tokens: bool = True

    def __new__(cls, *args: Any, **kwargs: Any) -> SamplingParams:
        known = {f.name for f in fields(cls)}
        for name, value in kwargs.items():
            if name not in known:
                raise InvalidRequest(
                    f"{name}={shown(value)} is not a sampling parameter; known are {', '.join(sorted(known))}"
                )
        return super().__new__(cls)

    def validate(self) -> None:
        """Raise `InvalidRequest` for the first parameter that is out of its range or of a wrong type."""
        for name, low, high, open_low in (
            ("temperature", 0.0, math.inf, False),
            ("top_p", 0.0, 1.0, True),
            ("min_p", 0.0, 1.0, False),
        ):
            value = getattr(self, name)
            number = require_number(name, value)
            if number < low or number > high or (open_low and number == low):
                interval = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if high == math.inf else ']'}"
                raise InvalidRequest(f"{name}={shown(value)} must be in {interval}")
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            least = f"{MIN_TEMPERATURE:g}"
            raise InvalidRequest(f"temperature={shown(self.temperature)} must be 0 (greedy) or at least {least}")
        require_int("top_k", self.top_k, low=-1)
        require_int("min_tokens", self.min_tokens, low=0)
        if self.max_tokens is not None:
            require_int("max_tokens", self.max_tokens, low=1)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequest(
                    f"min_tokens={shown(self.min_tokens)} must not exceed max_tokens={shown(self.max_tokens)}"
                )
        if self.seed is not None:
            require_int("seed", self.seed, low=0, high=2**SEED_BITS - 1)
        for name in ("ignore_eos", "include_stop", "skip_special_tokens"):
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidRequest(f"{name}={shown(value)} must be True or False")
        if not is_listed(self.stop_token_ids):
            raise InvalidRequest(f"stop_token_ids={shown(self.stop_token_ids)} must be a list of token ids")
        _stop_strings(self.stop)


MIN_TEMPERATURE = 1e-5
"""Below this a division of the logits would overflow float32; such values are refused rather than rounded to greedy."""


def is_listed(value: object) -> bool:
    """Whether `value` is a sequence or an array of dimensions. Text and bytes are none here, though Python says so."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def require_number(name: str, value: object) -> float:
    """Return `value` as a float, or raise `InvalidRequest` that names the parameter and the value."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # an integer beyond all floats
            number = float(value)
            if math.isfinite(number):
                return number
    raise InvalidRequest(f"{name}={shown(value)} must be a finite number")


def require_int(name: str, value: object, *, low: int | None = None, high: int | None = None) -> int:
    """Return `value` as an int, or raise `InvalidRequest` that names the parameter, the value and the range."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InvalidRequest(f"{name}={shown(value)} must be an integer")
    number = int(value)
    if low is not None and number < low:
        raise InvalidRequest(f"{name}={shown(value)} must be at least {low}")
    if high is not None and number > high:
        raise InvalidRequest(f"{name}={shown(value)} must be at most {high}")
    return number


@dataclass(frozen=True)
class Limits:
    """What a request is checked against: facts of the model and of the cache."""

    vocab_size: int
    max_model_len: int
    """Prompt + output tokens of one sample may not exceed this."""
    block_size: int
    usable_blocks: int
    """Blocks of the cache that requests can have (the dummy block is not among them)."""
    eos_ids: tuple[int, ...] = ()

    @property
    def cache_positions(self) -> int:
        """KV positions that one sample can have at most."""
        return self.usable_blocks * self.block_size


@dataclass(frozen=True)
class Request:
    """A checked request: every field can be used as it is.

    Attributes:
        id: unique among the requests that are alive.
        prompt: token ids, int32 [P], read-only.
        params: as the user gave them.
        seed: the 64-bit key of the random numbers, drawn by the engine if the user gave none.
        max_tokens: the tokens that the sample can have, clamped to the context limit; >= 1.
        stop_ids: token ids that end the sample (end-of-sequence ids unless ignored, then the user's), int32, at most
            `MAX_STOP_IDS`.
        stops: the stop strings, each once.
    """

    id: str
    prompt: np.ndarray
    params: SamplingParams
    seed: int
    max_tokens: int
    stop_ids: np.ndarray
    stops: tuple[str, ...] = ()

    @classmethod
    def create(
        cls, request_id: str, prompt: Sequence[int] | np.ndarray, params: SamplingParams, seed: int, limits: Limits
    ) -> Request:
        """Check a request against `limits`.

        `seed` is used where `params.seed` is None.

        Raises:
            InvalidRequest: a parameter is out of range, or the request can never fit; the message has the numbers.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"params={shown(params)} must be a SamplingParams")
        params.validate()
        ids = _token_ids("prompt", prompt, limits.vocab_size)
        if len(ids) == 0:
            raise InvalidRequest("prompt=[] is empty: at least one token is needed")
        blocks = -(-len(ids) // limits.block_size)
        if blocks > limits.usable_blocks:
            raise InvalidRequest(
                f"prompt of {len(ids)} tokens needs {blocks} blocks of {limits.block_size}, the cache has "
                f"{limits.usable_blocks} usable"
            )
        if len(ids) >= limits.max_model_len:
            raise InvalidRequest(
                f"prompt of {len(ids)} tokens leaves no room for output: max_model_len={limits.max_model_len}"
            )
        max_tokens = _resolve_max_tokens(params.max_tokens, len(ids), limits)
        stops = _token_ids("stop_token_ids", params.stop_token_ids, limits.vocab_size)
        eos = () if params.ignore_eos else limits.eos_ids
        stop_ids = np.array(sorted({*eos, *stops.tolist()}), np.int32)
        if len(stop_ids) > MAX_STOP_IDS:
            raise InvalidRequest(
                f"stop_token_ids={shown(list(params.stop_token_ids))}: with the model's end-of-sequence ids there are "
                f"{len(stop_ids)} stop ids, at most {MAX_STOP_IDS} are supported"
            )
        seed = seed if params.seed is None else int(params.seed)
        ids.flags.writeable = stop_ids.flags.writeable = False
        return cls(request_id, ids, params, seed, max_tokens, stop_ids, _stop_strings(params.stop))


def _token_ids(name: str, ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """Return `ids` as a new int32 array, or raise `InvalidRequest` that names the first bad id and its place."""
    if not is_listed(ids):
        raise InvalidRequest(f"{name}={shown(ids)} must be a list of token ids")
    array = np.asarray(ids) if isinstance(ids, np.ndarray) else None
    if array is None or array.dtype.kind not in "iu" or array.ndim != 1:
        # NOTE: checked one by one, since numpy would turn [1, True] or [1, 2.0] into numbers without a word.
        for place, token in enumerate(ids):
            require_int(f"{name}[{place}]", token)
        array = np.array([int(t) for t in ids], dtype=object)
    bad = np.flatnonzero((array < 0) | (array >= vocab_size))
    if len(bad):
        place = int(bad[0])
        raise InvalidRequest(f"{name}[{place}]={shown(int(array[place]))} must be a token id in [0, {vocab_size})")
    return array.astype(np.int32)


def _stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the strings of `stop`, each once, or raise `InvalidRequest` that names the first bad one and its place."""
    if stop is None:
        return ()
    single = isinstance(stop, str)
    if not single and not is_listed(stop):
        raise InvalidRequest(f"stop={shown(stop)} must be a string, or a list of strings")
    strings: Sequence[str] = [stop] if isinstance(stop, str) else stop
    if len(strings) > MAX_STOPS:
        raise InvalidRequest(f"stop={shown(stop)} has {len(strings)} strings, at most {MAX_STOPS} are supported")
    for place, string in enumerate(strings):
        name = "stop" if single else f"stop[{place}]"
        if not isinstance(string, str):
            raise InvalidRequest(f"{name}={shown(string)} must be a string")
        if not 0 < len(string) <= MAX_STOP_LENGTH:
            raise InvalidRequest(
                f"{name}={shown(string)} must have 1 to {MAX_STOP_LENGTH} characters, not {len(string)}"
            )
    return tuple(dict.fromkeys(strings))


def _resolve_max_tokens(asked: int | None, prompt_len: int, limits: Limits) -> int:
    """Clamp `max_tokens` to the context limit; refuse what the cache can never hold.

    The last token of a sample needs no KV position, so a sample of P + M tokens occupies P + M - 1 positions.
    """
    context_room = limits.max_model_len - prompt_len
    cache_room = limits.cache_positions + 1 - prompt_len
    if asked is None:
        return min(context_room, cache_room)
    max_tokens = min(int(asked), context_room)
    if max_tokens > cache_room:
        blocks = -(-(prompt_len + max_tokens - 1) // limits.block_size)
        raise InvalidRequest(
            f"max_tokens={shown(asked)}: a prompt of {prompt_len} tokens and {max_tokens} new ones need {blocks} "
            f"blocks of {limits.block_size}, the cache has {limits.usable_blocks} usable"
        )
    return max_tokens


class SampleState(StrEnum):
    """Where a sample stands. WAITING <-> RUNNING (by admission, preemption), then FINISHED for ever."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass
class Timings:
    """Moments of a sample's life, in seconds of `time.perf_counter`; None until they happened."""

    submitted: float
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(eq=False)
class Sample:
    """One continuation of a request. Owned by the loop's thread from submit until it is FINISHED.

    Attributes:
        request: what was asked for.
        index: the number of the sample within its request.
        state: see `SampleState`.
        order: arrival number, given by the scheduler; smaller is older.
        tokens: prompt and output token ids, int32; current whenever the sample has no row.
        chain: digests of the full blocks of `tokens`, as far as the prefix cache needed them.
        cached_tokens: prompt tokens that its first admission found in the prefix cache.
        preemptions: how often it lost its place to an older sample.
        finish_reason: why it ended; None before that.
        error: what went wrong, where the reason is `error`.
    """

    request: Request
    index: int = 0
    state: SampleState = SampleState.WAITING
    order: int = -1
    tokens: np.ndarray = field(init=False)
    chain: list[bytes] = field(default_factory=list, repr=False)
    cached_tokens: int = 0
    preemptions: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    timings: Timings = field(default_factory=lambda: Timings(time.perf_counter()))

    def __post_init__(self) -> None:
        self.tokens = self.request.prompt

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def output(self) -> np.ndarray:
        """Output token ids, int32; current whenever the sample has no row."""
        return self.tokens[self.prompt_len :]
