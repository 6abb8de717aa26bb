"""Sampling through the engine: seeds and filters, under every loop, against first principles and transformers."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
import transformers
from engines import MODES, running
from sampling_oracle import VOCAB, Reference, make_prompt, philox4x32

from twostroke import SamplingParams

NEW = 24
TEMPERATURES = (0.7, 1.0, 3.0)
FILTERS = [
    {},
    {"top_k": 12},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.02},
]
CASES = [{"temperature": temperature, **filters} for temperature in TEMPERATURES for filters in FILTERS]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return Reference(tmp_path_factory.mktemp("llama"))


def seeded(seed, **params):
    return SamplingParams(seed=seed, **{"temperature": 1.0, "max_tokens": NEW, "ignore_eos": True, **params})


REQUESTS = [(make_prompt(3 * i + 1), seeded(1000 + i, **case)) for i, case in enumerate(CASES)]


@pytest.fixture(scope="module")
def expected(reference):
    """Tokens of each of `REQUESTS` with the engine to itself, under the synchronous loop."""
    with running("sync", reference.directory) as engine:
        return [engine.generate(*request)[0].token_ids for request in REQUESTS]


def run_all(engine, requests=REQUESTS):
    prompts, params = zip(*requests, strict=True)
    return engine.generate(list(prompts), list(params))


def tokens_of(outputs):
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_chunk_tokens": 1},
        {"max_chunk_tokens": 5},
        {"max_step_tokens": 3},
        {"max_rows": 2, "block_size": 1},
    ],
    ids=str,
)
def test_a_seeded_sample_does_not_depend_on_how_it_runs(reference, expected, mode, options):
    """Loop, batch mates, chunks, step budget, and rows that others had before."""
    with running(mode, reference.directory, **options) as engine:
        assert tokens_of(run_all(engine)) == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk", [None, 5])
def test_a_seeded_sample_does_not_depend_on_preemption(reference, expected, mode, chunk):
    """C07: the output index, not the row's history, is what the random numbers hang on."""
    with running(mode, reference.directory, num_blocks=10, max_chunk_tokens=chunk) as engine:
        outputs = run_all(engine)
    assert tokens_of(outputs) == expected
    assert sum(output.preemptions > 0 for output in outputs) >= 3


@pytest.mark.parametrize("mode", MODES)
def test_a_seeded_sample_does_not_depend_on_its_neighbours_or_order(reference, expected, mode):
    """C06, C10: unseeded and greedy mates come, go, and leave nothing behind."""
    mates = [
        (make_prompt(5), SamplingParams(temperature=1.5, top_k=3, max_tokens=7)),
        (make_prompt(9), SamplingParams(temperature=0, max_tokens=11)),
        (make_prompt(2), SamplingParams(temperature=0.7, min_p=0.9, min_tokens=5, stop_token_ids=[3], max_tokens=19)),
    ]
    mixed = [*enumerate(REQUESTS), *((None, mate) for mate in mates * 4)]
    random.Random(4).shuffle(mixed)
    with running(mode, reference.directory) as engine:
        for _ in range(2):
            outputs = run_all(engine, [request for _, request in mixed])
            for (place, _), output in zip(mixed, outputs, strict=True):
                assert place is None or output.token_ids == expected[place]
            mixed.reverse()


@pytest.mark.parametrize("mode", MODES)
def test_copies_with_a_seed_are_equal_and_copies_without_differ(reference, mode):
    """C09, C11. The seed that the engine drew is in the result and gives the same tokens again."""
    prompt = make_prompt(6)
    same, other = seeded(5), SamplingParams(temperature=1.0, max_tokens=NEW, ignore_eos=True)
    with running(mode, reference.directory) as engine:
        outputs = run_all(engine, [(prompt, same), (prompt, other), (prompt, same), (prompt, other), (prompt, other)])
        a, x, b, y, z = tokens_of(outputs)
        assert a == b
        assert len({tuple(tokens) for tokens in (a, x, y, z)}) == 4
        assert len({output.seed for output in outputs}) == 4
        assert outputs[0].seed == 5
        assert engine.generate(prompt, seeded(outputs[1].seed))[0].token_ids == x


def test_the_engines_seed_gives_the_seeds_of_unseeded_requests(reference):
    params = SamplingParams(temperature=1.0, max_tokens=4)
    runs = []
    for seed in (1, 1, 2):
        with running("async", reference.directory, seed=seed) as engine:
            runs.append([output.seed for output in engine.generate([make_prompt(4)] * 3, params)])
    assert runs[0] == runs[1]
    assert not set(runs[0]) & set(runs[2])


def test_every_bit_of_the_seed_counts(reference):
    seeds = [0, *(1 << bit for bit in range(64)), 2**64 - 1]
    with running("async", reference.directory, max_rows=64) as engine:
        outputs = run_all(engine, [(make_prompt(3), seeded(seed, temperature=3.0, max_tokens=8)) for seed in seeds])
    assert [output.seed for output in outputs] == seeds
    assert len({tuple(output.token_ids) for output in outputs}) == len(seeds)


