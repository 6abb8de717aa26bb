"""`sampling` on the CPU with a tiny model: every case runs, and is what it says."""

from dataclasses import replace
from unittest import mock

import pytest

from twostroke import Engine, SamplingParams, StructuredOutput, TwostrokeError
from twostroke.bench.made_up_tokenizer import made_up_tokenizer
from twostroke.bench.options import BenchOptions
from twostroke.bench.sampling import CASES, Load, bare_argmax, run_load, time_step

LOAD = Load(model="tiny", device="cpu", dtype="float32", rows=11, prompt=5, tokens=12)


def test_every_case_is_set_against_the_bare_argmax() -> None:
    said = []
    runs = run_load(LOAD, "async", BenchOptions(repetitions=1), said.append)
    assert [run.case for run in runs] == ["argmax", *CASES]
    assert runs[0].relative == 1.0
    assert all(run.tokens == 12 * 11 and run.loop == "async" for run in runs)
    assert [line.split(",")[0] for line in said] == ["argmax", *CASES], "each is told of when it is done"
    assert all(run.ms_per_step > 0 and run.seconds == pytest.approx(12e-3 * run.ms_per_step) for run in runs)


def test_the_bare_argmax_makes_the_tokens_of_its_case_only() -> None:
    drawn = []

    def bare(logits, *rest):
        drawn.append(len(logits))
        bare_argmax(logits, *rest)

    with mock.patch("twostroke.bench.sampling.bare_argmax", bare):
        run_load(replace(LOAD, tokens=9), "sync", BenchOptions(repetitions=1), lambda line: None)
    assert max(drawn) == 11
    assert len(drawn) < 30, "not those of the other cases"


def test_parameters_are_those_of_the_cases() -> None:
    asked = {case: SamplingParams(**parameters(1)) for case, parameters in CASES.items()}
    assert asked["greedy"] == asked["grammar"] == SamplingParams(temperature=0.0)
    assert asked["top_p"].top_p < 1
    assert asked["penalties"].repetition_penalty > 1
    held = [row for row in range(256) if "structured" in CASES["grammar"](row)]
    assert len(held) == 26


def test_a_row_that_ends_early_is_no_result() -> None:
    engine = Engine("tiny", device="cpu", max_rows=11, max_model_len=8, num_blocks=64)
    with engine, pytest.raises(TwostrokeError, match="not all of 11 rows"):
        time_step(engine, LOAD, CASES["greedy"], 12)


def test_the_tokenizer_has_the_size_of_the_model() -> None:
    tokenizer = made_up_tokenizer(1000)
    assert tokenizer.vocab_size == 1000
    assert tokenizer.decode(tokenizer.encode("any text, naïve")) == "any text, naïve"
    assert made_up_tokenizer(1000).to_json() == tokenizer.to_json()


def test_a_grammar_goes_on_for_as_long_as_the_rows_run() -> None:
    structured = CASES["grammar"](0)["structured"]
    assert isinstance(structured, StructuredOutput)
    assert structured.json_schema["properties"]["text"]["minLength"] > 16 * Load().tokens
