"""Sampling parameters: how the tokens of a request are chosen, and what a user may write there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .checks import is_listed, require_int, require_number, require_utf8, require_within
from .errors import InvalidRequest, shown
from .logprob_record import MAX_LOGPROBS
from .structured import StructuredOutput

MAX_STOP_IDS = 32
"""Stop ids (end-of-sequence ids included) that a row of the device-resident batch has room for."""

MAX_STOPS = 64
"""Stop strings of a request."""

MAX_STOP_LENGTH = 256
"""Characters of a stop string."""

MAX_SALT_CHARS = 256

SEED_BITS = 64

MAX_SAMPLES = 1024
"""Samples of a request."""
MAX_PRIORITY = 1000

MIN_TEMPERATURE = 1e-5
"""Below this a division of the logits would overflow float32; such values are refused rather than rounded to greedy."""


MAX_BAD_WORDS = 256
"""Bad words of several tokens that a request can have."""

MAX_BAD_WORD_TOKENS = 2048
"""Tokens of all its bad words of several tokens together."""

MAX_MARKER_TOKENS = 64
"""Tokens of the begin or the end of thinking: each token of prompt and output is compared with as many before it."""

LOGIT_LIMIT = 1e6
"""Largest logit bias or additive penalty: beyond it a logit itself would be lost in rounding."""

MIN_REPETITION, MAX_REPETITION = 1e-3, 1e3
"""Bounds of the repetition penalty: beyond them a logit could overflow float32."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are chosen. Checked at submit, never silently changed.

    The parameters are applied in the order of `docs/sampling.md`; the token is then drawn from the kept ones with
    noise that is a function of the seed and the output index.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it. Finite and >= 0.
        top_k: keep the k most likely tokens (ties with the k-th stay); 0 or -1 is off, as is any k >= vocabulary.
        top_p: keep the smallest set of most likely tokens whose probability reaches top_p, in (0, 1]; 1 is off.
        min_p: keep tokens whose probability is at least min_p times the largest one, in [0, 1]; 0 is off.
        typical_p: of what the other filters keep, keep the smallest set of tokens whose surprise is nearest to the
            entropy and whose probability reaches typical_p, in (0, 1]; 1 is off.
        presence_penalty: taken from the logit of every token that the output holds, in [-1e6, 1e6]; 0 is off.
        frequency_penalty: taken from a token's logit once for every time that the output holds it, in the same range.
        repetition_penalty: the logit of every token that prompt or output hold (stop tokens in the prompt, too) is
            divided by it if positive, else multiplied by it, in [0.001, 1000]; 1 is off.
        no_repeat_ngram_size: no n tokens in a row come twice in prompt and output, >= 0; 0 is off.
        logit_bias: added to the logits of the token ids that are its keys, each in [-1e6, 1e6]. None is off.
        allowed_token_ids: no other tokens can be sampled, stop tokens included. None is off.
        bad_words: words that the output must not hold: strings, which are encoded with and without a space before
            them, or sequences of token ids. The last token of a word is barred where those before it end prompt and
            output. None or [] is off. Strings need a tokenizer.
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
        n: samples of the prompt, in [1, 1024]. The prompt is computed once. Sample 0 uses `seed`, sample i the seed
            `request.mix_seed(seed, i)`.
        priority: larger goes first, and takes the place of smaller ones if there is no other; in [-1000, 1000]. Needs
            an engine with `policy="priority"`, but for 0.
        queue_timeout: seconds that a sample may wait before it begins to run, > 0; it ends with `error` after that.
            None is the engine's.
        cache_salt: who may share what the prefix cache knows: only requests with the same text here find each other's
            blocks, so nobody else can tell by their times what they asked; 1 to 256 characters. None is one more text.
        structured: what the text must be. Once it is complete, only end-of-sequence and stop token ids are allowed.
            Needs a tokenizer.
        max_thinking_tokens: most tokens between the begin and the end of thinking, >= 0; then `thinking_end` is forced.
            Several thoughts share them. None is no limit. If the prompt ends in thinking, `structured` is meant for
            what comes behind it.
        thinking_start, thinking_end: token ids, or text to be made of the tokens that the tokenizer makes of it, at
            most 64. None: the tokens <think> and </think>.
        logits_processors: called in this order with the row's logits, before anything else changes them; see
            `sampling.processors.LogitsProcessor`.
        best_of: run so many samples, at least n, and return the n whose tokens have the largest mean log-probability,
            the best first. Refused for a stream. None: n, in the order of their indices.
        logprobs: return the log-probability of each token, and of so many of the most likely tokens, in [0, 20]; raw,
            that is in the softmax of the model's logits, before all that this class can do to them. Beside it that of
            the token in the distribution that it was drawn from. None is off.
        prompt_logprobs: the same for each token of the prompt but the first, given those before it; nothing is drawn
            there. Such a prompt is computed as a whole, whatever the prefix cache knows. None is off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str | Sequence[int]] | None = None
    seed: int | None = None
    max_tokens: int | None = 128
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    stop: str | Sequence[str] | None = None
    include_stop: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    priority: int = 0
    queue_timeout: float | None = None
    cache_salt: str | None = None
    structured: StructuredOutput | None = None
    max_thinking_tokens: int | None = None
    thinking_start: str | Sequence[int] | None = None
    thinking_end: str | Sequence[int] | None = None
    logits_processors: Sequence[Callable[..., Any]] = ()
    best_of: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> SamplingParams:
        known = cls.__dataclass_fields__
        for name, value in kwargs.items():
            if name not in known:
                raise InvalidRequest(
                    f"{name}={shown(value)} is not a sampling parameter; known are {', '.join(sorted(known))}"
                )
        return super().__new__(cls)

    def validate(self) -> None:
        """Raise `InvalidRequest` for the first parameter that is out of its range or of a wrong type.

        What depends on the model, such as the size of its vocabulary, is checked at submit.
        """
        for name, low, high, open_low in _INTERVALS:
            require_within(name, getattr(self, name), low, high, open_low=open_low)
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            least = f"{MIN_TEMPERATURE:g}"
            raise InvalidRequest(f"temperature={shown(self.temperature)} must be 0 (greedy) or at least {least}")
        require_int("top_k", self.top_k, low=-1)
        require_int("no_repeat_ngram_size", self.no_repeat_ngram_size, low=0)
        require_int("min_tokens", self.min_tokens, low=0)
        self.validate_own()
        require_int("priority", self.priority, low=-MAX_PRIORITY, high=MAX_PRIORITY)
        if self.queue_timeout is not None and require_number("queue_timeout", self.queue_timeout) <= 0:
            raise InvalidRequest(f"queue_timeout={shown(self.queue_timeout)} must be more than 0 seconds")
        if self.cache_salt is not None:
            _check_salt(self.cache_salt)
        for name in ("ignore_eos", "include_stop", "skip_special_tokens"):
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidRequest(f"{name}={shown(value)} must be True or False")
        if not is_listed(self.stop_token_ids):
            raise InvalidRequest(f"stop_token_ids={shown(self.stop_token_ids)} must be a list of token ids")
        stop_strings(self.stop)
        require_int("n", self.n, low=1, high=MAX_SAMPLES)
        if self.best_of is not None and require_int("best_of", self.best_of, high=MAX_SAMPLES) < self.n:
            raise InvalidRequest(f"best_of={shown(self.best_of)} must be at least n={shown(self.n)}")
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                require_int(name, count, low=0, high=MAX_LOGPROBS)
        _check_bias(self.logit_bias)
        self._validate_held()

    def validate_own(self) -> None:
        """Raise `InvalidRequest` for the first of `OWN_PARAMETERS` that is out of its range or of a wrong type."""
        if self.max_tokens is not None:
            require_int("max_tokens", self.max_tokens, low=1)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequest(
                    f"min_tokens={shown(self.min_tokens)} must not exceed max_tokens={shown(self.max_tokens)}"
                )
        if self.seed is not None:
            require_int("seed", self.seed, low=0, high=2**SEED_BITS - 1)

    def frozen(self) -> SamplingParams:
        """These parameters, checked, without lists that others may change: of those that are read after submit."""
        if self.structured is None and self.max_thinking_tokens is None and not len(self.logits_processors):
            return self
        return replace(
            self,
            structured=None if self.structured is None else self.structured.frozen(),
            thinking_start=_fixed(self.thinking_start),
            thinking_end=_fixed(self.thinking_end),
            logits_processors=tuple(self.logits_processors),
        )

    def _validate_held(self) -> None:
        if self.structured is not None:
            if not isinstance(self.structured, StructuredOutput):
                raise InvalidRequest(f"structured={shown(self.structured)} must be a StructuredOutput")
            self.structured.source()
        if self.max_thinking_tokens is not None:
            require_int("max_thinking_tokens", self.max_thinking_tokens, low=0)
        for name in ("thinking_start", "thinking_end"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str) and not is_listed(value):
                raise InvalidRequest(f"{name}={shown(value)} must be a string or a list of token ids")
            if value is not None and self.max_thinking_tokens is None:
                raise InvalidRequest(f"{name}={shown(value)} means nothing without max_thinking_tokens")
        processors = self.logits_processors
        if not is_listed(processors) or not all(callable(processor) for processor in processors):
            raise InvalidRequest(f"logits_processors={shown(processors)} must be a list of logits processors")


