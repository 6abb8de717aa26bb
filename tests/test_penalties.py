"""Parameters that look at a sample's history or bar tokens: against transformers' `generate`, and what rows share."""

from __future__ import annotations

import pytest
import torch
from engines import MODES, running
from matrix import LINES, NEW, PROMPTS, Additive, make_params
from reference import TIE
from sampling_oracle import EOS, VOCAB, Reference, make_prompt
from scripted import Scripted, save_small
from transformers import LogitsProcessorList
from watching import PATIENCE, quiet

from twostroke import InvalidRequest, SamplingParams


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return Reference(tmp_path_factory.mktemp("llama"))


GENERATE = {
    "repetition_penalty": lambda params, prompt_len: {"repetition_penalty": params.repetition_penalty},
    "repetition_reward": lambda params, prompt_len: {"repetition_penalty": params.repetition_penalty},
    "no_repeat_token": lambda params, prompt_len: {"no_repeat_ngram_size": params.no_repeat_ngram_size},
    "logit_bias": lambda params, prompt_len: {"sequence_bias": {(t,): float(b) for t, b in params.logit_bias.items()}},
    "allowed_token_ids": lambda params, prompt_len: {"prefix_allowed_tokens_fn": lambda *_: params.allowed_token_ids},
    "bad_words": lambda params, prompt_len: {"bad_words_ids": params.bad_words},
    "bad_sequences": lambda params, prompt_len: {"bad_words_ids": params.bad_words},
    "min_tokens": lambda params, prompt_len: {
        "min_new_tokens": params.min_tokens,
        "eos_token_id": [*EOS, *params.stop_token_ids],
    },
    "no_repeat_ngram_size": lambda params, prompt_len: {
        "no_repeat_ngram_size": params.no_repeat_ngram_size,
        "logits_processor": LogitsProcessorList([Additive(prompt_len, 0.0, params.frequency_penalty)]),
    },
}
"""The arguments of `generate` that say what a line of the matrix says."""


@torch.inference_mode()
def generate(reference, prompt, **arguments):
    """What `generate` answers, and at each token how far the second best is behind."""
    # NOTE: an end-of-sequence id that is none, since the model's own would be taken for None.
    arguments = {"eos_token_id": VOCAB + 1, **arguments}
    output = reference.model.generate(
        torch.tensor([prompt]),
        do_sample=False,
        max_new_tokens=NEW,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **arguments,
    )
    best = torch.cat(output.scores).topk(2).values
    return output.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()


