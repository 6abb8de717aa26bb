"""Requests and samples: what a user asked for, and one continuation of it.

Everything in this file is plain Python and numpy. Validation runs at submit: of parameters in `Terms.create`, of the
rest in `Request.of`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from .checks import require_token_ids
from .errors import InvalidRequest, counted, shown
from .limits import Limits
from .logit_rules import Encode
from .sampling_params import SEED_BITS, SamplingParams
from .terms import Terms


class FinishReason(StrEnum):
    """Why a sample ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, eq=False, slots=True)
class Request:
    """A checked request: every field can be used as it is.

    Attributes:
        id: unique among the requests that are alive.
        prompt: token ids, int32 [P], read-only.
        terms: what it asks for beside the prompt; other requests may have the same.
        seed: the 64-bit key of the random numbers, drawn by the engine if the user gave none.
        max_tokens: the tokens that the sample can have, clamped to the context limit; >= 1.
    """

    id: str
    prompt: np.ndarray
    terms: Terms
    seed: int
    max_tokens: int

    @property
    def params(self) -> SamplingParams:
        return self.terms.params

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
        """Check a request against `limits`; see `Terms.create` and `of`.

        Raises:
            InvalidRequest: a parameter is out of range, or the request can never fit; the message has the numbers.
        """
        terms = Terms.create(params, limits, encode)
        return cls.of(request_id, require_token_ids("prompt", prompt, limits.vocab_size), terms, seed, limits)

    @classmethod
    def of(cls, request_id: str, ids: np.ndarray, terms: Terms, seed: int, limits: Limits) -> Request:
        """A request of what was checked before: `ids`, int32 [P], which nobody writes to any more, and `terms`.

        `seed` is used where the parameters have none.

        Raises:
            InvalidRequest: it can never fit; the message has the numbers.
        """
        params, length = terms.params, len(ids)
        _require_room(length, limits)
        max_tokens = _resolve_max_tokens(params.max_tokens, length, limits)
        ids.flags.writeable = False
        return cls(request_id, ids, terms, seed if params.seed is None else int(params.seed), max_tokens)


def _require_room(length: int, limits: Limits) -> None:
    """Raise `InvalidRequest` for a prompt of `length` tokens that leaves no room for output, or is empty."""
    if length == 0:
        raise InvalidRequest("prompt=[] is empty: at least one token is needed")
    if length > limits.cache_positions:
        blocks = limits.groups.blocks(length)
        raise InvalidRequest(
            f"prompt of {counted(length, 'token')} needs {counted(blocks, 'block')} of {limits.block_size}, the cache "
            f"has {limits.usable_blocks} usable"
        )
    require_context(length, limits.max_model_len)


def require_context(length: int, max_model_len: int) -> None:
    """Raise `InvalidRequest` for a prompt of `length` tokens behind which the context has no place for one more."""
    if length >= max_model_len:
        raise InvalidRequest(
            f"prompt of {counted(length, 'token')} leaves no room for output: max_model_len={max_model_len}"
        )


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
        blocks = limits.groups.blocks(prompt_len + max_tokens - 1)
        raise InvalidRequest(
            f"max_tokens={shown(asked)}: a prompt of {counted(prompt_len, 'token')} and {max_tokens} new ones need "
            f"{counted(blocks, 'block')} of {limits.block_size}, the cache has {limits.usable_blocks} usable"
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


@dataclass(slots=True)
class Timings:
    """Moments of a sample's life, in seconds of `time.perf_counter`; None until they happened."""

    submitted: float
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(eq=False, slots=True, weakref_slot=True)
class Sample:
    """One continuation of a request. Owned by the loop's thread from submit until it is FINISHED.

    Attributes:
        request: what was asked for.
        index: the number of the sample within its request.
        seed: the key of its random numbers, see `mix_seed`.
        state: see `SampleState`.
        order: arrival number, given by the scheduler; smaller is older.
        rank: given by the scheduler's policy; of two samples the one of smaller rank goes first.
        prompt_len: tokens of the prompt.
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
    prompt_len: int = field(init=False)
    tokens: np.ndarray = field(init=False)
    chain: list[bytes] = field(default_factory=list, repr=False)
    cached_tokens: int = 0
    preemptions: int = 0
    versions: tuple[tuple[int, int], ...] = field(default=(), repr=False)
    scored: int = field(init=False)
    finish_reason: FinishReason | None = None
    error: str | None = None
    timings: Timings = field(default_factory=lambda: Timings(time.perf_counter()))

    def __post_init__(self) -> None:
        self.tokens = self.request.prompt
        self.prompt_len = len(self.tokens)
        self.seed = mix_seed(self.request.seed, self.index)
        self.scored = self.prompt_len
        if not self.index:
            self.score_prompt()

    def score_prompt(self) -> None:
        """Be the one that scores the prompt, from its beginning, if the request wants that."""
        if self.request.terms.wanted_prompt_logprobs:
            self.scored = 0

    @property
    def output(self) -> np.ndarray:
        """Output token ids, int32; current whenever the sample has no row."""
        return self.tokens[self.prompt_len :]

    def mark_version(self, version: int, length: int) -> None:
        """Note that of the first `length` tokens all that belong to no earlier weight version belong to this one."""
        outputs = length - self.prompt_len
        if outputs > (self.versions[-1][1] if self.versions else 0):
            self.versions += ((version, outputs),)

    def unmark_versions(self, length: int) -> None:
        """Take back what was noted of tokens behind the first `length`: they did not come, and will be sampled anew."""
        outputs = length - self.prompt_len
        self.versions = tuple((version, min(end, outputs)) for version, end in self.versions)

    def weight_versions(self, kept: int | None = None) -> list[tuple[int, int]]:
        """(version, output tokens) in the order in which they came, of the first `kept` output tokens or all."""
        length = len(self.output) if kept is None else kept
        ends = [0, *(min(end, length) for _, end in self.versions)]
        counts = [end - begin for begin, end in itertools.pairwise(ends)]
        return [(version, count) for (version, _), count in zip(self.versions, counts, strict=True) if count]