OWN_PARAMETERS = "max_tokens", "seed"
"""Those in which requests differ that are otherwise alike; nothing that `Terms` derives depends on them."""

_INTERVALS = (
    ("temperature", 0.0, math.inf, False),
    ("top_p", 0.0, 1.0, True),
    ("min_p", 0.0, 1.0, False),
    ("typical_p", 0.0, 1.0, True),
    ("presence_penalty", -LOGIT_LIMIT, LOGIT_LIMIT, False),
    ("frequency_penalty", -LOGIT_LIMIT, LOGIT_LIMIT, False),
    ("repetition_penalty", MIN_REPETITION, MAX_REPETITION, False),
)
"""Parameters that are numbers: the lowest and the highest value, and whether the lowest itself is left out."""


def _fixed(marker: str | Sequence[int] | None) -> str | Sequence[int] | None:
    return marker if marker is None or isinstance(marker, str) else tuple(marker)


def _check_salt(salt: object) -> None:
    if not isinstance(salt, str) or not 1 <= len(salt) <= MAX_SALT_CHARS:
        raise InvalidRequest(f"cache_salt={shown(salt)} must be a string of 1 to {MAX_SALT_CHARS} characters")
    require_utf8("cache_salt", salt)


def _check_bias(bias: Mapping[int, float] | None) -> None:
    if bias is None:
        return
    if not isinstance(bias, Mapping):
        raise InvalidRequest(f"logit_bias={shown(bias)} must be a dict of token ids and numbers")
    for token, value in bias.items():
        name = f"logit_bias[{shown(token)}]"
        require_int(f"the token id of {name}", token)
        require_within(name, value, -LOGIT_LIMIT, LOGIT_LIMIT)


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
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
        require_utf8(name, string)
    return tuple(dict.fromkeys(strings))
