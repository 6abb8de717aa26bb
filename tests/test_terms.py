"""Parameters and prompts that are checked once for many requests: what is shared, and what is looked at again."""

import numpy as np
import pytest
from engines import MODES, running
from hypothesis import given
from hypothesis import strategies as st
from watching import PATIENCE

from twostroke import InvalidRequest, SamplingParams
from twostroke.limits import Limits
from twostroke.prompts import check_prompts
from twostroke.terms import KnownTerms, Terms

LIMITS = Limits(vocab_size=97, max_model_len=64, block_size=4, usable_blocks=99)


class Counting:
    """Makes terms, and counts."""

    def __init__(self):
        self.made = 0

    def __call__(self, params):
        self.made += 1
        return Terms.create(params, LIMITS)


def test_parameters_that_cannot_change_are_checked_once_while_a_request_has_them():
    create = Counting()
    known, params = KnownTerms(create), SamplingParams(stop_token_ids=(3, 4), stop=("a", "b"))
    terms = known.of(params)
    assert known.of(params) is terms
    assert create.made == 1
    del terms
    known.of(params)
    assert create.made == 2, "terms of requests that have ended are kept"


class Hashable(list):
    """A list by its identity, as objects are that say nothing else."""

    __hash__ = object.__hash__


@pytest.mark.parametrize(
    "changing",
    [
        *(dict(stop_token_ids=[3]), dict(logit_bias={3: 1.0}), dict(bad_words=[[3]]), dict(stop=["a"]), dict(n=True)),
        *(dict(stop_token_ids=Hashable([3])), dict(stop=Hashable(["a"]))),
    ],
    ids=lambda changing: next(iter(changing)),
)
def test_parameters_that_can_change_are_checked_each_time(changing):
    known = KnownTerms(Counting())
    sound = SamplingParams(n=1)
    terms = known.of(sound)
    params = SamplingParams(**changing)
    if changing == dict(n=True):
        assert params == sound
        with pytest.raises(InvalidRequest, match="n=True"):
            known.of(params)
        return
    (name, value), first = next(iter(changing.items())), known.of(params)
    value.clear()
    again = known.of(params)
    assert again is not first, f"a change of {name} was not seen"
    assert len(again.stop_ids) + len(again.stops) + len(again.rules.biases) == 0
    assert known.of(sound) is terms


def test_tuples_are_constant_if_all_that_they_hold_is():
    known, word = KnownTerms(Counting()), [3]
    constant = SamplingParams(bad_words=((3,), (4, 5)), allowed_token_ids=range(9))
    terms = known.of(constant)
    assert known.of(constant) is terms
    params = SamplingParams(bad_words=((4, 5), word))
    assert known.of(params).rules.bad_words() == [[3], [4, 5]]
    word[0] = 6
    assert known.of(params).rules.bad_words() == [[6], [4, 5]]


def test_a_list_that_changes_between_two_requests_counts_for_the_second():
    """What a request asked for stays as it was when it came."""
    stops = []
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, stop_token_ids=stops)
    with running("sync") as engine:
        tokens = engine.generate([5, 6], params)[0].token_ids
        handle = engine.submit([5, 6], params)
        stops.append(tokens[2])
        assert handle.result(PATIENCE).token_ids == tokens
        assert engine.generate([5, 6], params)[0].token_ids == tokens[: tokens.index(tokens[2]) + 1]
        stops.append(10**6)
        with pytest.raises(InvalidRequest, match=r"stop_token_ids\[1\]=1000000"):
            engine.submit([5, 6], params)


