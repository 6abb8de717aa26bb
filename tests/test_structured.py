"""Structured output: every text is a word of its grammar, and the same tokens under all loops."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from unittest import mock

import jsonschema
import numpy as np
import pytest
from engines import MODES, running
from scripted import save_small

from twostroke import InvalidRequest, SamplingParams, StructuredOutput
from twostroke.constraints.grammars import GrammarConstraint, Grammars
from twostroke.text.tokenizer import load_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bb"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
REGEX = r"[a-f]{3,9} is (red|green) [0-9]{2,4}"
CHOICES = ["yes", "no", 'maybe "so"', "größer", "a\nb", "😀"]
EBNF = 'root ::= expr\nexpr ::= term (("+" | "-") term){0,3}\nterm ::= [0-9]{1,3} | "(" [a-z] ")"'
EXPRESSION = r"(\d{1,3}|\([a-z]\))([+-](\d{1,3}|\([a-z]\))){0,3}"
OBJECT = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


def check_json(text):
    jsonschema.validate(json.loads(text), SCHEMA)


def matches(pattern):
    return lambda text: re.fullmatch(pattern, text) or pytest.fail(f"{text!r} does not match {pattern!r}")


CASES = {
    "json_schema": (StructuredOutput(json_schema=SCHEMA), check_json),
    "json_schema_text": (StructuredOutput(json_schema=json.dumps(OBJECT)), json.loads),
    "regex": (StructuredOutput(regex=REGEX), matches(REGEX)),
    "choice": (StructuredOutput(choice=CHOICES), CHOICES.index),
    "ebnf": (StructuredOutput(grammar=EBNF), matches(EXPRESSION)),
    "lark": (StructuredOutput(grammar='start: "<" /[a-z]{2,5}/ ">"'), matches("<[a-z]{2,5}>")),
}
PENALTIES = {"frequency_penalty": 0.7, "repetition_penalty": 1.3, "top_p": 0.9}
VOCAB = 512
PROMPTS = [list(range(10, 10 + length)) for length in (3, 20, 7, 33, 5, 12)]


@pytest.fixture(scope="module")
def small(smollm2_dir, tmp_path_factory):
    """A random model with the default model's tokenizer."""
    return save_small(smollm2_dir, tmp_path_factory.mktemp("small"), vocab_size=VOCAB)


def structured(name, temperature, seed=1, **options):
    return SamplingParams(
        structured=CASES[name][0], temperature=temperature, seed=seed, **{"max_tokens": 160, **options}
    )


def everything():
    """Every grammar at both temperatures, and the same prompts without one."""
    held = [structured(name, temperature) for name in CASES for temperature in (0.0, 1.0)]
    held += [structured(name, 1.0, **PENALTIES) for name in ("json_schema", "regex")]
    free = [SamplingParams(temperature=1.0, seed=9, max_tokens=24, ignore_eos=True)] * 2
    params = held + free
    return [PROMPTS[n % len(PROMPTS)] for n in range(len(params))], params


@pytest.fixture(scope="module")
def reference(small):
    """Each request alone under the synchronous loop."""
    prompts, params = everything()
    with running("sync", small) as engine:
        return [engine.generate([prompt], own)[0].token_ids for prompt, own in zip(prompts, params, strict=True)]


@pytest.mark.parametrize(("blocks", "chunk"), [(None, None), (28, 4)], ids=["roomy", "preempted and chunked"])
@pytest.mark.parametrize("mode", MODES)
def test_every_text_fits_its_grammar_and_no_loop_changes_a_token(small, reference, mode, blocks, chunk):
    """A30, A03, A37: masks come from real tokens, whatever else is in flight."""
    prompts, params = everything()
    options = {"max_chunk_tokens": chunk, "block_size": 8, "max_model_len": 200, "max_rows": 16}
    with running(mode, small, num_blocks=blocks, **options) as engine:
        outputs = engine.generate(prompts, params)
        assert (engine.stats().preemptions > 0) == (blocks is not None)
    names = [*(name for name in CASES for _ in (0, 1)), "json_schema", "regex"]
    for name, output in zip(names, outputs, strict=False):
        assert output.finish_reason == "stop", (name, output)
        CASES[name][1](output.text)
    assert [output.token_ids for output in outputs] == reference


def test_a_grammar_changes_the_output(small):
    with running("async", small) as engine:
        plain, held = engine.generate([PROMPTS[0]] * 2, [SamplingParams(temperature=0), structured("regex", 0.0)])
    assert plain.token_ids != held.token_ids


