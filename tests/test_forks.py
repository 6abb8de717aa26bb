"""Several samples of one prompt, under every loop: n samples are n requests with their seeds, but one prompt."""

from __future__ import annotations

import asyncio

import pytest
from engines import MODES, running
from reference import check_greedy
from sampling_oracle import Reference, make_prompt
from watching import PATIENCE, quiet

from twostroke import InvalidRequest, SamplingParams
from twostroke.request import mix_seed

NEW = 20
LENGTHS = (1, 2, 15, 16, 17, 33)
"""Prompts that end before, at and after a block's edge."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return Reference(tmp_path_factory.mktemp("llama"))


def sampled(seed=17, n=1, **params):
    return SamplingParams(**{"temperature": 1.0, "max_tokens": NEW, "ignore_eos": True, "seed": seed, "n": n, **params})


@pytest.fixture(scope="module")
def alone(reference):
    """Tokens of four samples of each prompt, each a request of its own, one after the other."""
    with running("sync", reference.directory, prefix_cache=False) as engine:
        return {
            length: [
                engine.generate(make_prompt(length), sampled(mix_seed(17, index)))[0].token_ids for index in range(4)
            ]
            for length in LENGTHS
        }


def tokens_of(output):
    return [sample.token_ids for sample in output.outputs]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefix_cache": False},
        {"max_chunk_tokens": 5},
        {"max_rows": 3, "prefix_cache": False},
        {"max_rows": 1},
        {"max_step_tokens": 3, "block_size": 1},
    ],
    ids=str,
)
def test_c24_g01_r12_n_samples_are_n_requests_with_their_seeds(reference, alone, mode, options):
    """In any batch, also one narrower than the request."""
    lengths = LENGTHS[::2] if "block_size" in options or options.get("max_rows") == 1 else LENGTHS  # of many steps
    with running(mode, reference.directory, **options) as engine:
        outputs = engine.generate([make_prompt(length) for length in lengths], sampled(n=4))
        quiet(engine)
    for length, output in zip(lengths, outputs, strict=True):
        assert tokens_of(output) == alone[length]
        assert [sample.index for sample in output.outputs] == [0, 1, 2, 3]
        assert [sample.seed for sample in output.outputs] == [mix_seed(17, index) for index in range(4)]
        assert {sample.finish_reason for sample in output.outputs} == {"length"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", [{}, {"max_chunk_tokens": 5}, {"prefix_cache": False}], ids=str)
def test_preempted_forks_give_the_same_tokens(reference, alone, mode, options):
    with running(mode, reference.directory, num_blocks=10, **options) as engine:
        outputs = engine.generate([make_prompt(length) for length in LENGTHS], sampled(n=4))
        assert engine.stats().preemptions > 0
        quiet(engine)
    assert sum(sample.preemptions for output in outputs for sample in output.outputs if sample.index) > 0
    for length, output in zip(LENGTHS, outputs, strict=True):
        assert tokens_of(output) == alone[length]


@pytest.mark.parametrize("mode", MODES)
def test_c11_samples_differ_but_for_greedy_ones(reference, mode):
    with running(mode, reference.directory) as engine:
        unseeded, greedy = engine.generate([make_prompt(9)] * 2, [sampled(seed=None, n=5), sampled(temperature=0, n=3)])
    assert len({tuple(tokens) for tokens in tokens_of(unseeded)}) == 5
    assert len({sample.seed for sample in unseeded.outputs}) == 5
    first, *others = tokens_of(greedy)
    assert others == [first] * 2
    check_greedy(reference.model, make_prompt(9), first)


@pytest.mark.parametrize("mode", MODES)
def test_the_prompt_is_computed_once(reference, mode):
    """The chunks of a request of 40 tokens and 6 samples: 40 tokens, and one for each fork."""
    with running(mode, reference.directory, prefix_cache=False) as engine:
        seen = []
        original = engine._parts.runner.launch
        engine._parts.runner.launch = lambda plan, slot: (seen.append(len(plan.prompt_tokens)), original(plan, slot))
        engine.generate(make_prompt(40), sampled(n=6))
    assert sum(seen) == 40 + 5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_stream_gives_the_deltas_of_every_sample(reference, alone, mode, asynchronous):
    async def collect(handle):
        return [delta async for delta in handle]

    with running(mode, reference.directory) as engine:
        handle = engine.stream(make_prompt(17), sampled(n=4))
        deltas = asyncio.run(collect(handle)) if asynchronous else list(handle)
        output = handle.result(PATIENCE)
    for index, tokens in enumerate(alone[17]):
        own = [delta for delta in deltas if delta.index == index]
        assert [token for delta in own for token in delta.token_ids] == tokens == output.outputs[index].token_ids
        assert [delta.finish_reason for delta in own] == [None] * (len(own) - 1) + ["length"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("index", [None, 0, 2])
@pytest.mark.parametrize("streamed", [False, True])
def test_cancel_ends_one_sample_or_all(reference, alone, mode, index, streamed):
    """Also the sample that is to compute the prompt for the others; who goes on is not hurt."""
    with running(mode, reference.directory, max_rows=3) as engine:
        handle = (engine.stream if streamed else engine.submit)(make_prompt(33), sampled(n=4))
        handle.cancel(index)
        output = handle.result(PATIENCE)
        quiet(engine)
    for sample in output.outputs:
        if index in (None, sample.index):
            assert sample.finish_reason in ("cancelled", "length")
            assert sample.token_ids == alone[33][sample.index][: len(sample.token_ids)]
        else:
            assert (sample.finish_reason, sample.token_ids) == ("length", alone[33][sample.index])


@pytest.mark.parametrize("mode", MODES)
def test_each_sample_stops_by_itself(reference, alone, mode):
    stop = alone[17][1][3]
    with running(mode, reference.directory) as engine:
        (output,) = engine.generate(make_prompt(17), sampled(n=4, stop_token_ids=[stop]))
    for tokens, sample in zip(alone[17], output.outputs, strict=True):
        wanted = tokens[: tokens.index(stop) + 1] if stop in tokens else tokens
        assert (sample.token_ids, sample.finish_reason) == (wanted, "stop" if stop in tokens else "length")
    assert output.outputs[1].finish_reason == "stop"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("new", [1, 2])
def test_a_prompt_whose_samples_end_at_once(reference, alone, mode, new):
    """The first sample may have ended before its forks could start."""
    with running(mode, reference.directory, max_rows=2, prefix_cache=False) as engine:
        (output,) = engine.generate(make_prompt(33), sampled(n=4, max_tokens=new))
        quiet(engine)
    assert tokens_of(output) == [tokens[:new] for tokens in alone[33]]


def test_the_mix_of_seed_and_index_is_fixed():
    """Sample 0 has the seed itself. The others are what splitmix64 gives, whose first outputs from 0 are well known."""
    assert mix_seed(0, 1) == 0xE220A8397B1DCDAF
    assert mix_seed(0, 2) == 0x6E789E6AA1B965F4
    assert [mix_seed(seed, 0) for seed in (0, 5, 2**64 - 1)] == [0, 5, 2**64 - 1]
    assert all(0 <= mix_seed(2**64 - 1, index) < 2**64 for index in range(100))


@pytest.mark.parametrize(("value", "message"), [(0, "n=0 must be at least 1"), (1025, "n=1025 must be at most 1024")])
def test_n_out_of_range_is_refused(value, message):
    with running("sync") as engine, pytest.raises(InvalidRequest, match=message):
        engine.submit([1, 2], SamplingParams(n=value))


def test_n_must_be_an_integer():
    for value in (2.0, "2", True, None):
        with pytest.raises(InvalidRequest, match=r"n=.* must be an integer"):
            SamplingParams(n=value).validate()
