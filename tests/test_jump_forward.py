"""Jump-forward: what a grammar leaves no choice of is not sampled, and no loop, preemption or fork changes a token."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from unittest import mock

import jsonschema
import pytest
import torch
from engines import MODES, running
from scripted import save_small
from test_failures import spoil_logits
from watching import PATIENCE

from twostroke import InvalidRequest, SamplingParams, StructuredOutput
from twostroke.bench.made_up_tokenizer import made_up_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"identification": {"type": "integer", "maximum": 99}, "description": {"enum": ["short", "long"]}},
    "required": ["identification", "description"],
    "additionalProperties": False,
}
REGEX = r"The quick brown (fox|dog) jumps over [0-9]{2} lazy (cats|mice), as ever and ever again\."
PROMPTS = [list(range(10, 10 + length)) for length in (3, 20, 7, 33, 5, 12)]


CHOICE = ["The quick brown fox jumps over the lazy dog.", "The quick brown fox jumps over the lazy cats."]
KINDS = {str: "regex", dict: "json_schema", list: "choice"}


def jumping(temperature=1.0, seed=1, text=REGEX, **more):
    structured = StructuredOutput(**{KINDS[type(text)]: text}, jump_forward=True)
    return SamplingParams(structured=structured, temperature=temperature, seed=seed, **{"max_tokens": 160, **more})


def step_by_step(params):
    return replace(params, structured=replace(params.structured, jump_forward=False))


@pytest.fixture(scope="module")
def small(smollm2_dir, tmp_path_factory):
    return save_small(smollm2_dir, tmp_path_factory.mktemp("small"), vocab_size=512)


def everything():
    params = [
        jumping(t, n, text) for n, (t, text) in enumerate((t, text) for t in (0.0, 1.0) for text in (REGEX, SCHEMA))
    ]
    return [*params, SamplingParams(temperature=1.0, seed=9, max_tokens=24, ignore_eos=True), jumping(seed=8, n=2)]


@pytest.fixture
def patient():
    """Every mask is waited for: on a busy machine some would come late, and their steps would be done again."""
    with mock.patch("twostroke.runner.Runner._patience", return_value=PATIENCE):
        yield


def outputs_of(engine, params):
    outputs = engine.generate(PROMPTS[: len(params)], params)
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def reference(small):
    """Each request alone under the synchronous loop."""
    with running("sync", small) as engine:
        pairs = zip(PROMPTS, everything(), strict=True)
        return [[s.token_ids for s in engine.generate([prompt], own)[0].outputs] for prompt, own in pairs]


@pytest.mark.parametrize(("blocks", "chunk"), [(None, None), (24, 4)], ids=["roomy", "preempted and chunked"])
@pytest.mark.parametrize("mode", MODES)
def test_no_loop_changes_a_token(small, reference, mode, blocks, chunk):
    options = {"max_chunk_tokens": chunk, "block_size": 8, "max_model_len": 184, "max_rows": 8}
    with running(mode, small, num_blocks=blocks, **options) as engine:
        for _ in range(2):  # the second time with what the prefix cache found
            assert outputs_of(engine, everything()) == reference
        assert (engine.stats().preemptions > 0) == (blocks is not None)
        texts = [[engine.tokenizer.decode(ids, skip_special_tokens=True) for ids in each] for each in reference]
        held = engine._parts.scheduler.batch.held
        assert (held.count, held.jumped, held.forced) == (0, {}, {})
    assert all(re.fullmatch(REGEX, text) for each in (texts[0], texts[2], texts[5]) for text in each)
    for text in (*texts[1], *texts[3]):
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(
    ("text", "saving"), [(REGEX, 2), (CHOICE, 2), (SCHEMA, 1.1)], ids=["regex", "choice", "schema"]
)
@pytest.mark.parametrize("mode", MODES)
def test_steps_are_saved(small, patient, mode, text, saving):
    """However the text is described; in JSON every line break is a choice."""
    params = jumping(0.0, text=text)
    with running(mode, small, prefix_cache=False) as engine:
        slow = engine.generate([PROMPTS[0]], step_by_step(params))[0]
        steps = engine.stats().steps
        fast = engine.generate([PROMPTS[0]], params)[0]
        taken = engine.stats().steps - steps
    if text == SCHEMA:
        jsonschema.validate(json.loads(fast.text), SCHEMA)
    else:
        assert fast.text in CHOICE or re.fullmatch(REGEX, fast.text)
    assert steps >= len(slow.token_ids)
    assert taken * saving < len(fast.token_ids), "much of the text leaves no choice"


@pytest.mark.parametrize("mode", MODES)
def test_where_one_token_is_allowed_at_each_place_the_tokens_are_those_of_sampling(patient, mode):
    """With a tokenizer of single bytes a text has one tokenization."""
    params = [replace(jumping(1.0, seed), stop_token_ids=[300]) for seed in range(4)]
    tokenizer = mock.patch("twostroke.build.find_tokenizer", return_value=made_up_tokenizer(256))
    with tokenizer, running(mode, prefix_cache=False) as engine:
        expected = [o.token_ids for o in engine.generate(PROMPTS[:4], [step_by_step(own) for own in params])]
        steps = engine.stats().steps
        assert [o.token_ids for o in engine.generate(PROMPTS[:4], params)] == expected
        assert engine.stats().steps - steps < steps / 3
    assert len({tuple(ids) for ids in expected}) > 1


@pytest.mark.parametrize("mode", MODES)
def test_length_and_stop_ids_within_a_jump(small, mode):
    with running(mode, small) as engine:
        whole = engine.generate([PROMPTS[1]], jumping(0.0))[0].token_ids
        for most in range(1, len(whole)):
            output = engine.generate([PROMPTS[1]], jumping(0.0, max_tokens=most))[0]
            assert (output.token_ids, output.finish_reason) == (whole[:most], "length")
        stop = whole[4]
        output = engine.generate([PROMPTS[1]], jumping(0.0, stop_token_ids=[stop]))[0]
        assert (output.token_ids, output.finish_reason) == (whole[: whole.index(stop) + 1], "stop")
        output = engine.generate([PROMPTS[1]], jumping(0.0, stop=["brown"]))[0]
        assert (output.text, output.finish_reason) == ("The quick ", "stop")


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_streamed_once_and_in_order(small, reference, mode):
    with running(mode, small) as engine:
        handles = [engine.submit(prompt, own) for prompt, own in zip(PROMPTS[:4], everything()[:4], strict=True)]
        streamed = [[token for delta in handle for token in delta.token_ids] for handle in handles]
    assert streamed == [ids for each in reference[:4] for ids in each]


@pytest.mark.parametrize("more", [{"frequency_penalty": 0.5}, {"logprobs": 1}, {"logit_bias": {66: 1.0}}], ids=str)
def test_samples_that_need_every_token_sampled_do_not_jump(small, more):
    params = jumping(1.0, **more)
    with running("async", small) as engine:
        jumped, stepped = (engine.generate([PROMPTS[2]], own)[0] for own in (params, step_by_step(params)))
    assert jumped.token_ids == stepped.token_ids
    assert engine.stats().steps >= 2 * len(jumped.token_ids)


@pytest.mark.parametrize("mode", MODES)
def test_e04_log_probabilities_beside_jumps_and_in_chunks(small, mode):
    """Each is that of its own token, where neighbours bring several tokens in one step, and prompts come in pieces."""
    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[3], PROMPTS[1]]
    free = SamplingParams(temperature=1.0, seed=4, max_tokens=30, ignore_eos=True, logprobs=1)
    params = [jumping(0.0), jumping(1.0, logprobs=1), free, jumping(1.0, 3)]
    scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
    with running(mode, small, max_chunk_tokens=2, block_size=8) as engine:
        outputs = engine.generate(prompts, params)
        for prompt, output in zip(prompts[1:3], outputs[1:3], strict=True):
            (again,) = engine.generate([[*prompt, *output.token_ids]], scored)
            expected = [entry.logprob for entry in again.prompt_logprobs[len(prompt) :]]
            assert [entry.token_id for entry in output.logprobs] == output.token_ids
            assert [entry.logprob for entry in output.logprobs] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_cancelled_within_a_jump(small, mode):
    with running(mode, small, max_chunk_tokens=2) as engine:
        whole = engine.generate([PROMPTS[0]], jumping(0.0))[0].token_ids
        handles = [engine.submit(PROMPTS[0], jumping(0.0)) for _ in range(6)]
        for count, handle in enumerate(handles):
            for _ in range(count):
                next(iter(handle), None)
            handle.cancel()
        for handle in handles:
            ids = handle.result().token_ids
            assert ids == whole[: len(ids)]
        assert engine.generate([PROMPTS[0]], jumping(0.0))[0].token_ids == whole


def test_a_jump_must_be_asked_for_by_a_bool(small):
    with (
        running("sync", small) as engine,
        pytest.raises(InvalidRequest, match=r"structured\.jump_forward='yes' must be"),
    ):
        engine.submit(PROMPTS[0], SamplingParams(structured=StructuredOutput(regex="a", jump_forward="yes")))


@pytest.mark.parametrize("mode", MODES)
def test_c04_bad_logits_before_and_behind_a_jump(small, mode):
    """What is forced behind a token that never came is no output; the logits of forced tokens are not looked at."""
    prompt = PROMPTS[2]
    with running(mode, small, prefix_cache=False) as engine:
        whole = engine.generate([prompt], jumping(0.0))[0].token_ids
        ends = []
        for index in range(12):
            heal = spoil_logits(engine, len(prompt) - 1 + index, torch.nan)
            handle = engine.submit(prompt, jumping(0.0))
            streamed = [token for delta in handle for token in delta.token_ids]
            output = handle.result()
            heal()
            ends.append(output.finish_reason)
            assert streamed == output.token_ids == (whole[:index] if ends[-1] == "error" else whole)
        assert ends[0] == "error"
        assert {*ends} == {"error", "stop"}
        assert engine.generate([prompt], jumping(0.0))[0].token_ids == whole


@pytest.mark.parametrize("mode", ["sync", "async3"])
def test_jumps_begin_behind_the_thinking(small, patient, mode):
    params = jumping(max_thinking_tokens=5, thinking_start=[3], thinking_end=[4, 8])
    with running(mode, small) as engine:
        output = engine.generate([[20, 30, 3]], params)[0]
        text = engine.tokenizer.decode(output.token_ids[output.token_ids.index(8) + 1 :], skip_special_tokens=True)
        steps = engine.stats().steps
    assert re.fullmatch(REGEX, text)
    assert steps < len(output.token_ids)


SPECIAL = "a<|im_end|>b"
SPELLED = {
    "json_schema": StructuredOutput(json_schema={"const": SPECIAL}),
    "escaped": StructuredOutput(json_schema='{"const": "a\\u003c|im_end|>b"}'),
    "regex": StructuredOutput(regex=r'"a<\|im_end\|>b"'),
    "choice": StructuredOutput(choice=[f'"{SPECIAL}"']),
    "ebnf": StructuredOutput(grammar=f'root ::= "\\"{SPECIAL}\\""'),
    "lark": StructuredOutput(grammar=f'start: "\\"{SPECIAL}\\""', jump_forward=True),
}


@pytest.mark.parametrize("spelled", SPELLED.values(), ids=SPELLED)
def test_the_text_of_a_special_token_is_said_in_others(small, spelled):
    """Where it alone can follow, it was cut into the special token, which no grammar takes for text."""
    with running("async", small) as engine:
        output = engine.generate([PROMPTS[0]], SamplingParams(structured=spelled, seed=1))[0]
        assert engine.tokenizer.encode(output.text) != output.token_ids[:-1]
    assert (output.error, output.text) == (None, f'"{SPECIAL}"')
