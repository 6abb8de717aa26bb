"""Where a sample ends: end-of-sequence and stop token ids, min_tokens, max_tokens, under every loop."""

from __future__ import annotations

import numpy as np
import pytest
from engines import MODES, running
from sampling_oracle import EOS, VOCAB, Reference, make_prompt

from twostroke import SamplingParams
from twostroke.sampling_params import MAX_STOP_IDS

SAMPLED = {"temperature": 1.0, "seed": 21}
KINDS = [{"temperature": 0}, SAMPLED, {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "seed": 22}]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return Reference(tmp_path_factory.mktemp("llama"))


def run_one(engine, prompt, **params):
    return engine.generate(prompt, SamplingParams(**params))[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_no_stop_id_comes_before_min_tokens(reference, mode, kind):
    """C13, C15: all end-of-sequence and stop ids are barred, and the rest is sampled as if they were not there."""
    prompt = make_prompt(5)
    with running(mode, reference.directory) as engine:
        plain = run_one(engine, prompt, **kind, max_tokens=12, ignore_eos=True)
        stops = sorted({*plain.token_ids, *range(40, 56)})
        params = SamplingParams(**kind, stop_token_ids=stops, min_tokens=10, max_tokens=200)
        output = engine.generate([prompt, make_prompt(9)], [params, SamplingParams(max_tokens=12)])[0]
        soon = run_one(engine, prompt, **kind, stop_token_ids=stops, max_tokens=200)
    barred = {*stops, *EOS}
    assert len(soon.token_ids) == 1
    assert not barred & set(output.token_ids[:10])
    assert not barred & set(output.token_ids[:-1])
    assert output.token_ids[-1] in barred
    assert output.finish_reason == "stop"
    reference.check(prompt, output.token_ids, params, barred=sorted(barred))


@pytest.mark.parametrize("mode", MODES)
def test_each_stop_id_stops(reference, mode):
    """Among as many as a row has room for; the highest of the tokens takes the last place there."""
    prompt = make_prompt(6)
    with running(mode, reference.directory) as engine:
        plain = run_one(engine, prompt, **SAMPLED, max_tokens=30, ignore_eos=True).token_ids
        others = [token for token in range(VOCAB) if token not in plain][: MAX_STOP_IDS - 1]
        assert max(plain) > max(others)
        for stop in set(plain):
            output = run_one(engine, prompt, **SAMPLED, max_tokens=30, ignore_eos=True, stop_token_ids=[*others, stop])
            assert output.token_ids == plain[: plain.index(stop) + 1]
            assert output.finish_reason == "stop"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("eos", EOS)
def test_ignore_eos_covers_every_id_of_the_generation_configuration(reference, mode, eos):
    """C16: exactly as many tokens as asked for, and explicit stop ids still stop.

    A seed is looked for with which the end-of-sequence id comes early.
    """
    prompt = make_prompt(4)
    many = [SamplingParams(temperature=3.0, seed=seed, ignore_eos=True, max_tokens=64) for seed in range(12)]
    with running(mode, reference.directory) as engine:
        outputs = engine.generate([prompt] * len(many), many)
        assert all(len(output.token_ids) == 64 and output.finish_reason == "length" for output in outputs)
        seed, ids = next((output.seed, output.token_ids) for output in outputs if eos in output.token_ids)
        kind = {"temperature": 3.0, "seed": seed, "max_tokens": 64}
        stopped = run_one(engine, prompt, **kind)
        explicit = run_one(engine, prompt, **kind, ignore_eos=True, stop_token_ids=[eos])
    assert stopped.token_ids == ids[: min(ids.index(token) for token in EOS if token in ids) + 1]
    assert explicit.token_ids == ids[: ids.index(eos) + 1]
    assert stopped.finish_reason == explicit.finish_reason == "stop"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_exactly_max_tokens_and_no_step_more(reference, mode, kind):
    """A18, A35: a token a step, each the one that a longer run has there, and none beyond the limit."""
    prompt = make_prompt(7)
    with running(mode, reference.directory) as engine:
        longest = run_one(engine, prompt, **kind, max_tokens=20, ignore_eos=True)
        assert len(longest.token_ids) == 20
        for max_tokens in (1, 2, 3, 17, 19):
            output = run_one(engine, prompt, **kind, max_tokens=max_tokens, ignore_eos=True)
            assert output.token_ids == longest.token_ids[:max_tokens]
            assert output.finish_reason == "length"
    assert engine.stats().steps == 20 + 1 + 2 + 3 + 17 + 19


@pytest.mark.parametrize("mode", MODES)
def test_a_stop_id_ends_a_sample_after_at_most_a_step_per_slot_in_flight(reference, mode):
    """A19: what was launched before the stop was known runs, nothing after it."""
    with running(mode, reference.directory) as engine:
        tokens = run_one(engine, make_prompt(7), **SAMPLED, max_tokens=8, ignore_eos=True).token_ids
        before = engine.stats().steps
        stopped = run_one(engine, make_prompt(7), **SAMPLED, ignore_eos=True, stop_token_ids=tokens[-1:])
        in_flight = {"sync": 1, "async3": 3}.get(mode, 2)
    steps = engine.stats().steps - before
    assert stopped.token_ids == tokens[: tokens.index(tokens[-1]) + 1]
    assert 0 <= steps - len(stopped.token_ids) < in_flight


@pytest.mark.parametrize("mode", MODES)
def test_a_stop_id_as_the_last_token_allowed_is_a_stop(reference, mode):
    """Both ends at once: the stop token came, so the reason is `stop`."""
    with running(mode, reference.directory) as engine:
        tokens = run_one(engine, make_prompt(7), **SAMPLED, max_tokens=8, ignore_eos=True).token_ids
        place = next(i for i in range(7, 0, -1) if tokens[i] not in tokens[:i])
        output = run_one(
            engine, make_prompt(7), **SAMPLED, max_tokens=place + 1, ignore_eos=True, stop_token_ids=[tokens[place]]
        )
    assert output.token_ids == tokens[: place + 1]
    assert output.finish_reason == "stop"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_blocks", [None, 8])
def test_every_length_and_stop_is_kept_when_many_run_together(reference, mode, num_blocks):
    """Lanes move as samples end at different steps; with few blocks samples are preempted, too."""
    rng = np.random.default_rng(3)
    requests = [
        (
            make_prompt(int(rng.integers(1, 40))),
            SamplingParams(
                temperature=1.5,
                seed=seed,
                max_tokens=int(rng.integers(1, 40)),
                ignore_eos=True,
                stop_token_ids=rng.integers(0, VOCAB, 8).tolist(),
            ),
        )
        for seed in range(24)
    ]
    with running(mode, reference.directory, num_blocks=num_blocks) as engine:
        outputs = engine.generate(*map(list, zip(*requests, strict=True)))
        assert (engine.stats().preemptions > 0) == (num_blocks is not None)
    reasons = set()
    for (prompt, params), output in zip(requests, outputs, strict=True):
        reference.check(prompt, output.token_ids, params)
        stopped = output.token_ids[-1] in params.stop_token_ids
        assert output.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(output.token_ids) == params.max_tokens
        assert not set(params.stop_token_ids) & set(output.token_ids[:-1])
        reasons.add(output.finish_reason)
    assert len(reasons) == 2


@pytest.mark.parametrize("mode", MODES)
def test_nothing_stops_a_sample_whose_min_tokens_are_its_max_tokens(reference, mode):
    """With as many stop ids as a row has room for, each of them likely."""
    prompt, stops = make_prompt(3), list(range(8, 6 + MAX_STOP_IDS))
    kind = {"temperature": 30.0, "seed": 1, "max_tokens": 60}
    with running(mode, reference.directory) as engine:
        free = run_one(engine, prompt, **kind, ignore_eos=True)
        barred = run_one(engine, prompt, **kind, min_tokens=60, stop_token_ids=stops)
    assert len({*stops, *EOS}) == MAX_STOP_IDS
    assert len({*stops, *EOS} & set(free.token_ids)) > 3
    assert len(barred.token_ids) == 60
    assert barred.finish_reason == "length"
    assert not {*stops, *EOS} & set(barred.token_ids)