def test_a_free_row_beside_held_rows_keeps_the_pace(small):
    """A31: as many steps as alone, the same tokens, while a mask that never comes in time holds up its own row only."""
    tokens, slow = 40, 0.05
    free = SamplingParams(temperature=1.0, seed=4, max_tokens=tokens, ignore_eos=True)
    fill = GrammarConstraint.fill

    def fill_slowly(self, mask):
        time.sleep(slow)
        fill(self, mask)

    with running("async", small) as engine:
        alone = engine.generate([PROMPTS[0]], free)[0]
        steps = engine.stats().steps
        with mock.patch.object(GrammarConstraint, "fill", fill_slowly):
            held = engine.submit(PROMPTS[1], structured("json_schema", 0.0))
            beside = engine.generate([PROMPTS[0]], free)[0]
            assert not held.done
            taken = engine.stats().steps - steps
        held = held.result()
    assert beside.token_ids == alone.token_ids
    assert taken <= steps + 3
    check_json(held.text)


@pytest.mark.parametrize("mode", MODES)
def test_late_masks_change_no_token(small, reference, mode):
    """Rows whose masks are always late compute every position twice, and the loop blocks while it has nothing else."""
    prompts, params = everything()
    fill = GrammarConstraint.fill

    def fill_slowly(self, mask):
        time.sleep(0.004)
        fill(self, mask)

    with (
        mock.patch.object(GrammarConstraint, "fill", fill_slowly),
        mock.patch("twostroke.runner.Runner._patience", return_value=0.0),
        running(mode, small, num_blocks=28, block_size=8, max_model_len=200, max_rows=8) as engine,
    ):
        outputs = engine.generate(prompts[:-2], params[:-2])
        tokens = sum(len(output.token_ids) for output in outputs)
        assert engine.stats().steps > max(len(output.token_ids) for output in outputs) * 2
    assert [output.token_ids for output in outputs] == reference[:-2]
    assert tokens > 0


@pytest.mark.parametrize("mode", MODES)
def test_every_sample_of_a_request_follows_the_grammar_on_its_own(small, mode):
    params = structured("ebnf", 1.0, n=4)
    with running(mode, small) as engine:
        output = engine.generate([PROMPTS[3]], params)[0]
    assert len({sample.text for sample in output.outputs}) > 1
    assert all(re.fullmatch(EXPRESSION, sample.text) for sample in output.outputs)


def test_many_grammars_at_once(small):
    choices = [[f"answer {n}", f"reply {n}"] for n in range(40)]
    params = [
        SamplingParams(structured=StructuredOutput(choice=choice), temperature=1.0, seed=n, max_tokens=20)
        for n, choice in enumerate(choices)
    ]
    with running("async", small, max_rows=64) as engine:
        outputs = engine.generate([PROMPTS[n % 6] for n in range(40)], params)
    assert all(output.text in choice for output, choice in zip(outputs, choices, strict=True))


MORE = {
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.3},
    "min_p": {"min_p": 0.5},
    "stop": {"stop": ["is"]},
    "temperature": {"temperature": 5.0},
    "min_tokens": {"min_tokens": 3},
    "typical_p": {"typical_p": 0.4},
    "presence_penalty": {"presence_penalty": 2.0},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 3},
    "logit_bias": {"logit_bias": {66: 5.0}},
    "bad_words": {"bad_words": [" green"]},
    "ignore_eos": {"ignore_eos": True},
}


@pytest.fixture(scope="module")
def more_alone(small):
    """Parameters with a grammar and one of `MORE`, the last ones with none, and the tokens of each alone."""
    each = [
        SamplingParams(structured=StructuredOutput(regex=REGEX), max_tokens=40, seed=3, **more)
        for more in (*MORE.values(), {})
    ]
    with running("sync", small) as engine:
        return each, [engine.generate([PROMPTS[2]], own)[0].token_ids for own in each]


@pytest.mark.parametrize(("blocks", "chunk"), [(None, None), (18, 3)], ids=["roomy", "preempted and chunked"])
@pytest.mark.parametrize("mode", MODES)
def test_other_parameters_still_hold(small, more_alone, mode, blocks, chunk):
    """All at once, beside one with none; a grammar's parameter and another one together under every loop."""
    each, expected = more_alone
    options = {"block_size": 8, "max_model_len": 96, "max_chunk_tokens": chunk, "prefix_cache": blocks is None}
    with running(mode, small, num_blocks=blocks, **options) as engine:
        outputs = engine.generate([PROMPTS[2]] * len(each), each)
        assert (engine.stats().preemptions > 0) == (blocks is not None)
    assert [output.token_ids for output in outputs] == expected
    by_name = dict(zip(MORE, outputs, strict=False))
    for name, output in by_name.items():
        assert re.fullmatch(r"[a-f]{3,9} " if name == "stop" else REGEX, output.text), name
    assert " green" not in by_name["bad_words"].text
    endless = by_name["ignore_eos"]
    assert (len(endless.token_ids), endless.finish_reason) == (40, "length")
    assert set(endless.token_ids[-10:]) == {2}


