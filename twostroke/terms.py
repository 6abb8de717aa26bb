"""Terms: what a request asks for beside its prompt, checked, and resolved for one model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from .checks import require_token_ids
from .errors import InvalidRequest, shown
from .limits import Limits
from .logit_rules import Encode, LogitRules
from .plan import LEDGER_FEATURES, NO_FEATURES, ROW_RECORD, Feature
from .sampling_params import MAX_STOP_IDS, OWN_PARAMETERS, SamplingParams, stop_strings

_INT32_MAX = np.iinfo(np.int32).max
_FLOAT32 = np.finfo(np.float32)


@dataclass(frozen=True, eq=False)
class Terms:
    """Checked sampling parameters. Nothing in them can be changed, so any number of requests may share one.

    Attributes:
        params: as the user gave them; what is read of them after submit cannot be changed any more.
        stop_ids: token ids that end the sample (end-of-sequence ids unless ignored, then the user's), int32, at most
            `MAX_STOP_IDS`, read-only.
        rules: the tokens that it favours, and those that it must not have.
        stops: the stop strings, each once.
    """

    params: SamplingParams
    stop_ids: np.ndarray
    rules: LogitRules
    stops: tuple[str, ...]

    @classmethod
    def create(cls, params: SamplingParams, limits: Limits, encode: Encode | None = None) -> Terms:
        """Check parameters against `limits`; `encode` turns bad words into token ids, if there is a tokenizer.

        Raises:
            InvalidRequest: one is out of range; the message names it and its value.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"params={shown(params)} must be a SamplingParams")
        params.validate()
        params = params.frozen()
        if params.priority and not limits.priorities:
            raise InvalidRequest(f"priority={params.priority} needs an engine with policy='priority'")
        stop_ids = _resolve_stop_ids(params, limits)
        terms = cls(params, stop_ids, LogitRules.create(params, limits.vocab_size, encode), stop_strings(params.stop))
        if terms.needs_ledger and not limits.max_ledgers:
            asked = next(name for name in _LEDGER_PARAMETERS if _is_set(name, getattr(params, name)))
            raise InvalidRequest(f"{asked}={shown(getattr(params, asked))} needs a ledger, but max_ledgers=0")
        return terms

    def shared_with(self, params: SamplingParams) -> Terms:
        """The terms of `params`, which differ from the parameters of these in `OWN_PARAMETERS` alone; all is derived.

        Raises:
            InvalidRequest: one of these is out of range.
        """
        params.validate_own()
        terms = object.__new__(Terms)
        vars(terms).update(vars(self), params=params)
        return terms

    def derive_all(self) -> None:
        """Derive now what is derived once, so that those who share it have it, too."""
        for name in _DERIVED:
            getattr(self, name)

    @cached_property
    def samples(self) -> int:
        """Samples that run; with `best_of` more than are returned."""
        return self.params.best_of or self.params.n

    @cached_property
    def wanted_logprobs(self) -> int:
        """What each output token needs: 0 for no log-probabilities, or 1 + how many of the most likely tokens."""
        params = self.params
        return 1 + params.logprobs if params.logprobs is not None else int(params.best_of is not None)

    @cached_property
    def wanted_prompt_logprobs(self) -> int:
        """The same of the prompt's tokens."""
        return 0 if self.params.prompt_logprobs is None else 1 + self.params.prompt_logprobs

    @cached_property
    def namespace(self) -> bytes:
        """What the prefix cache keeps apart, see `PrefixCache`."""
        return (self.params.cache_salt or "").encode()

    @cached_property
    def follows(self) -> bool:
        """Whether delivery must have its tokens as they come: it searches them, or collects what comes with them."""
        return bool(self.stops or self.wanted_logprobs)

    @cached_property
    def is_held(self) -> bool:
        """Whether its tokens must be known on the CPU before the next one is sampled."""
        params = self.params
        return bool(
            params.structured is not None or params.max_thinking_tokens is not None or len(params.logits_processors)
        )

    @cached_property
    def is_forcible(self) -> bool:
        """Whether a token of which there is no choice need not be sampled: neither device nor user misses that."""
        return not self.features & (LEDGER_FEATURES | Feature.LOGPROBS) and not len(self.params.logits_processors)

    @cached_property
    def needs_ledger(self) -> bool:
        """Whether the device keeps its history."""
        return bool(self.features & LEDGER_FEATURES)

    @cached_property
    def row_record(self) -> bytes:
        """What the device is told of every row with these terms: a `ROW_RECORD` whose other fields are 0.

        Values that are checked as Python numbers are brought into the range of the record's types without a change of
        meaning: top_k beyond every vocabulary, min_tokens beyond every length, a top_p that would round to 0.
        """
        params, record = self.params, np.zeros(1, ROW_RECORD)
        record["min_outputs"] = min(params.min_tokens, _INT32_MAX)
        record["temperature"] = min(float(params.temperature), float(_FLOAT32.max))
        record["top_k"] = min(max(params.top_k, 0), _INT32_MAX)
        record["top_p"] = max(float(params.top_p), float(_FLOAT32.tiny))
        record["min_p"] = params.min_p
        record["typical_p"] = max(float(params.typical_p), float(_FLOAT32.tiny))
        record["presence"], record["frequency"] = params.presence_penalty, params.frequency_penalty
        record["repetition"] = params.repetition_penalty
        record["ngram_size"] = min(params.no_repeat_ngram_size, _INT32_MAX)
        record["logprobs"], record["prompt_logprobs"] = self.wanted_logprobs, self.wanted_prompt_logprobs
        record["stop_ids"] = -1
        record["stop_ids"][0, : len(self.stop_ids)] = self.stop_ids
        return record.tobytes()

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


