"""Parameters and prompts that are checked once for many requests: what is shared, and what is looked at again."""

from functools import cached_property, partial

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


PLAIN = st.fixed_dictionaries(
    {},
    optional=dict(
        temperature=st.sampled_from([0, 0.0, 0.6, True]),
        top_k=st.sampled_from([0, 3, False]),
        repetition_penalty=st.sampled_from([1, 1.0, 1.5]),
        ignore_eos=st.sampled_from([False, True, 0]),
        stop_token_ids=st.sampled_from([(), (3,), [4]]),
        allowed_token_ids=st.sampled_from([None, range(9), range(90, 99)]),
        cache_salt=st.sampled_from([None, "a", ""]),
        n=st.sampled_from([1, 2, True]),
        min_tokens=st.sampled_from([0, 4]),
        logprobs=st.sampled_from([None, 0, 2]),
    ),
)
OWN = st.fixed_dictionaries(
    dict(
        max_tokens=st.sampled_from([None, 0, 3, 9, 2.0, True, np.int64(5)]),
        seed=st.sampled_from([None, 0, 7, -1, 2**64, True, np.uint8(7)]),
    )
)


def found(of, params):
    """What is known of parameters, or the message of the refusal."""
    try:
        terms = of(params)
    except InvalidRequest as error:
        return str(error)
    derived = {name: getattr(terms, name) for name in dir(Terms) if isinstance(getattr(Terms, name), cached_property)}
    assert len(derived) > 8
    return derived | dict(params=params, stop_ids=terms.stop_ids.tolist(), biases=terms.rules.biases.tolist())


@given(st.lists(st.tuples(PLAIN, OWN), max_size=6), st.lists(OWN, min_size=2, max_size=4))
def test_parameters_that_are_alike_are_known_as_each_is_alone(several, lengths_and_seeds):
    """Also if what is wrong with one of them equals what is right: True is 1, and both have the same hash."""
    listed = [SamplingParams(**common, **own) for common, own in several]
    listed += [SamplingParams(**common, **own) for common, _ in several[:2] for own in lengths_and_seeds]
    known, kept = KnownTerms(partial(Terms.create, limits=LIMITS)), []

    def of(params):
        kept.append(known.of(params))
        return kept[-1]

    for params in listed:
        assert found(of, params) == found(partial(Terms.create, limits=LIMITS), params)


def test_parameters_that_differ_in_length_and_seed_are_checked_once():
    create = Counting()
    known = KnownTerms(create)
    params = [SamplingParams(temperature=0.5, max_tokens=3 + place, seed=place) for place in range(5)]
    terms = [known.of(own) for own in params]
    assert create.made == 1
    assert [own.params for own in terms] == params
    assert [known.of(own) for own in params] == terms
    assert len({id(own.row_record) for own in terms}) == 1
    for own, message in (dict(max_tokens=0), "max_tokens=0"), (dict(seed=-1), "seed=-1"):
        with pytest.raises(InvalidRequest, match=message):
            known.of(SamplingParams(temperature=0.5, **own))
    known.of(SamplingParams(temperature=0.25))
    assert create.made == 2


def test_a_length_that_is_no_plain_number_is_checked_each_time():
    """It may be anything that calls itself one, and can change."""
    create = Counting()
    known, params = KnownTerms(create), SamplingParams(max_tokens=np.int64(5))
    terms = known.of(params)
    assert known.of(params) is not terms
    assert create.made == 2


class OwnParams(SamplingParams):
    """Parameters with a rule of their own."""

    def validate(self):
        raise InvalidRequest("never")


def test_parameters_of_another_kind_are_not_alike():
    known = KnownTerms(Counting())
    terms = known.of(SamplingParams())
    with pytest.raises(InvalidRequest, match="never"):
        known.of(OwnParams())
    assert terms.params == SamplingParams()


@pytest.mark.parametrize("mode", MODES)
def test_requests_that_differ_in_length_and_seed_give_what_each_gives_alone(mode):
    params = [
        SamplingParams(temperature=0.9, max_tokens=3 + place, seed=place, ignore_eos=True, **others)
        for place in range(4)
        for others in (dict(), dict(logprobs=1), dict(presence_penalty=1.5))
    ]
    prompts = [[5 + place] * (1 + 7 * place) for place in range(len(params))]
    with running(mode) as engine:
        alone = [engine.generate(*given)[0].token_ids for given in zip(prompts, params, strict=True)]
        together = engine.generate(prompts, params)
    assert [output.token_ids for output in together] == alone
    assert list(map(len, alone)) == [own.max_tokens for own in params]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [dict(max_tokens=0), dict(seed=-1), dict(min_tokens=5), dict(temperature=-1)], ids=str)
def test_one_bad_request_behind_many_that_are_alike_starts_nothing(mode, bad):
    good = [SamplingParams(temperature=0, max_tokens=3 + place % 2, ignore_eos=True) for place in range(20)]
    last = SamplingParams(**(dict(temperature=0, max_tokens=3, ignore_eos=True) | bad))
    prompts = [[5, 6, place] for place in range(21)]
    with running(mode, max_waiting=21) as engine:
        free = engine.stats().free_blocks
        with pytest.raises(InvalidRequest, match=rf"{next(iter(bad))}.*, in params\[20\]$"):
            engine.generate(prompts, [*good, last])
        with pytest.raises(InvalidRequest, match=rf"{next(iter(bad))}(?!.*, in )"):
            engine.generate(prompts, last)
        with pytest.raises(InvalidRequest, match=r"prompt\[1\]=512 .*, in prompts\[20\]$"):
            engine.generate([*prompts[:20], [5, 512]], [*good, good[0]])
        stats = engine.stats()
        assert (stats.prompt_tokens, stats.waiting, stats.running, stats.free_blocks) == (0, 0, 0, free)
        outputs = engine.generate(prompts, [*good, good[0]])
        assert [len(output.token_ids) for output in outputs] == [own.max_tokens for own in [*good, good[0]]]


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
    for place, prompt in enumerate(prompts):
        if isinstance(result := checked([prompt]), str):
            one_by_one = result if len(prompts) == 1 else f"{result}, in prompts[{place}]"
            break
        one_by_one += result
    assert checked(prompts) == one_by_one


def test_prompts_that_are_checked_together_are_of_their_own():
    given_ids = np.arange(6, dtype=np.int32)
    first, second = check_prompts([given_ids[:2], given_ids[2:]], 97)
    given_ids[:] = 0
    assert (first.tolist(), second.tolist()) == ([0, 1], [2, 3, 4, 5])
    assert (first.dtype, first.flags.writeable, second.flags.writeable) == (np.int32, False, False)
