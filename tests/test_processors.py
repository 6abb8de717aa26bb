"""Logits processors: they see real tokens only, and what goes wrong in one ends its own sample."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from engines import MODES, running

from twostroke import InvalidRequest, SamplingParams
from twostroke.held_input import ProcessorCall, RowTokens
from twostroke.sampling.processors import run_processors

PROMPTS = [[5, 6, 7], list(range(20, 45)), [9], [11, 12, 13, 14]]
TOKENS = 24
VOCAB = 512


class Follow:
    """Forces the token that is one more than the last; keeps what it saw."""

    def __init__(self):
        self.seen = []

    def __call__(self, logits, rows):
        assert logits.shape == (len(rows), VOCAB)
        assert logits.dtype == torch.float32
        for own, row in zip(logits, rows, strict=True):
            self.seen.append((row.prompt_len, row.token_ids.tolist(), row.output_ids.tolist()))
            own[(int(row.token_ids[-1]) + 1) % VOCAB] = 1e6
        return logits


def favour(logits, rows):
    return logits * 0.5


def fail_at_three(logits, rows):
    if any(len(row.output_ids) == 3 for row in rows):
        raise ValueError("no more")
    return logits


def params(*processors, **more):
    values = {"temperature": 1.0, "seed": 7, "max_tokens": TOKENS, "ignore_eos": True}
    return SamplingParams(**{**values, "logits_processors": processors, **more})


@pytest.mark.parametrize("blocks", [None, 20], ids=["roomy", "preempted"])
@pytest.mark.parametrize("mode", MODES)
def test_a_processor_sees_every_real_token_once(mode, blocks):
    """A03, A31: what a processor saw last is what the row really said, at each of its tokens."""
    follow = Follow()
    options = {"block_size": 4, "max_model_len": 52, "num_blocks": blocks, "max_chunk_tokens": 4}
    with running(mode, **options) as engine:
        outputs = engine.generate(PROMPTS, [params(follow), params(follow), params(), params(follow, favour)])
        assert (engine.stats().preemptions > 0) == (blocks is not None)
    for place in (0, 1, 3):
        prompt, ids = PROMPTS[place], outputs[place].token_ids
        assert ids == [(prompt[-1] + 1 + n) % VOCAB for n in range(TOKENS)]
        seen = [entry for entry in follow.seen if entry[1][: entry[0]] == prompt]
        known = {len(output): (tokens, output) for _, tokens, output in seen}
        assert known == {n: (prompt + ids[:n], ids[:n]) for n in range(TOKENS)}
    assert all(0 <= token < VOCAB for _, tokens, _ in follow.seen for token in tokens)
    with running("sync") as engine:
        assert engine.generate([PROMPTS[2]], params())[0].token_ids == outputs[2].token_ids


@pytest.mark.parametrize("mode", MODES)
def test_an_error_in_a_processor_ends_its_own_sample(mode):
    with running(mode) as engine:
        first = engine.submit(PROMPTS[0], params(fail_at_three))
        others = engine.generate(PROMPTS[1:], [params(fail_at_three, max_tokens=2), params(favour), params()])
        failed = first.result()
        again = engine.generate([PROMPTS[2]], params(favour))[0]
    assert (failed.finish_reason, failed.error, len(failed.token_ids)) == ("error", "ValueError: no more", 3)
    assert [output.finish_reason for output in others] == ["length"] * 3
    assert again.token_ids == others[1].token_ids


def test_a_processor_changes_the_output_and_others_run_after_it():
    with running("async") as engine:
        outputs = engine.generate([PROMPTS[0]] * 3, [params(), params(favour), params(favour, favour, top_k=1)])
    assert len({tuple(output.token_ids) for output in outputs}) == 3


def test_only_the_row_for_which_a_processor_raises_becomes_bad():
    def picky(logits, rows):
        logits += 1
        if any(row.prompt_len == 2 for row in rows):
            raise RuntimeError("not this one")
        return logits

    rows = [RowTokens(np.arange(4, dtype=np.int32), prompt_len) for prompt_len in (1, 2, 3)]
    failures = []
    logits = torch.zeros(4, 8)
    run_processors(logits, [ProcessorCall([picky], 1, 4, rows, lambda place, error: failures.append((place, error)))])
    assert [place for place, _ in failures] == [1]
    assert logits[:, 0].tolist()[:2] == [0.0, 1.0]
    assert logits[2].isnan().all()
    assert (logits[3] == 1).all()


@dataclass
class Scaled:
    """Equal to others, and so not to be hashed."""

    factor: float

    def __call__(self, logits, rows):
        return logits * self.factor


@pytest.mark.parametrize("mode", MODES)
def test_processors_need_not_be_hashable(mode):
    """And equal ones are no less two: only those that are the same object are called together."""
    with running(mode) as engine:
        hashed, *others = engine.generate([PROMPTS[0]] * 3, [params(favour), params(Scaled(0.5)), params(Scaled(0.5))])
    assert [output.token_ids for output in others] == [hashed.token_ids] * 2


@pytest.mark.parametrize("mode", MODES)
def test_what_becomes_of_lists_after_submit_changes_nothing(mode):
    """C24: a sample that begins later has what was asked for, and was checked, at submit."""
    with running(mode, max_rows=1) as engine:
        expected = engine.generate([PROMPTS[0]], params(favour))[0].token_ids
        engine.pause()
        processors = [favour]
        handle = engine.submit(PROMPTS[0], params(logits_processors=processors))
        processors.clear()
        engine.resume()
        assert handle.result().token_ids == expected


def give(logits, value):
    return value


def shrink(logits, value):
    return logits.resize_(1, 1)


RETURNED = {
    "nothing": (give, None),
    "another shape": (give, torch.zeros(1)),
    "booleans": (give, torch.zeros(1, VOCAB, dtype=torch.bool)),
    "integers": (give, torch.zeros(1, VOCAB, dtype=torch.int64)),
    "complex numbers": (give, torch.zeros(1, VOCAB, dtype=torch.complex64)),
    "another device": (give, torch.zeros(1, VOCAB, device="meta")),
    "what it was given, in another shape": (shrink, None),
}


@pytest.mark.parametrize(("act", "value"), RETURNED.values(), ids=RETURNED)
def test_a_processor_must_return_logits(act, value):
    with running("async") as engine:
        output = engine.generate([PROMPTS[0]], params(lambda logits, rows: act(logits, value)))[0]
    assert output.finish_reason == "error"
    assert re.search(rf"a logits processor returned .*, not logits of shape \[1, {VOCAB}\]", output.error)


def test_a_processor_may_return_another_floating_point_type():
    with running("async") as engine:
        outputs = engine.generate([PROMPTS[0]] * 2, [params(), params(lambda logits, rows: logits.double())])
    assert outputs[0].token_ids == outputs[1].token_ids


class Unreadable(Exception):
    def __str__(self):
        raise RuntimeError("no message")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
        (asyncio.CancelledError(), "CancelledError: "),
        (Unreadable(), "Unreadable: its message cannot be read: RuntimeError"),
        (ValueError("x" * 100_000), f"ValueError: {'x' * 2000}..."),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_a_processor_raises_ends_its_own_sample_only(mode, error, told):
    def fail(logits, rows):
        raise error

    with running(mode) as engine:
        failed, other = engine.generate([PROMPTS[0]] * 2, [params(fail), params(favour)])
        again = engine.generate([PROMPTS[0]], params(favour))[0]
    assert (failed.finish_reason, failed.error) == ("error", told)
    assert other.token_ids == again.token_ids


def test_a_processor_cannot_hide_rows_from_what_follows():
    def hide(logits, rows):
        rows.clear()
        raise RuntimeError("who?")

    with running("async") as engine:
        outputs = engine.generate(PROMPTS[:1] * 2, params(hide)) + engine.generate(PROMPTS[:1], params(hide))
    assert [output.error for output in outputs] == ["AttributeError: 'tuple' object has no attribute 'clear'"] * 3


@pytest.mark.parametrize("wrong", [3, "ab", [3], favour])
def test_what_is_no_list_of_processors_is_refused(wrong):
    with running("async") as engine, pytest.raises(InvalidRequest, match=r"logits_processors=.* must be a list"):
        engine.submit([1], SamplingParams(logits_processors=wrong))