def test_cancelled_and_cut_samples_leave_nothing_behind(small):
    with running("delayed", small) as engine:
        short = engine.submit(PROMPTS[0], structured("json_schema", 0.0, max_tokens=3))
        gone = [engine.submit(prompt, structured("json_schema", 1.0, seed=n)) for n, prompt in enumerate(PROMPTS)]
        for handle in gone:
            handle.cancel()
        assert short.result().finish_reason == "length"
        assert {handle.result().finish_reason for handle in gone} <= {"cancelled", "stop"}
        after = engine.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=8))[0]
        held = engine._parts.scheduler.batch.held
        assert (held.count, held.paused, held.late, held._followers) == (0, {}, {}, {})
    with running("sync", small) as engine:
        assert (
            engine.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=8))[0].token_ids == after.token_ids
        )


def test_a_grammar_that_fails_on_the_way_ends_its_own_sample(small):
    fill = GrammarConstraint.fill
    calls = []

    def fill_or_fail(self, mask):
        calls.append(self)
        if self is calls[0] and calls.count(self) == 3:
            raise RuntimeError("too hard")
        fill(self, mask)

    with mock.patch.object(GrammarConstraint, "fill", fill_or_fail), running("async", small) as engine:
        first = engine.submit(PROMPTS[0], structured("json_schema", 0.0))
        while not calls:
            time.sleep(0.001)
        other = engine.generate([PROMPTS[1]], structured("regex", 0.0))[0]
        failed = first.result()
    assert (failed.finish_reason, failed.error, len(failed.token_ids)) == ("error", "RuntimeError: too hard", 2)
    assert re.fullmatch(REGEX, other.text)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (StructuredOutput(), "exactly one of"),
        (StructuredOutput(regex="a", json_object=True), "exactly one of"),
        (StructuredOutput(regex="(a"), "unclosed group"),
        (StructuredOutput(regex="(?=a)b"), "look-around"),
        (StructuredOutput(regex=3), "structured.regex=3 must be a string"),
        (StructuredOutput(json_schema={"type": "foo"}), "Invalid type: foo"),
        (StructuredOutput(json_schema={"not": {}}), "not"),
        (StructuredOutput(json_schema="{"), "structured.json_schema"),
        (StructuredOutput(json_schema={"a": {1}}), "is not JSON"),
        (StructuredOutput(json_schema="false"), "structured.json_schema='false'"),
        (StructuredOutput(grammar="root ::= x"), "x"),
        (StructuredOutput(grammar="start: start"), "cannot be followed"),
        (StructuredOutput(grammar="start: " + "(" * 9_000), "structured.grammar='start: "),
        (StructuredOutput(regex="(" * 9_000), "structured.regex='(((("),
        (StructuredOutput(regex="[" * 9_000), " ... "),
        (StructuredOutput(choice=[]), "at least one string"),
        (StructuredOutput(choice="ab"), "at least one string"),
        (StructuredOutput(choice=["a", 3]), "structured.choice[1]=3 must be a string"),
        (StructuredOutput(regex=r"[^\s\S]"), "cannot be followed: no text matches it"),
        (StructuredOutput(regex="a" * (1 << 20) + "b"), "characters"),
        (StructuredOutput(json_object="yes"), "structured.json_object='yes'"),
        ({"regex": "a"}, "must be a StructuredOutput"),
    ],
    ids=str,
)
def test_what_cannot_be_followed_is_refused_at_submit(small, wrong, message):
    with running("async", small) as engine:
        good = engine.submit(PROMPTS[0], structured("regex", 0.0))
        with pytest.raises(InvalidRequest, match=re.escape(message)) as refusal:
            engine.submit(PROMPTS[0], SamplingParams(structured=wrong))
        assert len(str(refusal.value)) < 1500
        assert re.fullmatch(REGEX, good.result().text)


SCALES = {f"a{n}": {"type": "string"} for n in range(80)}
AMBIGUOUS = {
    "anyOf": [
        {"type": "object", "properties": dict([*SCALES.items()][: n + 1]), "required": [f"a{n}"]} for n in range(80)
    ]
}
"""After its first brace any of 80 objects may have begun, and any of their names may follow."""


