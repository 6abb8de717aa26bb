"""What is refused at submit, and what at the edge of that is taken: others are untouched, the engine stays healthy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from engines import MODES, running
from watching import PATIENCE, make_handles, quiet

from twostroke import InvalidRequest, SamplingParams

PROMPT, OTHER = list(range(3, 14)), list(range(100, 117))
VOCABULARY, LENGTH = 512, 64


def greedy(max_tokens=8, **others):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **others)


@pytest.fixture(scope="module", params=["sync", "delayed"])
def engine(request):
    with running(request.param, num_blocks=20, max_model_len=LENGTH) as engine:
        yield engine


@pytest.fixture(scope="module")
def tokens(engine):
    return engine.generate(PROMPT, greedy())[0].token_ids


@pytest.fixture(scope="module")
def alone(engine):
    return engine.generate(OTHER, greedy(24))[0].token_ids


@pytest.fixture
def beside(engine, alone):
    """A request that runs meanwhile, must not notice, and finds every block free when it has ended."""
    handle = engine.submit(OTHER, greedy(24))
    yield handle
    assert handle.result(PATIENCE).token_ids == alone
    quiet(engine)


BAD_PROMPTS = {
    "B10 R11 empty": ([], r"prompt=\[\] is empty"),
    "B10 R11 empty array": (np.zeros(0, np.int64), "empty"),
    "C19 R07 vocabulary": ([5, VOCABULARY], rf"prompt\[1\]={VOCABULARY} .*\[0, {VOCABULARY}\)"),
    "C19 R07 far beyond": ([200_000], r"prompt\[0\]=200000"),
    "C19 R07 beyond int64": ([2**70], rf"prompt\[0\]={2**70}"),
    "C19 R07 array": (np.array([4, 600], np.uint64), r"prompt\[1\]=600"),
    "C20 negative": ([-1], r"prompt\[0\]=-1"),
    "C20 negative array": (np.array([-1], np.int8), r"prompt\[0\]=-1"),
    "R07 fraction": ([1, 2.5], r"prompt\[1\]=2.5 must be an integer"),
    "R07 whole float": (np.array([1.0, 2.0]), r"prompt\[0\]=.*1.0.* must be an integer"),
    "R07 bool": ([True], r"prompt\[0\]=True"),
    "R07 none": ([3, None], r"prompt\[1\]=None"),
    "R07 text": ([3, "a"], r"prompt\[1\]='a'"),
    "R07 nested": ([[1, 2]], r"prompt\[0\]=\[1, 2\]"),
    "R07 matrix": (np.ones((2, 2), int), "prompt=array"),
    "R07 scalar": (np.array(3), "prompt=array"),
    "bytes": (b"abc", "prompt=b'abc' must be a string"),
    "mutable bytes": (bytearray(b"abc"), r"prompt=bytearray\(b'abc'\) must be a string"),
    "a view of bytes": (memoryview(b"abc"), "prompt=<memory at .*must be a string"),
    "C19 R07 beyond what has a repr": ([5, 10**5000], r"prompt\[1\]=<int: .*must be a token id"),
    "number": (7, "prompt=7 must be a string"),
    "nothing": (None, "prompt=None must be a string"),
    "text without a tokenizer": ("hello", "prompt='hello': this model has no tokenizer"),
    "R14 B16 as long as the limit": ([5] * LENGTH, rf"{LENGTH} tokens .*max_model_len={LENGTH}"),
    "R02 B01 longer than the cache": ([5] * 305, "305 tokens needs 20 blocks of 16, the cache has 19 usable"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_by_place_and_value(engine, beside, tokens, case):
    prompt, message = BAD_PROMPTS[case]
    with pytest.raises(InvalidRequest, match=message):
        engine.submit(prompt, greedy())
    with pytest.raises(InvalidRequest, match=rf"(?s){message}.*, in prompts\[1\]$"):
        engine.generate([PROMPT, prompt], greedy())
    assert engine.generate(PROMPT, greedy())[0].token_ids == tokens


BAD_PARAMETERS = [
    *[
        ("temperature", value)
        for value in (math.nan, math.inf, -math.inf, 10**400, -1, -0.1, 1e-9, "1", None, True, 1j)
    ],
    *[("top_k", value) for value in (-2, 1.5, "5", None, True)],
    *[("top_p", value) for value in (math.nan, 0, -0.1, 1.1, math.inf, "1", None)],
    *[("min_p", value) for value in (math.nan, -0.1, 1.1, None)],
    *[("max_tokens", value) for value in (0, -1, 1.5, "8", math.nan, True)],
    *[("min_tokens", value) for value in (-1, 9, 1.5, None)],
    *[(name, value) for name in ("presence_penalty", "frequency_penalty") for value in (math.nan, -2e6, "1", None)],
    *[("repetition_penalty", value) for value in (math.nan, 0, -1.0, 1e-4, 1e4, math.inf, "1", None)],
    *[("typical_p", value) for value in (math.nan, 0, -0.1, 1.1, None)],
    *[("no_repeat_ngram_size", value) for value in (-1, 1.5, "2", None, True)],
    *[("logit_bias", value) for value in ([3], "ab", 5, {1.5: 1.0}, {True: 1.0}, {"3": 1.0}, {VOCABULARY: 1.0})],
    *[("logit_bias", {3: value}) for value in (math.nan, math.inf, -2e6, "1", None)],
    *[("allowed_token_ids", value) for value in ([], 5, "ab", [VOCABULARY], [-1], [1.5], [True])],
    *[("bad_words", value) for value in ("ab", 5, ["ab"], [5], [[]], [[VOCABULARY]], [[1.5]], [b"ab"])],
    ("bad_words", [[1, 2], [3] * 2047]),
    ("stop", ["\ud800"]),
    ("bad_words", [[token] for token in range(VOCABULARY)]),
    *[("seed", value) for value in (-1, 2**64, 1.5, "1")],
    *[("priority", value) for value in (-1001, 1001, 1.5, "1", None, True, 1)],
    *[("queue_timeout", value) for value in (0, -1, math.nan, math.inf, "1", True)],
    *[("cache_salt", value) for value in ("", "x" * 257, "\ud800", b"a", 5, True)],
    *[(name, value) for name in ("ignore_eos", "include_stop", "skip_special_tokens") for value in (1, None, "no")],
    *[("stop", value) for value in ("", [""], 5, b"ab", [b"ab"], {"ab"}, [3], [None], "x" * 257)],
    *[("stop_token_ids", value) for value in (None, 5, "ab", [VOCABULARY], [-1], [1.5], [True], list(range(33)))],
]


def shown_parts(value):
    """What a message may say of a value: all of it, its only element, or how a long one begins."""
    parts = [repr(value), repr(value)[:40]]
    if isinstance(value, dict):
        parts += [repr(part) for item in value.items() for part in item]
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
        parts.append(repr(value))
    return parts


@pytest.mark.parametrize(("name", "value"), BAD_PARAMETERS, ids=lambda value: repr(value)[:20])
def test_a_bad_parameter_is_refused_by_name_and_value(engine, beside, tokens, name, value):
    """C03, B09, C18: NaN, infinities, signs, types; max_tokens=0, and ids beyond the vocabulary."""
    params = SamplingParams(**{"max_tokens": 8, "ignore_eos": True, name: value})
    with pytest.raises(InvalidRequest) as refused:
        engine.submit(PROMPT, params)
    message = str(refused.value)
    assert name in message
    assert any(part in message for part in shown_parts(value))
    assert engine.generate(PROMPT, greedy())[0].token_ids == tokens


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, 10**5000) for name in ("temperature", "top_p", "seed")],
        ("top_k", -(10**5000)),
        ("min_tokens", 10**5000),
        ("max_tokens", "8" * 1_000_000),
        ("stop_token_ids", list(range(VOCABULARY)) * 1000),
        ("stop_token_ids", np.array(5)),
        ("stop_token_ids", bytearray(b"ab")),
        ("stop_token_ids", memoryview(b"ab")),
        ("stop", bytearray(b"ab")),
        ("stop", "x" * 1_000_000),
        ("stop", ["x"] * 1_000_000),
        ("stop", [10**5000]),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else type(value).__name__,
)
def test_a_value_that_makes_a_bad_message_is_refused_like_any_other(engine, tokens, name, value):
    """C03, R07: a million tokens, an integer without a repr, an array without dimensions."""
    with pytest.raises(InvalidRequest, match=name) as refused:
        engine.submit(PROMPT, SamplingParams(**{"max_tokens": 8, name: value}))
    assert len(str(refused.value)) < 2000
    assert engine.generate(PROMPT, greedy())[0].token_ids == tokens


@pytest.mark.parametrize("name", ["encoder_repetition_penalty", "forced_eos_token_id"])
def test_a_parameter_that_does_not_exist_is_refused_by_name(name):
    """R08, R12, C24: nothing is accepted and ignored."""
    with pytest.raises(InvalidRequest, match=f"{name}=4 is not a sampling parameter"):
        SamplingParams(**{name: 4})


def test_a_bad_stop_string_is_named_by_its_place(engine):
    """R08: with the characters or strings that there are, and how many there can be."""
    for stop, message in (
        (["a", ""], r"stop\[1\]='' must have 1 to 256 characters, not 0"),
        (["a", "b" * 257], r"stop\[1\]='b+' must have 1 to 256 characters, not 257"),
        (["a", "b", 3], r"stop\[2\]=3 must be a string"),
        (["a"] * 65, r"stop=.* has 65 strings, at most 64"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            SamplingParams(stop=stop).validate()
    SamplingParams(stop=["b" * 256] * 64).validate()


def test_stop_strings_need_a_tokenizer(engine, beside):
    with pytest.raises(InvalidRequest, match=r"stop=\['ab'\]: this model has no tokenizer"):
        engine.submit(PROMPT, greedy(stop=["ab"]))
    with pytest.raises(InvalidRequest, match="stop='ab'"):
        engine.generate([PROMPT, PROMPT], [greedy(), greedy(stop="ab")])


@pytest.mark.parametrize("params", [{"temperature": 0}, "greedy", 3, [greedy(), greedy()], []])
def test_params_of_a_wrong_kind_or_number(engine, params):
    with pytest.raises(InvalidRequest, match="params"):
        engine.generate([PROMPT], params)


@pytest.mark.parametrize("request_id", ["", 5, b"x", ("a",)])
def test_a_bad_request_id(engine, request_id):
    with pytest.raises(InvalidRequest, match="request_id="):
        engine.submit(PROMPT, greedy(), request_id=request_id)


def test_a_request_id_in_use_is_refused_at_once_and_free_after_the_end(engine, beside):
    """B11, R03."""
    for _ in range(3):
        first = engine.submit(PROMPT, greedy(40), request_id="x")
        with pytest.raises(InvalidRequest, match="request_id='x' is in use"):
            engine.submit(OTHER, greedy(), request_id="x")
        other = engine.submit(OTHER, greedy(), request_id="y")
        assert (first.request_id, first.result(PATIENCE).request_id) == ("x", "x")
        assert len(first.result().token_ids) == 40
        assert other.result(PATIENCE).finish_reason == "length"


def test_ids_that_the_engine_makes_never_meet_those_of_users(engine):
    """B11: whoever names a request as the engine would must not hit a request without a name."""
    made = engine.submit(PROMPT, greedy(1)).request_id
    handles = [engine.submit(PROMPT, greedy(1), request_id=f"request-{number}") for number in range(50)]
    assert {handle.result(PATIENCE).finish_reason for handle in handles} == {"length"}
    assert made not in {handle.request_id for handle in handles}


EDGES = {
    "R05 C25 temperature 0": (dict(temperature=0), True),
    "R05 temperature -0.0": (dict(temperature=-0.0), True),
    "numpy numbers": (dict(temperature=np.float32(0), max_tokens=np.int64(8), top_p=np.float64(1)), True),
    "R06 top_k beyond the vocabulary": (dict(temperature=0, top_k=VOCABULARY + 1), True),
    "R06 top_k beyond int64": (dict(temperature=0, top_k=2**70), True),
    "top_k=-1 is off": (dict(temperature=0, top_k=-1), True),
    "top_k=1 is greedy": (dict(temperature=5.0, top_k=1), True),
    "a top_p that keeps one is greedy": (dict(temperature=1.0, top_p=1e-300), True),
    "min_p=1 is greedy": (dict(temperature=5.0, min_p=1), True),
    "the smallest temperature": (dict(temperature=1e-5), True),
    "the largest temperature": (dict(temperature=1e300), False),
    "the largest seed": (dict(seed=2**64 - 1), False),
    "C22 no stop ids": (dict(temperature=0, stop_token_ids=[]), True),
    "C22 no stop strings": (dict(temperature=0, stop=[]), True),
    "stop settings without a stop": (dict(temperature=0, include_stop=True, skip_special_tokens=False), True),
    "32 stop ids": (dict(temperature=0, stop_token_ids=list(range(480, 512)), min_tokens=8), False),
}


@pytest.mark.parametrize("case", EDGES)
def test_a_value_at_the_edge_is_taken(engine, beside, tokens, case):
    settings, same_as_greedy = EDGES[case]
    output = engine.generate(PROMPT, SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **settings}))[0]
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 8
    assert all(0 <= token < VOCABULARY for token in output.token_ids)
    if same_as_greedy:
        assert output.token_ids == tokens


def test_a_top_k_beyond_the_vocabulary_is_no_top_k(engine):
    """R06, with noise."""
    runs = [SamplingParams(seed=3, ignore_eos=True, max_tokens=20, top_k=k) for k in (0, -1, VOCABULARY, 10**9)]
    assert len({tuple(output.token_ids) for output in engine.generate([PROMPT] * 4, runs)}) == 1


@pytest.mark.parametrize("max_tokens", [1, 2, LENGTH - len(PROMPT), 2**31, 2**70, None])
def test_max_tokens_is_exact_and_clamped_to_the_context(engine, beside, tokens, max_tokens):
    """A18, B07: not one token too many; what exceeds the context is clamped and ends with `length`."""
    output = engine.generate(PROMPT, greedy(max_tokens))[0]
    room = LENGTH - len(PROMPT)
    assert len(output.token_ids) == (room if max_tokens is None else min(max_tokens, room))
    assert output.token_ids[:8] == tokens[: len(output.token_ids)]
    assert output.finish_reason == "length"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_a_prompt_that_fills_the_cache_gets_its_one_token(mode, block_size):
    """F05, B02: the last token of a sample needs no position; at one block of one position it is all there is."""
    with running("sync") as engine:
        expected = engine.generate([5] * 3 * block_size, greedy(1))[0].token_ids
        first = engine.generate([5], greedy(1))[0].token_ids
    with running(mode, num_blocks=4, block_size=block_size) as engine:
        assert engine.generate([[5] * 3 * block_size] * 3, greedy(None))[2].token_ids == expected
        with pytest.raises(InvalidRequest, match=f"{3 * block_size + 1} tokens"):
            engine.submit([5] * (3 * block_size + 1), greedy(1))
        quiet(engine)
    with running(mode, num_blocks=2, block_size=1) as engine:
        assert engine.generate([5], greedy(None))[0].token_ids == first
        quiet(engine)


def test_the_longest_prompt(engine, beside):
    output = engine.generate([5] * (LENGTH - 1), greedy(None))[0]
    assert len(output.token_ids) == 1
    assert output.finish_reason == "length"


@pytest.mark.parametrize("mode", MODES)
def test_prompts_that_exceed_the_cache_are_refused_with_the_numbers(mode):
    """B01, B02, B03, B06, R02: 50 blocks of 16, 5 prompts of 1,002 tokens; within max_model_len or not."""
    for length in (None, 2048):
        with running(mode, num_blocks=50, block_size=16, max_model_len=length) as engine:
            before = engine.submit(PROMPT, greedy(30))
            for _ in range(5):
                with pytest.raises(InvalidRequest, match=r"1002 tokens.* 63 blocks of 16.* 49 usable"):
                    engine.submit([7] * 1002, greedy())
            after = engine.submit(PROMPT, greedy(30))
            assert before.result(PATIENCE).token_ids == after.result(PATIENCE).token_ids
            quiet(engine)


@pytest.mark.parametrize("mode", MODES)
def test_one_sample_that_outgrows_the_cache_is_refused_or_clamped(mode):
    """B15, B02: prompt and output need more blocks than there are; without max_tokens the cache is the limit."""
    with running(mode, num_blocks=5, block_size=4, max_model_len=100) as engine:
        with pytest.raises(InvalidRequest, match=r"max_tokens=7: .* 11 tokens and 7 new ones need 5 blocks of 4.* 4"):
            engine.submit(PROMPT, greedy(7))
        handles = make_handles(engine, [PROMPT, PROMPT], [greedy(None), greedy(6)])
        engine._start(handles)
        longest, exact = (handle.result(PATIENCE).token_ids for handle in handles)
        assert len(longest) == 6
        assert longest == exact
        quiet(engine)


@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_longer_than_the_models_positions(mode):
    """R14: with blocks enough for it."""
    with running(mode, num_blocks=200, block_size=16) as engine:
        assert engine.max_model_len == 2048
        with pytest.raises(InvalidRequest, match="2048 tokens leaves no room for output: max_model_len=2048"):
            engine.submit([7] * 2048, greedy())
        quiet(engine)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allowed_token_ids", np.array([3, 4])),
        ("bad_words", np.array([[3, 4], [5, 6]])),
        ("logit_bias", {3: 1.0}),
        ("presence_penalty", 1.0),
    ],
)
def test_what_needs_a_ledger_is_refused_by_name_where_there_are_none(name, value):
    """Arrays, too, and empty lists do not count."""
    with running("sync", max_ledgers=0) as engine:
        for empty in ({}, {"logit_bias": {}, "bad_words": []}):
            with pytest.raises(InvalidRequest, match=rf"(?s){name}=.* needs a ledger, but max_ledgers=0"):
                engine.submit(PROMPT, greedy(**{**empty, name: value}))