@pytest.mark.parametrize("mode", MODES)
def test_each_parameter_changes_the_output(reference, mode):
    """A04: a parameter that is accepted and dropped would show here."""
    changes = [
        {},
        {"temperature": 0.7},
        {"temperature": 0.0},
        {"top_k": 5},
        {"top_p": 0.3},
        {"min_p": 0.5},
        {"seed": 18},
        {"max_tokens": 5},
    ]
    prompt = make_prompt(8)
    with running(mode, reference.directory) as engine:
        plain, *others = tokens_of(
            run_all(engine, [(prompt, seeded(**{"seed": 17, "temperature": 3.0, **change})) for change in changes])
        )
        assert len({tuple(tokens) for tokens in (plain, *others)}) == len(changes)
        stop = plain[9]
        first = plain.index(stop)
        stopped, late = run_all(
            engine,
            [
                (prompt, seeded(17, temperature=3.0, stop_token_ids=[stop])),
                (prompt, seeded(17, temperature=3.0, stop_token_ids=[stop], min_tokens=first + 1)),
            ],
        )
    assert stopped.token_ids == plain[: first + 1]
    assert late.token_ids[:first] == plain[:first]
    assert late.token_ids[first] != stop


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_the_oracles_random_numbers_are_the_published_ones(counter, key, words):
    """The known answers that come with the paper's own library."""
    assert philox4x32(counter, key) == words


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_first_principles(reference, mode):
    seeds = itertools.cycle([0, 12345, 2**32, 2**64 - 1, 0x9E3779B97F4A7C15])
    cases = [*CASES, {"temperature": 0}, {"temperature": 1e-5}, {"top_k": 1}, {"top_k": VOCAB - 1, "top_p": 0.999}]
    requests = [(make_prompt(5 + i), seeded(next(seeds), **case, max_tokens=16)) for i, case in enumerate(cases)]
    with running(mode, reference.directory) as engine:
        outputs = run_all(engine, requests)
    for output, (_, params) in zip(outputs, requests, strict=True):
        assert len(output.token_ids) == 16
        reference.check(output.prompt_token_ids, output.token_ids, params)


def warp(logits, params):
    """Scores [.., V] after transformers' own filters, -inf where a token is not kept."""
    warpers = [transformers.TemperatureLogitsWarper(params.temperature)]
    if params.top_k:
        warpers.append(transformers.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(transformers.TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(transformers.MinPLogitsWarper(params.min_p))
    if params.typical_p < 1:
        warpers.append(transformers.TypicalLogitsWarper(params.typical_p))
    for warper in warpers:
        logits = warper(None, logits)
    return logits


@pytest.mark.parametrize("mode", MODES)
def test_every_token_lies_in_the_kept_set_of_transformers(reference, mode):
    with running(mode, reference.directory) as engine:
        outputs = run_all(engine)
    narrow = 0
    for output, (_, params) in zip(outputs, REQUESTS, strict=True):
        kept = warp(reference.logits(output.prompt_token_ids, output.token_ids), params).isfinite()
        assert kept[torch.arange(NEW), output.token_ids].all(), params
        narrow += int((kept.sum(1) < VOCAB).all())
    assert narrow == len(TEMPERATURES) * (len(FILTERS) - 1)


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 8},
        {"top_p": 0.3},
        {"min_p": 0.4},
        {"typical_p": 0.1},
        {"top_k": 20, "top_p": 0.5, "min_p": 0.3},
        {"top_k": 40, "typical_p": 0.4},
    ],
)
def test_tokens_follow_the_distribution(reference, filters):
    """Chi-squared of the first token over the seeds 0..999; the seeds are fixed, and of 10,000 sets of seeds a right
    sampler fails on one. Every kept token comes."""
    prompt = make_prompt(7)
    requests = [(prompt, seeded(seed, temperature=2.0, **filters, max_tokens=1)) for seed in range(1000)]
    with running("async", reference.directory, max_rows=64) as engine:
        drawn = [tokens[0] for tokens in tokens_of(run_all(engine, requests))]
    probabilities = warp(reference.logits(prompt, [0]), requests[0][1]).softmax(-1)[0].double().numpy()
    kept = np.flatnonzero(probabilities)
    counts = np.bincount(drawn, minlength=VOCAB)
    assert 5 <= len(kept) <= 20
    assert set(np.flatnonzero(counts)) == set(kept)
    wanted = probabilities[kept] * len(drawn)
    assert wanted.min() > 5
    statistic = ((counts[kept] - wanted) ** 2 / wanted).sum()
    tail = torch.special.gammaincc(torch.tensor((len(kept) - 1) / 2), torch.tensor(statistic / 2))
    assert tail > 1e-4


@pytest.mark.parametrize("mode", MODES)
def test_what_equals_greedy(reference, mode):
    """C25: with any seed, and also as the narrowest setting of each filter."""
    prompt = make_prompt(11)
    greedy = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    equals = [
        seeded(1, temperature=0),
        seeded(2**64 - 1, temperature=0, top_k=3, top_p=0.5, min_p=0.1),
        seeded(3, top_k=1),
        seeded(4, temperature=3.0, top_p=1e-9),
        seeded(5, temperature=3.0, min_p=1.0),
        seeded(6, temperature=1e-5),
    ]
    with running(mode, reference.directory) as engine:
        first, *others = tokens_of(run_all(engine, [(prompt, params) for params in (greedy, *equals)]))
    reference.check(prompt, first, greedy)
    assert others == [first] * len(equals)


@pytest.mark.parametrize("mode", MODES)
def test_what_equals_no_filter(reference, mode):
    """R06: more than the vocabulary is everything."""
    prompt = make_prompt(11)
    off = [{}, {"top_k": 0}, {"top_k": -1}, {"top_k": VOCAB}, {"top_k": VOCAB + 1}, {"top_k": 2**31 - 1}]
    off += [{"top_k": 2**40}, {"top_p": 1.0}, {"top_p": 1}, {"min_p": 0.0}, {"min_p": 0}]
    with running(mode, reference.directory) as engine:
        first, *others = tokens_of(
            run_all(engine, [(prompt, seeded(9, temperature=3.0, **filters)) for filters in off])
        )
    assert others == [first] * len(others)
