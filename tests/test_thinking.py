"""The thinking budget: exact under every loop, shared by all thoughts of a sample, and bound to it."""

from __future__ import annotations

import re
from unittest import mock

import numpy as np
import pytest
from engines import MODES, running
from scripted import save_small
from watching import PATIENCE

from twostroke import InvalidRequest, SamplingParams, StructuredOutput
from twostroke.constraints.thinking import ThinkingBudget

START, END = [3], [4, 8]
PROMPTS = [[5, 6, 7, 3], [*range(20, 45), 3], [9, 3], [11, 12, 13, 14]]
TOKENS = 30


def thinking(budget, **more):
    values = {"temperature": 1.0, "seed": 7, "max_tokens": TOKENS, "ignore_eos": True, **more}
    return SamplingParams(max_thinking_tokens=budget, thinking_start=START, thinking_end=END, **values)


def plain(**more):
    return SamplingParams(**{"temperature": 1.0, "seed": 7, "max_tokens": TOKENS, "ignore_eos": True, **more})


@pytest.mark.parametrize("blocks", [None, 20], ids=["roomy", "preempted"])
@pytest.mark.parametrize("mode", MODES)
def test_the_end_is_forced_after_the_budget_and_not_a_token_earlier(mode, blocks):
    """C42: rows come and go around those that think, and others' budgets stay their own."""
    budgets = [6, 0, 13, None]
    options = {"block_size": 4, "max_model_len": 60, "num_blocks": blocks, "max_chunk_tokens": 4}
    params = [plain() if budget is None else thinking(budget) for budget in budgets]
    with running(mode, **options) as engine:
        gone = engine.submit([1, 2], thinking(2, max_tokens=5))
        outputs = engine.generate(PROMPTS, params)
        gone.result()
        assert (engine.stats().preemptions > 0) == (blocks is not None)
    with running("sync") as engine:
        free = engine.generate(PROMPTS, plain())
    for budget, output, without in zip(budgets, outputs, free, strict=True):
        if budget is None:
            assert output.token_ids == without.token_ids
        else:
            assert output.token_ids[:budget] == without.token_ids[:budget]
            assert output.token_ids[budget : budget + 2] == END


@pytest.mark.parametrize("mode", MODES)
def test_rows_are_held_only_where_the_budget_can_run_out(mode):
    """Every mask is waited for: on a busy machine some would come late, and their steps would be done again."""
    patience = mock.patch("twostroke.runner.Runner._patience", return_value=PATIENCE)
    with patience, running(mode) as engine:
        held = engine._parts.scheduler.batch.held
        counts = []
        launched = held.launched
        held.launched = lambda plan: (counts.append(len(plan.held)), launched(plan))
        engine.generate([PROMPTS[0]], thinking(20))
    assert sum(counts) < 15
    assert sum(counts[2:18]) == 0


def masks(budget, prompt, tokens):
    """What each token could be: None for all, else the ids. Asked for where the constraint wants to be asked."""
    constraint, mask = ThinkingBudget(prompt, START, END, budget, None), np.zeros(4, np.int32)
    found, known = [], 0
    for count in range(len(tokens) + 1):
        if count and count < constraint.held_from:
            found.append(None)
            continue
        constraint.advance(tokens[known:count])
        constraint.fill(mask)
        known = count
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist()
        found.append(None if len(allowed) == 128 else allowed)
    return found


@pytest.mark.parametrize(
    ("budget", "prompt", "tokens", "expected"),
    [
        (2, [3], [9, 9, 4, 8, 9], [None, None, [4], [8], None, None]),
        (2, [9], [9, 3, 9, 9, 4, 8], [None, None, None, None, [4], [8], None]),
        (3, [3], [9, 4, 8, 9, 3, 4], [None, None, None, None, None, [4], [8]]),  # the end counts; 0 are left
        (3, [3], [9, 9, 4, 8], [None, None, None, [8], None]),  # half of the end was there
        (5, [3, 9, 4, 8], [9], [None, None]),  # thinking ended in the prompt
        (1, [3, 9, 9, 9], [9], [None, [4]]),  # what the prompt thought does not count
        (0, [9], [3, 4, 8], [None, [4], [8], None]),
    ],
)
def test_which_tokens_are_allowed(budget, prompt, tokens, expected):
    assert masks(budget, prompt, tokens) == expected


