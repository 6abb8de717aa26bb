"""Log-probabilities through the engine, under every loop, against transformers' own log_softmax."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from engines import MODES, running
from sampling_oracle import Reference, keep, make_prompt, scale
from scripted import Scripted
from watching import PATIENCE, Turns, make_handles, quiet

from twostroke import InvalidRequest, SamplingParams
from twostroke.request import FinishReason, Timings
from twostroke.text.output import SampleOutput, best

NEW = 18
CLOSE = 1e-4
LENGTHS = (1, 2, 3, 16, 17, 40)
OPTIONS = [
    {},
    {"max_chunk_tokens": 5},
    {"max_step_tokens": 3, "block_size": 1},
    {"num_blocks": 12},
    {"num_blocks": 12, "max_chunk_tokens": 3, "prefix_cache": False},
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return Reference(tmp_path_factory.mktemp("llama"))


def sampled(seed=17, **params):
    return SamplingParams(**{"temperature": 1.0, "max_tokens": NEW, "ignore_eos": True, "seed": seed, **params})


CASES = [
    {"logprobs": 0},
    {"logprobs": 5, "temperature": 0.5},
    {"logprobs": 20, "temperature": 0},
    {"logprobs": 1, "top_k": 7, "top_p": 0.8},
    {},
    {"logprobs": 3, "min_p": 0.2, "n": 3},
    {"logprobs": 2, "min_tokens": NEW, "ignore_eos": False, "stop_token_ids": [1, 2, 3]},
]
REQUESTS = [(make_prompt(3 + 5 * place), sampled(40 + place, **case)) for place, case in enumerate(CASES)]


def check_token(entry, logits, top):
    """One entry against the reference's logits, float32 [V]."""
    logprobs = logits.double().log_softmax(-1)
    assert entry.logprob == pytest.approx(float(logprobs[entry.token_id]), abs=CLOSE)
    assert abs(entry.rank - 1 - int((logits > logits[entry.token_id]).sum())) <= int(
        ((logits - logits[entry.token_id]).abs() < 1e-3).sum()
    )
    assert len(entry.top) == top
    assert list(entry.top.values()) == pytest.approx(logprobs.topk(top).values.tolist(), abs=CLOSE)
    assert all(value == pytest.approx(float(logprobs[token]), abs=CLOSE) for token, value in entry.top.items())
    assert sorted(entry.top.values(), reverse=True) == list(entry.top.values())


def check_sample(reference, prompt, sample, params):
    if params.logprobs is None:
        assert sample.logprobs is None
        return
    logits = reference.logits(prompt, sample.token_ids)
    assert [entry.token_id for entry in sample.logprobs] == sample.token_ids
    for index, (entry, row) in enumerate(zip(sample.logprobs, logits, strict=True)):
        check_token(entry, row, params.logprobs)
        barred = [1, 2, 3, 7, 256] if index < params.min_tokens else []
        scaled = scale(row.numpy(), params, barred)
        kept = np.where(keep(scaled, params), scaled, -np.inf)
        exact = kept[entry.token_id] - kept.max() - np.log(np.exp(kept - kept.max()).sum())
        assert entry.sampling_logprob == pytest.approx(exact if params.temperature else 0.0, abs=1e-3)
    assert sample.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in sample.logprobs))


@pytest.fixture(scope="module")
def plain(reference):
    """The tokens without log-probabilities."""
    with running("sync", reference.directory) as engine:
        outputs = [engine.generate(prompt, replace(params, logprobs=None))[0] for prompt, params in REQUESTS]
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_e08_a34_logprobs_are_raw_and_belong_to_their_tokens(reference, plain, mode, options):
    """Whatever the temperature and the filters, and in any batch; beside them the chance that the token had."""
    with running(mode, reference.directory, **options) as engine:
        outputs = engine.generate(*map(list, zip(*REQUESTS, strict=True)))
        assert (engine.stats().preemptions > 0) == ("num_blocks" in options)
        quiet(engine)
    for (prompt, params), output, tokens in zip(REQUESTS, outputs, plain, strict=True):
        assert [sample.token_ids for sample in output.outputs] == tokens
        for sample in output.outputs:
            check_sample(reference, prompt, sample, params)