def test_a_grammar_that_takes_too_much_work_behind_its_first_token_is_refused(small):
    with (
        running("async", small) as engine,
        pytest.raises(InvalidRequest, match=r"structured\.json_schema=.* cannot be followed: .*items; max is"),
    ):
        engine.submit(PROMPTS[0], SamplingParams(structured=StructuredOutput(json_schema=AMBIGUOUS)))


@pytest.mark.parametrize("mode", MODES)
def test_a_grammar_that_takes_too_much_work_later_on_says_so(small, mode):
    """What submit cannot know: the error names the parameter and where it was, and ends its own sample alone."""
    late = {"type": "object", "properties": {"a": {"const": "yes"}, "b": AMBIGUOUS}, "required": ["a", "b"]}
    params = SamplingParams(structured=StructuredOutput(json_schema=late), temperature=0, max_tokens=60)
    with running(mode, small) as engine:
        failed, other = engine.generate([PROMPTS[0], PROMPTS[1]], [params, structured("regex", 0.0)])
    assert failed.finish_reason == "error"
    assert re.match(r"structured\.json_schema cannot be followed behind \d+ tokens: .*items; max is", failed.error)
    assert '"yes"' in failed.text
    assert re.fullmatch(REGEX, other.text)


def test_choices_of_any_character_and_schemas_of_any_mapping(small):
    schema = MappingProxyType({"anyOf": (MappingProxyType({"const": 7}),)})
    forms = [StructuredOutput(choice=["\x7f"]), StructuredOutput(json_schema=schema)]
    with running("async", small) as engine:
        outputs = engine.generate([PROMPTS[0]] * 2, [SamplingParams(structured=form) for form in forms])
    assert [output.text for output in outputs] == ["\x7f", "7"]


def test_without_a_tokenizer_or_an_end_there_is_no_structured_output(saved):
    with running("sync") as engine, pytest.raises(InvalidRequest, match="this model has no tokenizer"):
        engine.submit([1, 2], SamplingParams(structured=StructuredOutput(json_object=True)))


def test_grammars_compile_beside_the_loop(small):
    """Threads that submit do not hold up each other's samples, and a grammar is compiled once."""
    with running("async", small) as engine, ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(engine.generate, [PROMPTS[n]], structured("ebnf", 1.0, seed=n)) for n in range(4)]
        assert all(re.fullmatch(EXPRESSION, future.result()[0].text) for future in futures)


def test_masks_of_a_grammar_allow_no_end_before_the_text_is_complete(small):
    with running("sync", small) as engine:
        request = engine.submit(PROMPTS[0], structured("regex", 0.0)).sample.request
        constraint = engine._parts.constraints.begin(request)
    mask = np.zeros(VOCAB // 32, np.int32)
    constraint.fill(mask)
    assert not mask[0] >> 2 & 1
    constraint.advance(engine.tokenizer.encode("abc is red 123", special_tokens=False))
    constraint.fill(mask)
    assert mask[0] >> 2 & 1
    constraint.advance(engine.tokenizer.encode("4", special_tokens=False))
    constraint.fill(mask)
    assert np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist() == [2]


def test_every_end_is_allowed_once_the_text_is_complete_and_none_before(small):
    """C13: a model with two end-of-sequence ids, and a stop id that no grammar allows."""
    constraint = Grammars(load_tokenizer(small), VOCAB, [2, 0]).begin(StructuredOutput(regex="a"), [5])
    mask = np.zeros(VOCAB // 32, np.int32)
    constraint.fill(mask)
    assert not {0, 2, 5} & set(np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist())
    constraint.advance([81])  # the token of an a
    constraint.fill(mask)
    assert np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist() == [0, 2, 5]
    constraint.advance([0])
    constraint.fill(mask)
    assert np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist() == [0, 2, 5]


@pytest.mark.parametrize("mode", MODES)
def test_log_probabilities_of_held_rows_are_those_of_the_model(small, mode):
    """A mask changes which token comes, not what the model thought of it."""
    with running(mode, small) as engine:
        output = engine.generate([PROMPTS[0]], structured("regex", 1.0, logprobs=1))[0]
        ids = output.token_ids
        again = engine.generate([[*PROMPTS[0], *ids]], SamplingParams(max_tokens=1, prompt_logprobs=1))[0]
    found = [entry.logprob for entry in output.outputs[0].logprobs]
    expected = [entry.logprob for entry in again.prompt_logprobs[len(PROMPTS[0]) :]]
    assert found == pytest.approx(expected, abs=1e-4)
