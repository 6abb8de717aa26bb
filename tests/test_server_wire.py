"""Whatever a request that was admitted says, the engine process is told the same, and takes it."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from twostroke import InvalidRequest, SamplingParams
from twostroke.limits import Limits
from twostroke.request import Request
from twostroke.sampling_params import MAX_LOGPROBS
from twostroke.server.remote_commands import _entry
from twostroke.server.wire import Submit, decode_for_engine, encode
from twostroke.structured import StructuredOutput

VOCAB = 60
LIMITS = Limits(VOCAB, max_model_len=50, block_size=4, usable_blocks=100, eos_ids=(2,), priorities=True)

INT = st.sampled_from([0, 1, 2, 5, 49, 50, 51, 2**31, 2**63, 2**64 - 1])
SHARE = st.sampled_from([1e-9, 0.3, 1.0])
PENALTY = st.sampled_from([-1e6, -0.5, 0.0, 1.0, 1e6])
IDS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5)
WORD = st.text("ab ", min_size=1, max_size=4).filter(str.strip)

FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0, 0.0, 1e-5, 1.0, 1e300]),
    "top_k": st.just(-1) | INT,
    "top_p": SHARE,
    "min_p": st.just(0.0) | SHARE,
    "typical_p": SHARE,
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "repetition_penalty": st.sampled_from([1e-3, 1, 1.5, 1e3]),
    "no_repeat_ngram_size": INT,
    "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), PENALTY, max_size=3),
    "allowed_token_ids": IDS,
    "bad_words": st.lists(WORD | IDS, max_size=300),
    "seed": INT,
    "max_tokens": st.none() | INT,
    "min_tokens": INT,
    "ignore_eos": st.booleans(),
    "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=33),
    "stop": st.none() | WORD | st.lists(WORD, max_size=3),
    "include_stop": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "n": st.sampled_from([1, 2, 1024]),
    "priority": st.sampled_from([-1000, 0, 1000]),
    "queue_timeout": st.none() | st.sampled_from([1e-9, 5, 1e300]),
    "cache_salt": st.none() | st.sampled_from(["a", "ä" * 256]),
    "structured": st.sampled_from(
        [
            StructuredOutput(json_schema={"type": "object", "properties": {"a": {"const": 2**70}}}),
            StructuredOutput(choice=["a", "ä"]),
            StructuredOutput(regex="a+", jump_forward=True),
            StructuredOutput(json_object=True),
        ]
    ),
    "max_thinking_tokens": INT,
    "thinking_start": st.just("<a>") | IDS,
    "thinking_end": st.just("<a>") | IDS,
    "best_of": st.sampled_from([1, 2, 1024]),
    "logprobs": st.sampled_from([0, MAX_LOGPROBS]),
    "prompt_logprobs": st.sampled_from([0, MAX_LOGPROBS]),
}


def spell(text: str) -> list[int]:
    return [ord(letter) % VOCAB for letter in text]


@settings(max_examples=300, deadline=None)
@given(
    fields=st.sets(st.sampled_from([*FIELDS]), max_size=6).flatmap(
        lambda names: st.fixed_dictionaries({name: FIELDS[name] for name in sorted(names)})
    ),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=49),
    seed=st.integers(0, 2**64 - 1),
)
def test_the_engine_process_takes_what_was_admitted(fields, prompt, seed):
    try:
        here = Request.create("a", prompt, SamplingParams(**fields), seed, LIMITS, spell)
    except InvalidRequest:
        assume(False)
    command = decode_for_engine(encode(Submit([_entry(7, here)])))
    assert isinstance(command, Submit)
    (entry,) = command.entries
    assert entry.params.seed is not None
    there = Request.create("b", np.frombuffer(entry.prompt, np.int32), entry.params, entry.params.seed, LIMITS)
    assert (entry.number, there.prompt.tolist()) == (7, prompt)
    assert (there.seed, there.max_tokens) == (here.seed, here.max_tokens)
    assert min(there.params.min_tokens, there.max_tokens) == min(here.params.min_tokens, here.max_tokens)
    for name in ("samples", "stops", "features", "is_held", "wanted_logprobs", "wanted_prompt_logprobs"):
        assert getattr(there.terms, name) == getattr(here.terms, name)
    assert there.terms.stop_ids.tolist() == here.terms.stop_ids.tolist()
    for name in ("restricted", "sequences"):
        assert getattr(there.terms.rules, name) == getattr(here.terms.rules, name)
    told, meant = (
        dict(zip(r.bias_ids.tolist(), r.biases.tolist(), strict=True)) for r in (there.terms.rules, here.terms.rules)
    )
    assert told == meant
    resolved = {"seed", "max_tokens", "min_tokens", "bad_words", "structured"}
    for name in FIELDS.keys() - resolved:
        given_, taken = getattr(here.params, name), getattr(there.params, name)
        assert taken == given_ or [*taken] == [*given_]
    if here.params.structured is not None:
        assert there.params.structured is not None
        assert there.params.structured.source() == here.params.structured.source()