@pytest.mark.parametrize("mode", MODES)
def test_e05_e06_streams_carry_the_logprobs_of_their_tokens(reference, mode):
    with running(mode, reference.directory, max_chunk_tokens=5) as engine:
        handles = [engine.stream(*request) for request in REQUESTS]
        for (prompt, params), handle in zip(REQUESTS, handles, strict=True):
            deltas = list(handle)
            for sample in handle.result().outputs:
                own = [delta for delta in deltas if delta.index == sample.index]
                if params.logprobs is None:
                    assert all(delta.logprobs is None for delta in own)
                    continue
                assert all(len(delta.logprobs) == len(delta.token_ids) for delta in own)
                assert [entry for delta in own for entry in delta.logprobs] == sample.logprobs
                check_sample(reference, prompt, sample, params)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_e01_e02_prompt_logprobs_are_those_of_the_prompts_tokens(reference, mode, options):
    """The first is None, the others are given what is before them; also of a prompt that the cache knows."""
    requests = [(make_prompt(length), sampled(prompt_logprobs=2, logprobs=1)) for length in LENGTHS]
    requests += [(make_prompt(length), sampled(prompt_logprobs=0, n=2)) for length in LENGTHS[2:]]
    requests += [(make_prompt(40), sampled())] * 2
    with running(mode, reference.directory, **options) as engine:
        engine.generate(make_prompt(40), sampled(max_tokens=1))
        outputs = engine.generate(*map(list, zip(*requests, strict=True)))
        assert (engine.stats().preemptions > 0) == ("num_blocks" in options)
        quiet(engine)
    for (prompt, params), output in zip(requests, outputs, strict=True):
        if params.prompt_logprobs is None:
            assert output.prompt_logprobs is None
            continue
        first, *others = output.prompt_logprobs
        assert first is None
        assert [entry.token_id for entry in others] == prompt[1:]
        for entry, logits in zip(others, reference.logits(prompt[:1], prompt[1:]), strict=True):
            check_token(entry, logits, params.prompt_logprobs)
            assert entry.sampling_logprob is None
        check_sample(reference, prompt, output.outputs[0], params)


@pytest.mark.parametrize("mode", MODES)
def test_who_takes_over_a_prompt_scores_it(reference, mode):
    """The sample that computes the prompt is cancelled before, amid and after it, and then the one in its place."""
    prompt, params = make_prompt(20), sampled(prompt_logprobs=2, n=3, max_tokens=4)
    with running(mode, reference.directory, max_chunk_tokens=3, prefix_cache=False) as engine:
        (whole,) = engine.generate(prompt, params)
        turns, amid = Turns(engine), 0
        for turn in range(10):
            (handle,) = make_handles(engine, [prompt], [params])
            first, second = (
                partial(lambda sample, scheduler: scheduler.cancel(sample), handle.samples[i]) for i in (0, 1)
            )
            turns.at(turn, first, *[lambda scheduler: None] * 3, second)
            engine._start([handle])
            output = handle.result(PATIENCE)
            quiet(engine)
            assert [entry and entry.token_id for entry in output.prompt_logprobs] == [None, *prompt[1:]], turn
            for entry, logits in zip(output.prompt_logprobs[1:], reference.logits(prompt[:1], prompt[1:]), strict=True):
                check_token(entry, logits, 2)
            assert output.outputs[2].token_ids == whole.outputs[2].token_ids
            amid += not output.outputs[0].token_ids and not output.outputs[1].token_ids
    assert amid > 3


@pytest.mark.parametrize("mode", MODES)
def test_a_long_prompt_is_scored_in_pieces(reference, mode, monkeypatch):
    """No step scores more than it may, and other prompts get on meanwhile."""
    monkeypatch.setattr("twostroke.scheduler.planner.MAX_SCORES", 7)
    prompts = [make_prompt(40), make_prompt(33), make_prompt(30)]
    params = [sampled(prompt_logprobs=1), sampled(prompt_logprobs=1), sampled()]
    with running(mode, reference.directory) as engine:
        plans = []
        original = engine._parts.runner.launch
        engine._parts.runner.launch = lambda plan, slot: (plans.append(plan), original(plan, slot))
        outputs = engine.generate(prompts, params)
    assert [len(plan.scores) for plan in plans][:10] == [7] * 10
    assert sum(len(plan.scores) for plan in plans) == 39 + 32
    for prompt, output in zip(prompts[:2], outputs[:2], strict=True):
        for entry, logits in zip(output.prompt_logprobs[1:], reference.logits(prompt[:1], prompt[1:]), strict=True):
            check_token(entry, logits, 1)


def favour(token):
    """A logits processor that lets nothing but `token` be sampled."""

    def process(logits, rows):
        barred = torch.full_like(logits, -torch.inf)
        barred[:, token] = 0.0
        return barred

    return process


@pytest.mark.parametrize("mode", MODES)
def test_e08_what_changes_logits_does_not_change_raw_logprobs(reference, mode):
    """Penalties, biases and typical sampling, and rows whose sampling waits for the CPU, side by side."""
    prompt = make_prompt(14)
    changes = [
        {"repetition_penalty": 1.7, "presence_penalty": 20.0},
        {"logit_bias": {5: 30.0}, "temperature": 0.7},
        {"allowed_token_ids": [3, 4, 200]},
        {"typical_p": 0.5, "temperature": 2.0},
        {"logits_processors": [favour(9)]},
        {"logits_processors": [favour(8)], "repetition_penalty": 1.3},
        {},
    ]
    params = [sampled(18, logprobs=2, **change) for change in changes]
    with running(mode, reference.directory) as engine:
        outputs = engine.generate([prompt] * len(params), params)
        quiet(engine)
    assert len({tuple(output.token_ids) for output in outputs}) == len(changes)
    for output in outputs:
        logits = reference.logits(prompt, output.token_ids)
        for entry, row in zip(output.logprobs, logits, strict=True):
            check_token(entry, row, 2)
    for output in (outputs[1], outputs[4], outputs[5]):
        assert all(entry.sampling_logprob == pytest.approx(0.0, abs=1e-4) for entry in output.logprobs)
    for entry, row in zip(outputs[2].logprobs, reference.logits(prompt, outputs[2].token_ids), strict=True):
        allowed = row[[3, 4, 200]].double().log_softmax(-1)[[3, 4, 200].index(entry.token_id)]
        assert entry.sampling_logprob == pytest.approx(float(allowed), abs=1e-3)