@pytest.fixture(scope="module")
def small(smollm2_dir, tmp_path_factory):
    return save_small(smollm2_dir, tmp_path_factory.mktemp("small"), vocab_size=512)


@pytest.mark.parametrize("mode", MODES)
def test_structured_output_begins_behind_the_thinking(small, mode):
    """G12: the budget counts thoughts alone, and the grammar what follows them."""
    regex = StructuredOutput(regex="[a-f]{3,9}[0-9]{2}")
    with running(mode, small) as engine:
        open_, closed = engine.generate(
            [[20, 30, *START], [20, 30]], [thinking(9, ignore_eos=False, structured=regex) for _ in range(2)]
        )
        end = next(n for n in range(len(open_.token_ids)) if open_.token_ids[n : n + 2] == END)
        assert end <= 9
        assert re.fullmatch("[a-f]{3,9}[0-9]{2}", engine.tokenizer.decode(open_.token_ids[end + 2 :]))
        assert re.fullmatch("[a-f]{3,9}[0-9]{2}", closed.text)


def test_texts_and_the_usual_tokens_mark_thinking(small):
    with running("async", small) as engine:
        texts = SamplingParams(max_thinking_tokens=2, thinking_start="<a>", thinking_end="is on", max_tokens=12)
        prompt = engine.tokenizer.encode("so <a>")
        end = engine.tokenizer.encode("is on")
        assert engine.generate([prompt], texts)[0].token_ids[2 : 2 + len(end)] == end
        with pytest.raises(InvalidRequest, match="thinking_start=None: this model has no token '<think>'"):
            engine.submit([1], SamplingParams(max_thinking_tokens=2))
        with pytest.raises(InvalidRequest, match=r"thinking_end='' must be at least one token"):
            engine.submit([1], SamplingParams(max_thinking_tokens=2, thinking_start="a", thinking_end=""))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_thinking_tokens": -1}, "max_thinking_tokens=-1 must be at least 0"),
        ({"max_thinking_tokens": 2, "thinking_start": 3}, "thinking_start=3 must be a string or a list"),
        ({"thinking_end": [3]}, "thinking_end=.* means nothing without max_thinking_tokens"),
        ({"max_thinking_tokens": 2, "thinking_start": [999], "thinking_end": [1]}, "thinking_start.0.=999"),
        ({"max_thinking_tokens": 2, "thinking_start": [1], "thinking_end": []}, "at least one token"),
        (
            {"max_thinking_tokens": 2, "thinking_start": [1] * 65, "thinking_end": [1]},
            "thinking_start=.* has 65 tokens, at most 64 are supported",
        ),
        (
            {"max_thinking_tokens": 2, "thinking_start": [1], "thinking_end": [1] * 100_000},
            "thinking_end=.* has 100000 tokens, at most 64 are supported",
        ),
        ({"max_thinking_tokens": 2, "thinking_start": "a"}, "this model has no tokenizer, give token ids"),
    ],
)
def test_refusals(params, message):
    with running("async") as engine, pytest.raises(InvalidRequest, match=message):
        engine.submit([1], SamplingParams(**params))


@pytest.mark.parametrize("mode", MODES)
def test_a_budget_beyond_every_counter_is_none(mode):
    """C03: an integer that no column of the rows could hold."""
    with running(mode) as engine:
        free, budget = engine.generate([[5, *START]] * 2, [plain(), thinking(10**30)])
    assert budget.token_ids == free.token_ids
