"""Any parameters together, those of the text and of held rows too: no way to run a request changes what it gives."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from engines import MODES
from matrix import Cell, prefer_in_rows, running_cell
from scripted import save_small
from watching import PATIENCE

from twostroke import InvalidRequest, SamplingParams, StructuredOutput
from twostroke.text.output import RequestOutput

VOCAB = 512
NEW = 24
CELLS = [Cell(mode, tight, tight) for mode in MODES for tight in (False, True)]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMS: list[dict[str, Any]] = [
    {"json_schema": SCHEMA},
    {"regex": "[a-f]{1,9}(red|green)?"},
    {"regex": "(ab)*"},
    {"regex": ""},
    {"choice": ["yes", "größer", "😀", "yesterday"]},
    {"grammar": 'root ::= "a" root | "b"'},
    {"json_object": True},
]


def fail_at_five(logits, rows):
    if any(len(row.output_ids) == 5 for row in rows):
        raise ValueError("five")
    return logits * 0.9


def bar_all_but_the_best(logits, rows):
    return logits.masked_fill(logits < logits.amax(1, keepdim=True), -torch.inf)


def some_ids(chance: random.Random, count: int) -> list[int]:
    return chance.sample(range(VOCAB), count)


def draw_params(chance: random.Random) -> SamplingParams:
    """Each parameter is set in some, often at the end of its range."""

    def of(*values: Any) -> Any:
        return chance.choice(values)

    usual = {"max_tokens": of(1, 3, NEW, NEW), "temperature": of(0, 1e-5, 1, 1, 50), "seed": of(0, 2**64 - 1, 7)}
    offered: dict[str, Any] = {
        "top_k": of(1, 5, VOCAB - 1, VOCAB, 10**12),
        "top_p": of(1e-60, 0.5, 0.999999),
        "min_p": of(1e-60, 0.3, 1),
        "typical_p": of(1e-60, 0.2, 0.9),
        "presence_penalty": of(-1e6, 2, 1e6),
        "frequency_penalty": of(-1e6, 2, 1e6),
        "repetition_penalty": of(1e-3, 1.3, 1e3),
        "no_repeat_ngram_size": of(1, 2, 10**9),
        "logit_bias": dict.fromkeys(some_ids(chance, 5), of(-1e6, -100, 100, 1e6)),
        "allowed_token_ids": [2, *some_ids(chance, of(1, 30, 200))],
        "bad_words": [*([token] for token in some_ids(chance, 20)), [5, 6, 7], [6, 7], [7, 7, 7]],
        "min_tokens": of(1, usual["max_tokens"]),
        "ignore_eos": True,
        "stop_token_ids": some_ids(chance, of(1, 20)),
        "stop": of(["e", "er"], ["a", "b"], "\ufffd", ["é", "\n", " "]),
        "include_stop": True,
        "skip_special_tokens": False,
        "n": of(2, 3),
        "best_of": of(3, 4),
        "logprobs": of(0, 1, 20),
        "prompt_logprobs": of(0, 20),
        "structured": StructuredOutput(**of(*FORMS), jump_forward=of(True, False)),
        "max_thinking_tokens": of(0, 4, 10**20),
        "logits_processors": of([prefer_in_rows], [fail_at_five], [prefer_in_rows, bar_all_but_the_best]),
    }
    chosen = {name: offered[name] for name in chance.sample(list(offered), of(1, 2, 4, 8))}
    if "max_thinking_tokens" in chosen:
        chosen |= {"thinking_start": [5], "thinking_end": of([8], [8, 9, 10])}
    return SamplingParams(**usual | chosen)


def draw_requests(seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts, some of which begin alike, with their parameters."""
    chance = random.Random(seed)
    common = some_ids(chance, 30)
    prompts = [common[: chance.randrange(8, 30)] if n % 2 else some_ids(chance, 20) for n in range(7)]
    return [([*prompt, 5], draw_params(chance)) for prompt in prompts]


@pytest.fixture(scope="module")
def engines(smollm2_dir, tmp_path_factory):
    """An engine of each cell."""
    directory = save_small(smollm2_dir, tmp_path_factory.mktemp("small"), vocab_size=VOCAB)
    with ExitStack() as stack:
        yield {cell: stack.enter_context(running_cell(cell, directory, max_model_len=64)) for cell in CELLS}


def check_batch(engines, seed):
    requests = draw_requests(seed)
    expected = None
    for cell, engine in engines.items():
        asked = [ask(engine, prompt, params) for prompt, params in requests]
        found = [told(answer if isinstance(answer, str) else answer.result(PATIENCE)) for answer in asked]
        expected = expected or found
        for (prompt, params), one, other in zip(requests, expected, found, strict=True):
            assert other[0] == one[0], f"{cell}, seed {seed}: {prompt} with {params}"
            assert other[1] == pytest.approx(one[1], rel=1e-3, abs=1e-3, nan_ok=True), f"{cell}, seed {seed}: {params}"


def ask(engine, prompt, params):
    """Its handle, or why it was refused."""
    try:
        return engine.submit(prompt, params)
    except InvalidRequest as error:
        return str(error)


def told(answer: RequestOutput | str) -> tuple[Any, list[float]]:
    """What must be the same, and the log-probabilities."""
    if isinstance(answer, str):
        return answer, []
    samples = [(one.token_ids, one.text, one.finish_reason, one.error, one.seed) for one in answer.outputs]
    listed = [answer.prompt_logprobs, *(one.logprobs for one in answer.outputs)]
    entries = [entry for entries in listed for entry in entries or () if entry is not None]
    return (samples, [(entry.token_id, len(entry.top)) for entry in entries]), [entry.logprob for entry in entries]


def check_batches(engines, seeds):
    """And that places were lost where there is not room for all."""
    before = {cell: engine.stats().preemptions for cell, engine in engines.items()}
    for seed in seeds:
        check_batch(engines, seed)
    for cell, engine in engines.items():
        assert (engine.stats().preemptions > before[cell]) == cell.preempted


def test_any_parameters_together(engines):
    """A01, A03, A31, C06, G15: all give what the synchronous loop with room for everything does."""
    check_batches(engines, range(6))


@pytest.mark.exhaustive
def test_many_parameters_together(engines):
    check_batches(engines, range(100, 160))
