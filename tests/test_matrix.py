"""Every sampling parameter, alone and in pairs, under every way to run: the tokens of transformers' processors."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matrix import CELLS, LINES, NEIGHBOUR, PROMPTS, Cell, check, make_params, run_line, running_cell
from sampling_oracle import Reference

PLAIN = Cell("sync", False, False)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return Reference(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def engine_of(reference):
    """Return a function: cell -> its engine, made once."""
    with ExitStack() as stack:
        made = {}

        def get(cell):
            if cell not in made:
                made[cell] = stack.enter_context(running_cell(cell, reference.directory))
            return made[cell]

        yield get


@pytest.fixture(scope="module")
def plain_tokens(engine_of):
    """Tokens of the prompts, and of the neighbour, without any parameter."""
    return tokens_of(run_line(engine_of(PLAIN), PLAIN, make_params()))


@pytest.fixture(scope="module")
def tokens_without(engine_of):
    """For each line, the tokens of the prompts without its parameter, but with what else it sets."""
    without = {line: dict([*values.items()][1:]) for line, values in LINES.items()}
    engine = engine_of(PLAIN)
    return {line: tokens_of(run_line(engine, PLAIN, make_params(values)))[:-1] for line, values in without.items()}


def tokens_of(outputs):
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def run_and_check(engine_of, reference, plain_tokens, cell, params):
    outputs = run_line(engine_of(cell), cell, params)
    for prompt, output in zip(PROMPTS, outputs[:-1], strict=True):
        check(reference, prompt, output, params)
    assert tokens_of(outputs)[-1] == plain_tokens[-1], "the neighbour has the parameter too"
    return outputs


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_each_parameter_alone(engine_of, reference, plain_tokens, tokens_without, cell, line):
    """A01, A03, A04, A32, C40, C41, C43, G15: right tokens, others than without it, the neighbour's untouched."""
    outputs = run_and_check(engine_of, reference, plain_tokens, cell, make_params(LINES[line]))
    assert tokens_of(outputs)[:-1] != tokens_without[line]
    if cell.preempted:
        assert any(output.preemptions for output in outputs[:-1])


PAIRS = st.lists(st.sampled_from(sorted(LINES)), min_size=2, max_size=2, unique=True)


def check_pair(engine_of, reference, plain_tokens, cell, pair, scored):
    asked = {"logprobs": 0} if scored else {}
    params = make_params(*(LINES[line] for line in pair), asked)
    outputs = run_and_check(engine_of, reference, plain_tokens, cell, params)
    # What ends at a stop id may be short enough for the cache.
    short = params.stop_token_ids and not params.min_tokens
    assert not cell.preempted or short or any(s.preemptions for output in outputs for s in output.outputs)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pair=PAIRS, cell=st.sampled_from(CELLS), scored=st.booleans())
def test_pairs_of_parameters(engine_of, reference, plain_tokens, pair, cell, scored):
    """E08: with log-probabilities, too, which are raw whatever edits the logits."""
    check_pair(engine_of, reference, plain_tokens, cell, pair, scored)


@pytest.mark.exhaustive
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_all_pairs_of_parameters(engine_of, reference, plain_tokens, cell):
    lines = sorted(LINES)
    for place, first in enumerate(lines):
        for second in lines[place + 1 :]:
            check_pair(engine_of, reference, plain_tokens, cell, (first, second), scored=(place % 2 == 1))


def test_the_neighbour_is_right(engine_of, reference):
    check(reference, NEIGHBOUR, run_line(engine_of(PLAIN), PLAIN, make_params())[-1], make_params())
