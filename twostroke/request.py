"""Requests and samples: what a user asked for, and one continuation of it.

Everything in this file is plain Python and numpy. Validation is in one place, `Request.create`, which runs at submit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np

from .checks import require_token_ids
from .errors import InvalidRequest, shown
from .logit_rules import Encode, LogitRules
from .plan import LEDGER_FEATURES, NO_FEATURES, Feature
from .sampling_params import MAX_STOP_IDS, SEED_BITS, SamplingParams, stop_strings


class FinishReason(StrEnum):
    """Why a sample ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


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
    priorities: bool = False
    """The scheduler's policy heeds them."""
    max_waiting: int | None = None
    """Most samples that may wait before they begin to run; None is any number."""
    max_ledgers: int = 1
    """Samples that can have a ledger at once."""

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
        params: as the user gave them; what is read of them after submit cannot be changed any more.
        seed: the 64-bit key of the random numbers, drawn by the engine if the user gave none.
        max_tokens: the tokens that the sample can have, clamped to the context limit; >= 1.
        stop_ids: token ids that end the sample (end-of-sequence ids unless ignored, then the user's), int32, at most
            `MAX_STOP_IDS`.
        rules: the tokens that it favours, and those that it must not have.
        stops: the stop strings, each once.
    """

    id: str
    prompt: np.ndarray
    params: SamplingParams
    seed: int
    max_tokens: int
    stop_ids: np.ndarray
    rules: LogitRules
    stops: tuple[str, ...] = ()

    @property
    def samples(self) -> int:
        """Samples that run; with `best_of` more than are returned."""
        return self.params.best_of or self.params.n

    @property
    def wanted_logprobs(self) -> int:
        """What each output token needs: 0 for no log-probabilities, or 1 + how many of the most likely tokens."""
        params = self.params
        return 1 + params.logprobs if params.logprobs is not None else int(params.best_of is not None)

    @property
    def wanted_prompt_logprobs(self) -> int:
        """The same of the prompt's tokens."""
        return 0 if self.params.prompt_logprobs is None else 1 + self.params.prompt_logprobs

    @property
    def follows(self) -> bool:
        """Whether delivery must have its tokens as they come: it searches them, or collects what comes with them."""
        return bool(self.stops or self.wanted_logprobs)

    @property
    def is_held(self) -> bool:
        """Whether its tokens must be known on the CPU before the next one is sampled."""
        params = self.params
        return bool(
            params.structured is not None or params.max_thinking_tokens is not None or len(params.logits_processors)
        )

    @property
    def is_forcible(self) -> bool:
        """Whether a token of which there is no choice need not be sampled: neither device nor user misses that."""
        return not self.features & (LEDGER_FEATURES | Feature.LOGPROBS) and not len(self.params.logits_processors)

    @cached_property
    def features(self) -> Feature:
        """What its sampling needs beyond the common case."""
        params, rules, found = self.params, self.rules, NO_FEATURES
        if rules.restricted or len(rules.biases):
            found |= Feature.BIAS
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1:
            found |= Feature.PENALTIES
        if params.no_repeat_ngram_size:
            found |= Feature.NGRAMS
        if rules.sequences:
            found |= Feature.BAD_WORDS
        if params.typical_p < 1:
            found |= Feature.TYPICAL
        if self.wanted_logprobs:
            found |= Feature.LOGPROBS
        return found

    @classmethod
    def create(
        cls,
        request_id: str,
        prompt: Sequence[int] | np.ndarray,
        params: SamplingParams,
        seed: int,
        limits: Limits,
        encode: Encode | None = None,
    ) -> Request:
        """Check a request against `limits`.

        `seed` is used where `params.seed` is None; `encode` turns bad words into token ids, if there is a tokenizer.

        Raises:
            InvalidRequest: a parameter is out of range, or the request can never fit; the message has the numbers.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"params={shown(params)} must be a SamplingParams")
        params.validate()
        params = params.frozen()
        if params.priority and not limits.priorities:
            raise InvalidRequest(f"priority={params.priority} needs an engine with policy='priority'")
        ids = require_token_ids("prompt", prompt, limits.vocab_size)
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
        stops = require_token_ids("stop_token_ids", params.stop_token_ids, limits.vocab_size)
        eos = () if params.ignore_eos else limits.eos_ids
        stop_ids = np.array(sorted({*eos, *stops.tolist()}), np.int32)
        if len(stop_ids) > MAX_STOP_IDS:
            raise InvalidRequest(
                f"stop_token_ids={shown(list(params.stop_token_ids))}: with the model's end-of-sequence ids there are "
                f"{len(stop_ids)} stop ids, at most {MAX_STOP_IDS} are supported"
            )
        rules = LogitRules.create(params, limits.vocab_size, encode)
        seed = seed if params.seed is None else int(params.seed)
        ids.flags.writeable = stop_ids.flags.writeable = False
        request = cls(request_id, ids, params, seed, max_tokens, stop_ids, rules, stop_strings(params.stop))
        if request.features & LEDGER_FEATURES and not limits.max_ledgers:
            asked = next(name for name in _LEDGER_PARAMETERS if _is_set(name, getattr(params, name)))
            raise InvalidRequest(f"{asked}={shown(getattr(params, asked))} needs a ledger, but max_ledgers=0")
        return request


_LEDGER_PARAMETERS = (
    *("logit_bias", "allowed_token_ids", "bad_words", "no_repeat_ngram_size"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Parameters for which a row needs a ledger."""


def _is_set(name: str, value: Any) -> bool:
    """Whether a parameter, which was checked, asks for anything: a list that is not empty, or another number."""
    default = getattr(SamplingParams, name)
    return bool(value != default) if default is not None else value is not None and len(value) > 0


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


def mix_seed(seed: int, index: int) -> int:
    """The seed of sample `index` of a request with `seed`: the seed itself for sample 0, else splitmix64's output.

    That is the finalizer of Steele, Lea and Flood (OOPSLA 2014) on seed + index * 0x9E3779B97F4A7C15, modulo 2**64.
    """
    if index == 0:
        return seed
    word = (seed + index * 0x9E3779B97F4A7C15) & _SEED_MASK
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & _SEED_MASK
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & _SEED_MASK
    return word ^ word >> 31


_SEED_MASK = (1 << SEED_BITS) - 1


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
        seed: the key of its random numbers, see `mix_seed`.
        state: see `SampleState`.
        order: arrival number, given by the scheduler; smaller is older.
        rank: given by the scheduler's policy; of two samples the one of smaller rank goes first.
        tokens: prompt and output token ids, int32; current whenever the sample has no row.
        chain: digests of the full blocks of `tokens`, as far as the prefix cache needed them.
        cached_tokens: prompt tokens that its first admission found in the prefix cache.
        preemptions: how often it lost its place.
        versions: of each weight version that gave it tokens, the number, and how many output tokens there were at its
            end.
        scored: prompt positions that need not be scored: they were, or nobody wants their log-probabilities. Of several
            samples the one that computes the prompt scores it.
        finish_reason: why it ended; None before that.
        error: what went wrong, where the reason is `error`.
    """

    request: Request
    index: int = 0
    seed: int = field(init=False)
    state: SampleState = SampleState.WAITING
    order: int = -1
    rank: float = 0.0
    tokens: np.ndarray = field(init=False)
    chain: list[bytes] = field(default_factory=list, repr=False)
    cached_tokens: int = 0
    preemptions: int = 0
    versions: list[tuple[int, int]] = field(default_factory=list, repr=False)
    scored: int = field(init=False)
    finish_reason: FinishReason | None = None
    error: str | None = None
    timings: Timings = field(default_factory=lambda: Timings(time.perf_counter()))

    def __post_init__(self) -> None:
        self.tokens = self.request.prompt
        self.seed = mix_seed(self.request.seed, self.index)
        self.scored = self.prompt_len
        if not self.index:
            self.score_prompt()

    def score_prompt(self) -> None:
        """Be the one that scores the prompt, from its beginning, if the request wants that."""
        if self.request.wanted_prompt_logprobs:
            self.scored = 0

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def output(self) -> np.ndarray:
        """Output token ids, int32; current whenever the sample has no row."""
        return self.tokens[self.prompt_len :]

    def mark_version(self, version: int, length: int) -> None:
        """Note that of the first `length` tokens all that belong to no earlier weight version belong to this one."""
        outputs = length - self.prompt_len
        if outputs > (self.versions[-1][1] if self.versions else 0):
            self.versions.append((version, outputs))

    def unmark_versions(self, length: int) -> None:
        """Take back what was noted of tokens behind the first `length`: they did not come, and will be sampled anew."""
        outputs = length - self.prompt_len
        self.versions = [(version, min(end, outputs)) for version, end in self.versions]

    def weight_versions(self, kept: int | None = None) -> list[tuple[int, int]]:
        """(version, output tokens) in the order in which they came, of the first `kept` output tokens or all."""
        length = len(self.output) if kept is None else kept
        ends = [min(end, length) for _, end in self.versions]
        counts = np.diff(ends, prepend=0).tolist()
        return [(version, count) for (version, _), count in zip(self.versions, counts, strict=True) if count]