_DERIVED = tuple(name for name, member in vars(Terms).items() if isinstance(member, cached_property))


class KnownTerms:
    """Terms by the parameters that they are of: while a request has them, the same object is not checked again.

    Of parameters that differ from known ones in `OWN_PARAMETERS` alone, only these are checked.

    Only what nobody can have changed since is known: plain values, and tuples of them. What Python can hash need not be
    constant: an object that does not say when it equals another is hashed by its identity. Parameters are known by
    theirs, and by their values and the types of these, since equal ones need not all be valid: True == 1.

    Args:
        create: makes terms of parameters, or refuses them.
    """

    def __init__(self, create: Callable[[SamplingParams], Terms]) -> None:
        self._create = create
        self._known: WeakValueDictionary[int, Terms] = WeakValueDictionary()  # terms keep parameters, and so their ids
        self._alike: WeakValueDictionary[tuple[object, ...], Terms] = WeakValueDictionary()

    def of(self, params: SamplingParams) -> Terms:
        """The terms of `params`; raises what `create` does."""
        if (known := self._known.get(id(params))) is not None:
            return known
        key = _common(params)
        if key is not None and (alike := self._alike.get(key)) is not None:
            terms = alike.shared_with(params)
        else:
            terms = self._create(params)
            if key is not None:
                terms.derive_all()
                self._alike[key] = terms
        if terms.params is params and (key is not None or all(map(_is_constant, vars(params).values()))):
            self._known[id(params)] = terms
        return terms


def _common(params: SamplingParams) -> tuple[object, ...] | None:
    """All but `OWN_PARAMETERS`, equal only for those of the same terms; None unless all are plain or empty tuples."""
    if type(params) is not SamplingParams or not _PLAIN_TYPES.issuperset(map(type, _OWN(params))):
        return None
    values = _COMMON(params)
    types = tuple(map(type, values))
    tuples = _tuples_among(types)
    if tuples is None or any(map(values.__getitem__, tuples)):
        return None
    return values, types


@lru_cache(64)
def _tuples_among(types: tuple[type, ...]) -> tuple[int, ...] | None:
    """Where in values of these types tuples are; None if there are others than tuples and plain values."""
    if not _COMMON_TYPES.issuperset(types):
        return None
    return tuple(place for place, kind in enumerate(types) if kind is tuple)


def _is_constant(value: object) -> bool:
    return type(value) in _PLAIN_TYPES or (type(value) is tuple and all(map(_is_constant, value)))


_PLAIN_TYPES = frozenset({type(None), bool, int, float, str, range})
"""Those of values that cannot be changed."""

_COMMON_TYPES = _PLAIN_TYPES | {tuple}
_OWN = attrgetter(*OWN_PARAMETERS)
_COMMON = attrgetter(*(each.name for each in fields(SamplingParams) if each.name not in OWN_PARAMETERS))

_LEDGER_PARAMETERS = (
    *("logit_bias", "allowed_token_ids", "bad_words", "no_repeat_ngram_size"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Parameters for which a row needs a ledger."""


def _is_set(name: str, value: Any) -> bool:
    """Whether a parameter, which was checked, asks for anything: a list that is not empty, or another number."""
    default = getattr(SamplingParams, name)
    return bool(value != default) if default is not None else value is not None and len(value) > 0


def _resolve_stop_ids(params: SamplingParams, limits: Limits) -> np.ndarray:
    """All stop ids, sorted, each once."""
    given = require_token_ids("stop_token_ids", params.stop_token_ids, limits.vocab_size)
    eos = () if params.ignore_eos else limits.eos_ids
    stop_ids = np.array(sorted({*eos, *given.tolist()}), np.int32)
    if len(stop_ids) > MAX_STOP_IDS:
        raise InvalidRequest(
            f"stop_token_ids={shown(list(params.stop_token_ids))}: with the model's end-of-sequence ids there are "
            f"{len(stop_ids)} stop ids, at most {MAX_STOP_IDS} are supported"
        )
    stop_ids.flags.writeable = False
    return stop_ids