@pytest.mark.parametrize("call", ["generate", "start"])
def test_there_are_parameters_for_all_prompts_of_a_call_or_it_starts_nothing(call):
    with running("sync") as engine:
        begin = getattr(engine, call)
        for params, message in (
            ([SamplingParams()], "params has 1 entry for 2 prompts"),
            ([SamplingParams(), 3], "params=3 must be a SamplingParams"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                begin([[5], [6]], params)
        assert engine.stats().prompt_tokens == 0


@pytest.mark.parametrize("mode", MODES)
def test_prompts_of_one_call_give_what_each_gives_alone(mode):
    prompts = [[5, 6], [7] * 9, [8], list(range(20))]
    params = [SamplingParams(temperature=t, max_tokens=5, ignore_eos=True, seed=3) for t in (0, 1.0)] * 2
    kinds = [list, tuple, np.array, lambda ids: np.array(ids, np.uint8)]
    with running(mode) as engine:
        alone = [engine.generate(*given)[0].token_ids for given in zip(prompts, params, strict=True)]
        for kind in kinds:
            outputs = engine.generate([kind(prompt) for prompt in prompts], params)
            assert [output.token_ids for output in outputs] == alone
            assert [output.prompt_token_ids for output in outputs] == prompts
        mixed = [kind(prompt) for kind, prompt in zip(kinds, prompts, strict=True)]
        assert [output.token_ids for output in engine.generate(mixed, params)] == alone


class Tagged(np.ndarray):
    """A user's kind of array, which is its own in whatever is made of it."""

    data = None


@pytest.mark.parametrize("mode", MODES)
def test_arrays_of_other_kinds_than_numpys_own(mode, tmp_path):
    """Such a prompt ended the engine: what is made of it was of its kind, too."""
    plain, params = np.arange(3, 20, dtype=np.int32), SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    plain.tofile(tmp_path / "ids")
    kinds = [
        np.memmap(tmp_path / "ids", np.int32, "r"),
        plain.view(Tagged),
        plain.view(np.recarray),
        np.ma.array(plain),
        np.ma.array(plain.astype(np.uint8)),
    ]
    with running(mode) as engine:
        expected = engine.generate(plain, params)[0].token_ids
        for ids in kinds:
            assert engine.submit(ids, params).result(PATIENCE).token_ids == expected
            outputs = engine.generate([ids, ids, plain], params)
            assert [output.token_ids for output in outputs] == [expected] * 3
        masked = np.ma.array(plain, mask=[False, True] + [False] * 15)
        for refused in (lambda: engine.submit(masked), lambda: engine.generate([masked, masked])):
            with pytest.raises(InvalidRequest, match=r"prompt\[1\]=masked must be an integer"):
                refused()
        assert engine.generate(plain, params)[0].token_ids == expected


IDS = st.one_of(st.integers(0, 96), st.integers(), st.booleans(), st.floats(), st.none(), st.just("a"))
GOOD = st.lists(st.integers(0, 96), max_size=6)
PROMPTS = st.one_of(
    GOOD,
    GOOD.map(tuple),
    *[GOOD.map(lambda ids, dtype=dtype: np.array(ids, dtype)) for dtype in (np.int64, np.uint8, np.float32)],
    st.lists(IDS, max_size=4),
    st.lists(st.integers(-3, 99), max_size=6).map(lambda ids: np.array(ids, np.int32)),
)


def checked(prompts):
    """The ids, or the message of the refusal."""
    try:
        return [ids.tolist() for ids in check_prompts(prompts, 97)]
    except InvalidRequest as error:
        return str(error)


@given(st.lists(PROMPTS, max_size=5))
def test_prompts_are_refused_together_as_they_are_one_by_one(prompts):
    one_by_one = []
    for prompt in prompts:
        if isinstance(result := checked([prompt]), str):
            one_by_one = result
            break
        one_by_one += result
    assert checked(prompts) == one_by_one


def test_prompts_that_are_checked_together_are_of_their_own():
    given_ids = np.arange(6, dtype=np.int32)
    first, second = check_prompts([given_ids[:2], given_ids[2:]], 97)
    given_ids[:] = 0
    assert (first.tolist(), second.tolist()) == ([0, 1], [2, 3, 4, 5])
    assert (first.dtype, first.flags.writeable, second.flags.writeable) == (np.int32, False, False)