@pytest.mark.parametrize("line", GENERATE)
@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_generate(reference, line, mode):
    """G15: from the first token to the last, ties left out."""
    params = make_params(LINES[line])
    with running(mode, reference.directory) as engine:
        outputs = engine.generate(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected, gaps = generate(reference, prompt, **GENERATE[line](params, len(prompt)))
        different = [i for i, pair in enumerate(zip(output.token_ids, expected, strict=False)) if pair[0] != pair[1]]
        if different:
            assert gaps[different[0]] < TIE
        else:
            assert output.token_ids == expected


@pytest.mark.parametrize("mode", MODES)
def test_c23_the_repetition_penalty_sees_end_of_sequence_ids_in_the_prompt(reference, mode):
    """As in transformers, and as documented; the other two penalties look at the output only."""
    prompt = [5, EOS[0], 9, EOS[0], 30]
    with running(mode, reference.directory) as engine:
        strict, mild, plain = engine.generate(
            [prompt] * 3,
            [
                make_params(line)
                for line in (
                    {"repetition_penalty": 1e3, "logit_bias": {EOS[0]: 50.0}},
                    {"presence_penalty": 1e3, "logit_bias": {EOS[0]: 50.0}},
                    {},
                )
            ],
        )
    assert EOS[0] not in strict.token_ids
    assert mild.token_ids[0] == EOS[0]
    assert mild.token_ids.count(EOS[0]) == 1
    assert EOS[0] not in plain.token_ids


class Preferring(Scripted):
    """A model that at every position likes 100 best, then 101, and so on, far above all others."""

    def forward(self, step, attention):
        logits = self.original(step, attention)
        logits[:] = 0.0
        logits[:, 100:200] = torch.arange(200.0, 100.0, -1.0)
        return logits


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk", [None, 2])
def test_a35_the_newest_token_counts_before_the_next_is_sampled(reference, mode, chunk):
    """One step late, each token would come twice; prompt tokens must not count as output."""
    prompt = [100, 101, 102, 100, 101]
    with running(mode, reference.directory, max_chunk_tokens=chunk) as engine, Preferring(engine, len(prompt), [0]):
        outputs = engine.generate(
            [prompt] * 4,
            [
                make_params({"presence_penalty": 1e4}),
                make_params({"frequency_penalty": 1e4}),
                make_params({"no_repeat_ngram_size": 1}),
                make_params({"frequency_penalty": 1.5}),
            ],
        )
    assert outputs[0].token_ids == outputs[1].token_ids == [*range(100, 100 + NEW)]
    assert outputs[2].token_ids == [*range(103, 103 + NEW)]
    assert outputs[3].token_ids == simulated(1.5)


def simulated(frequency):
    score, tokens = dict(zip(range(100, 200), range(200, 100, -1), strict=True)), []
    for _ in range(NEW):
        tokens.append(max(score, key=lambda token: (score[token], -token)))
        score[tokens[-1]] -= frequency
    return tokens


@pytest.mark.parametrize("mode", MODES)
def test_c01_greedy_with_most_tokens_barred_is_no_error(reference, mode):
    with running(mode, reference.directory) as engine:
        outputs = engine.generate(
            [make_prompt(7)] * 3,
            [
                make_params({"allowed_token_ids": [17]}),
                make_params({"bad_words": [[token] for token in range(VOCAB) if token != 18]}),
                make_params({"allowed_token_ids": [19], "temperature": 1.0, "typical_p": 0.5, "top_p": 0.5}),
            ],
        )
    assert [set(output.token_ids) for output in outputs] == [{17}, {18}, {19}]
    assert all(output.finish_reason == "length" for output in outputs)


@pytest.mark.parametrize("mode", MODES)
def test_a_sample_that_is_left_with_no_token_ends_alone(reference, mode):
    """What submit cannot know: no token comes twice, and two are allowed."""
    params = make_params({"allowed_token_ids": [17, 18], "no_repeat_ngram_size": 1})
    with running(mode, reference.directory) as engine:
        plain, ended = engine.generate([make_prompt(7)] * 2, [make_params(), params])
    assert sorted(ended.token_ids) == [17, 18]
    assert ended.finish_reason == "error"
    assert "no token" in ended.error
    assert len(plain.token_ids) == NEW


@pytest.fixture(scope="module")
def requests_alone(reference):
    """Requests in turn with others that need no ledger, and the tokens that each has alone."""
    lines = ["allowed_token_ids", "frequency_penalty", "bad_sequences", "logit_bias", "no_repeat_token"]
    requests = [(make_prompt(9 + i), make_params(LINES[lines[i % 5]] if i % 3 else {})) for i in range(14)]
    with running("sync", reference.directory) as engine:
        return requests, [engine.generate(prompt, params)[0].token_ids for prompt, params in requests]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("max_ledgers", [1, 3])
def test_c40_requests_wait_for_a_ledger_and_find_nothing_in_it(reference, requests_alone, mode, max_ledgers):
    """More requests than ledgers; each has the tokens it has alone."""
    requests, expected = requests_alone
    with running(mode, reference.directory, max_ledgers=max_ledgers) as engine:
        outputs = engine.generate(*map(list, zip(*requests, strict=True)))
    assert [output.token_ids for output in outputs] == expected


@pytest.mark.parametrize("mode", MODES)
def test_samples_of_one_request_have_ledgers_of_their_own(reference, mode):
    params = make_params({"frequency_penalty": 1.0, "temperature": 1.0, "seed": 3, "n": 4})
    with running(mode, reference.directory, max_ledgers=2) as engine:
        samples = engine.generate(make_prompt(9), params)[0].outputs
        seeds = [sample.seed for sample in samples]
        alone = [
            engine.generate(make_prompt(9), make_params({"frequency_penalty": 1.0, "temperature": 1.0, "seed": seed}))
            for seed in seeds
        ]
    assert [sample.token_ids for sample in samples] == [output[0].token_ids for output in alone]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_blocks", [None, 10], ids=["roomy", "preempted"])
def test_steps_in_which_no_row_asks_run_no_stage(reference, mode, num_blocks):
    """Also after some have asked, and ended by length, by a cancel, or were preempted on the way."""
    asking = [make_params(LINES[line]) for line in ("frequency_penalty", "typical_p", "bad_sequences", "logit_bias")]
    with running(mode, reference.directory, num_blocks=num_blocks) as engine:
        asked = []
        original = engine._parts.runner.launch
        engine._parts.runner.launch = lambda plan, slot: (asked.append(plan.features), original(plan, slot))
        handles = [engine.submit(make_prompt(11), params) for params in (*asking, make_params(), asking[0])]
        handles[-1].cancel()
        outputs = [handle.result(PATIENCE) for handle in handles]
        assert (engine.stats().preemptions > 0) == (num_blocks is not None)
        assert any(asked)
        quiet(engine)
        asked.clear()
        (plain,) = engine.generate(make_prompt(11), make_params())
    assert plain.token_ids == outputs[4].token_ids
    assert len(asked) >= NEW
    assert not any(asked)


def test_without_ledgers_what_needs_one_is_refused(reference):
    """C18, R08: by name and value; the rest runs."""
    with running("async", reference.directory, max_ledgers=0) as engine:
        for line in ("frequency_penalty", "no_repeat_token", "bad_words", "allowed_token_ids", "logit_bias"):
            name = next(iter(LINES[line]))
            with pytest.raises(InvalidRequest, match=f"{name}=.* needs a ledger, but max_ledgers=0"):
                engine.submit(PROMPTS[0], make_params(LINES[line]))
        assert len(engine.generate(PROMPTS[0], make_params(LINES["typical_p"]))[0].token_ids) == NEW


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_bad_words_that_are_strings(smollm2_dir, tmp_path, mode):
    """At the beginning of a text and behind a space; each spelling alone comes without the parameter."""
    save_small(smollm2_dir, tmp_path)
    greedy = dict(temperature=0, max_tokens=8, ignore_eos=True)
    with running(mode, tmp_path) as engine:
        encode = engine.tokenizer.encode
        for word in ("Paris", " Paris", "Fahrenheit"):
            for spelling in (word.strip(), " " + word.strip()):
                ids = encode(spelling, special_tokens=False)
                with Scripted(engine, 3, [*ids, 5, *ids, 5]):
                    plain = engine.generate([1, 2, 3], SamplingParams(**greedy))[0].token_ids
                    barred = engine.generate([1, 2, 3], SamplingParams(**greedy, bad_words=[word]))[0]
                assert plain[: len(ids)] == ids
                assert barred.token_ids[: len(ids)] != ids
                assert spelling not in barred.text
        with pytest.raises(InvalidRequest, match=r"bad_words\[1\]='  ' must have a character"):
            engine.submit([1], SamplingParams(bad_words=["a", "  "]))