@pytest.mark.parametrize("mode", MODES)
def test_best_of_returns_the_likeliest_samples(reference, mode):
    prompt = make_prompt(12)
    with running(mode, reference.directory) as engine:
        (every,) = engine.generate(prompt, sampled(n=6, temperature=2.0, logprobs=0))
        (best,) = engine.generate(prompt, sampled(n=2, best_of=6, temperature=2.0))
        with pytest.raises(InvalidRequest, match="best_of=6 cannot be streamed"):
            engine.stream(prompt, sampled(n=2, best_of=6))
        quiet(engine)
    means = {sample.seed: sample.cumulative_logprob / NEW for sample in every.outputs}
    seeds = sorted(means, key=means.get, reverse=True)
    assert [sample.seed for sample in best.outputs] == seeds[:2]
    assert [sample.index for sample in best.outputs] == [0, 1]
    assert all(sample.logprobs is None for sample in best.outputs)
    tokens = {sample.seed: sample.token_ids for sample in every.outputs}
    assert [sample.token_ids for sample in best.outputs] == [tokens[seed] for seed in seeds[:2]]
    assert [sample.cumulative_logprob for sample in best.outputs] == pytest.approx([NEW * means[s] for s in seeds[:2]])


@pytest.mark.parametrize("mode", MODES)
def test_c05_bad_logits_end_the_sample_and_give_no_number(reference, mode):
    """In the output and, where they are scored, in the prompt; nobody else is hurt."""
    with running(mode, reference.directory) as engine:
        with Scripted(engine, 4, [9, 9, 9, None]):
            (output,) = engine.generate(make_prompt(4), sampled(logprobs=2))
        assert output.finish_reason == "error"
        assert [entry.token_id for entry in output.logprobs] == [9, 9, 9]
        assert all(math.isfinite(entry.logprob) for entry in output.logprobs)
        original = engine.model.forward

        def poisoned(step, attention):
            logits = original(step, attention)
            index = step.sample_index
            positions = step.positions if index is None else step.positions[index]
            ids = step.input_ids if index is None else step.input_ids[index]
            logits[(positions == 5) & (ids == bad[5])] = torch.nan
            return logits

        bad, good = make_prompt(20), make_prompt(21)
        assert bad[5] != good[5]
        engine.model.forward = poisoned
        outputs = engine.generate([bad, good, bad], [sampled(prompt_logprobs=1)] * 2 + [sampled()])
        engine.model.forward = original
        assert [output.finish_reason for output in outputs] == ["error", "length", "length"]
        assert all(entry is None or math.isfinite(entry.logprob) for entry in outputs[1].prompt_logprobs)
        quiet(engine)


def ended(index, ids, total, reason=FinishReason.LENGTH):
    return SampleOutput(index, ids, None, reason, None, index, 0, Timings(0.0), [], None, total)


def test_best_of_orders_by_the_mean_and_equals_by_their_index():
    """C05: equal tokens are a tie whatever rounding says; what has no number, or failed, is the worst."""
    outputs = [
        ended(0, [1, 2], math.nan),
        ended(1, [3, 4], -2.0000001),
        ended(2, [3, 4], -2.0),
        ended(3, [5], -0.5),
        ended(4, [5], -0.5, FinishReason.ERROR),
        ended(5, [6, 7, 8], -2.4),
        ended(6, [], 0.0),
    ]
    ranked = best(outputs, 7)
    assert [output.seed for output in ranked] == [3, 5, 1, 2, 0, 4, 6]
    assert [output.index for output in ranked] == list(range(7))


def test_steps_without_logprobs_bring_none(reference):
    with running("async", reference.directory) as engine:
        seen = []
        original = engine._parts.runner.wait
        engine._parts.runner.wait = lambda plan, slot: seen.append(original(plan, slot)) or seen[-1]
        engine.generate(make_prompt(9), sampled())
        assert not any(len(output.records) or len(output.scores) for output in seen)
        engine.generate(make_prompt(9), sampled(logprobs=0))
        assert len(seen[-1].records)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logprobs": 21}, "logprobs=21 must be at most 20"),
        ({"logprobs": -1}, "logprobs=-1 must be at least 0"),
        ({"logprobs": True}, "logprobs=True must be an integer"),
        ({"prompt_logprobs": 21}, "prompt_logprobs=21 must be at most 20"),
        ({"n": 3, "best_of": 2}, "best_of=2 must be at least n=3"),
        ({"best_of": 1025}, "best_of=1025 must be at most 1024"),
    ],
)
def test_out_of_range_is_refused(params, message):
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(**params).validate()
