"""Failure stays where it belongs: bad logits end one request; a dead part ends the engine, and nobody waits for it."""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
import weakref

import pytest
import torch
from engines import MODES, running
from watching import PATIENCE, make_handles, quiet, wait_until

from twostroke import EngineDead, SamplingParams
from twostroke.errors import clear_frames

VICTIM, OTHER = list(range(3, 14)), list(range(100, 140))


def greedy(max_tokens=10, **others):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **others)


def spoil_logits(engine, position, *values):
    """Write `values` over the first logits of the token at `position`, which only one request reaches."""
    model = engine._parts.loaded.model
    forward = model.forward

    def spoiled(step, attention):
        logits = forward(step, attention)
        positions = step.positions if step.sample_index is None else step.positions[step.sample_index]
        here = positions == position
        for place, value in enumerate(values):
            logits[here, place] = value
        if len(values) == 1:
            logits[here] = values[0]
        return logits

    model.forward = spoiled
    return lambda: delattr(model, "forward")


@pytest.fixture(scope="module", params=MODES)
def engine(request):
    with running(request.param, num_blocks=12, block_size=8, max_chunk_tokens=6) as engine:
        yield engine


BAD_LOGITS = {
    "all NaN": [torch.nan],
    "one NaN": [torch.nan, 0.0],
    "a NaN and an infinity": [torch.inf, torch.nan],
    "one +inf": [torch.inf, 0.0],
    "all -inf": [-torch.inf],
}


@pytest.mark.parametrize("kind", BAD_LOGITS)
@pytest.mark.parametrize("index", [0, 1, 5])
def test_bad_logits_end_that_request_with_an_error(engine, kind, index):
    """C04, C05: at its first token, and in the middle; the rows beside it and its successors are untouched."""
    params = greedy() if index != 1 else SamplingParams(seed=7, max_tokens=10, ignore_eos=True)
    alone = [output.token_ids for output in engine.generate([VICTIM, OTHER], [params, greedy()])]
    heal = spoil_logits(engine, len(VICTIM) - 1 + index, *BAD_LOGITS[kind])
    handles = make_handles(engine, [VICTIM, OTHER], [params, greedy()])
    engine._start(handles)
    victim, other = (handle.result(PATIENCE) for handle in handles)
    heal()
    assert other.token_ids == alone[1]
    assert (victim.finish_reason, victim.token_ids) == ("error", alone[0][:index])
    assert "NaN" in victim.error
    assert other.error is None
    quiet(engine)
    assert [output.token_ids for output in engine.generate([VICTIM, OTHER], [params, greedy()])] == alone


@torch.inference_mode()
def test_a_cache_full_of_nan_poisons_no_later_owner(engine):
    """C04, F10: the NaN keys and values that a request left behind lie in the same blocks as its successors' tokens."""
    model = engine._parts.loaded.model
    alone = engine.generate(VICTIM, greedy())[0].token_ids
    poison = next(token for token in range(500) if token not in VICTIM + alone)
    embedding = model.embedding[poison].clone()
    model.embedding[poison] = torch.nan
    try:
        outputs = engine.generate([[poison] * 70], greedy())
        assert [output.finish_reason for output in outputs] == ["error"]
        assert {tuple(output.token_ids) for output in engine.generate([VICTIM] * 4, greedy())} == {tuple(alone)}
    finally:
        model.embedding[poison] = embedding
    quiet(engine)


class Waiters:
    """Callers that wait for one engine in every way there is, each in a thread; `outcomes` is how their waits ended."""

    def __init__(self, engine):
        self.outcomes = {}
        params = greedy(1500)

        def iterate():
            for _ in engine.stream(VICTIM, params):
                pass

        async def iterate_async():
            async for _ in engine.stream(VICTIM, params):
                pass

        async def wait_async():
            return await engine.submit(VICTIM, params)

        self._handle = engine.submit(VICTIM, params)
        ways = {
            "result": self._handle.result,
            "result with a timeout": lambda: self._handle.result(PATIENCE),
            "iteration": iterate,
            "asynchronous iteration": lambda: asyncio.run(iterate_async()),
            "await": lambda: asyncio.run(wait_async()),
            "generate": lambda: engine.generate([VICTIM, OTHER], params),
        }
        self.threads = [threading.Thread(target=self._wait, args=way, daemon=True) for way in ways.items()]
        for thread in self.threads:
            thread.start()
        wait_until(lambda: len(engine._life.delivery._handles) == 6)

    def _wait(self, name, way):
        try:
            self.outcomes[name] = way()
        except Exception as error:
            self.outcomes[name] = error

    def join(self):
        for thread in self.threads:
            thread.join(PATIENCE)
        assert len(self.outcomes) == len(self.threads), "someone waits for ever"


def break_it(engine, place, error):
    """Let a part of the engine fail once its requests are well under way."""
    runner, scheduler = engine._parts.runner, engine._parts.scheduler
    owner, name = {
        "h2d": (runner, "copy_in"),
        "compute": (engine._parts.loaded.model, "forward"),
        "attention": (engine._parts.forward.attention, "forward"),
        "d2h": (runner, "copy_out"),
        "launch": (runner, "launch"),
        "plan": (scheduler, "plan"),
        "commit": (scheduler, "commit"),
        "delivery": (engine._life.delivery, "_deliver"),
        "detokenizer": (engine._life.delivery, "_whole_text"),
    }[place]
    work, calls = getattr(owner, name), []

    def fail_at_the_third(*args):
        calls.append(args)
        if len(calls) == 3:
            raise error
        return work(*args)

    setattr(owner, name, fail_at_the_third)


PLACES = ["h2d", "compute", "d2h", "launch", "plan", "commit", "delivery"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(3)], ids=["error", "exit"])
def test_a_dead_part_reaches_every_caller(mode, place, error):
    """G10: a model that raises, or any worker that dies: all waits end at once, later calls fail, close works."""
    with running(mode, num_blocks=600) as engine:
        waiters = Waiters(engine)
        break_it(engine, place, error)
        waiters.join()
        for name, outcome in waiters.outcomes.items():
            assert isinstance(outcome, EngineDead), name
            assert outcome.__cause__ is error
            assert str(error) in str(outcome)
            assert type(error).__name__ in str(outcome)
        for call in (lambda: engine.submit(VICTIM), lambda: engine.generate([VICTIM]), lambda: engine.generate([])):
            with pytest.raises(EngineDead) as dead:
                call()
            assert dead.value.__cause__ is error
        with pytest.raises(EngineDead):
            waiters._handle.result()
        waiters._handle.cancel()
        engine.stats()
    assert not any(thread.is_alive() for thread in (engine._life._thread, engine._life.delivery._thread))
    assert engine.stats().steps < 1000, "it went on with work that nobody waits for"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", ["attention", "commit"])
def test_the_memory_of_a_failed_engine_is_free_though_its_error_is_kept(mode, place, no_collection):
    """The frames of an error hold what they worked on, such as a layer's weights."""
    with running(mode) as engine:
        parts = engine._parts
        tensors = [*parts.loaded.model.tensors(), *parts.forward.attention.caches]
        memory = [weakref.ref(tensor) for tensor in tensors]
        del parts, tensors
        break_it(engine, place, ValueError("broken"))
        with pytest.raises(EngineDead) as kept:
            engine.generate(VICTIM, greedy(20))
    assert not any(tensor() is not None for tensor in memory)
    assert "fail_at_the_third" in "".join(traceback.format_exception(kept.value))


def test_errors_that_are_each_others_cause_have_an_end():
    """A callback's own, as `raise error from error` makes one: clearing their frames must not go round for ever."""
    error, another = ValueError("one"), ValueError("another")
    error.__cause__, another.__cause__ = another, error
    clear_frames(error)


def test_an_error_while_text_is_made_reaches_the_request_it_was_made_for():
    """G10: its request is no longer running and not yet handed over."""
    with running("async") as engine:
        break_it(engine, "detokenizer", ValueError("broken"))
        for _ in range(2):
            engine.generate(VICTIM, greedy(2))
        with pytest.raises(EngineDead, match="broken"):
            engine.submit(VICTIM, greedy(2)).result(PATIENCE)


@pytest.mark.parametrize("mode", MODES)
def test_an_idle_engine_that_dies_at_its_next_step(mode):
    """G10: the error meets a loop that had nothing to do before."""
    with running(mode) as engine:
        engine.generate(VICTIM, greedy(4))
        spoil = engine._parts.loaded.model
        spoil.forward = lambda step, attention: 1 / 0
        with pytest.raises(EngineDead, match="ZeroDivisionError: division by zero"):
            engine.generate(VICTIM, greedy(4))


class Unreadable(Exception):
    def __str__(self):
        raise RuntimeError("no message")


def test_an_error_whose_message_cannot_be_read_reaches_its_callers():
    """G10: to make the message of theirs must not fail."""
    with running("async") as engine:
        break_it(engine, "plan", Unreadable())
        with pytest.raises(EngineDead, match="the engine failed: Unreadable: its message cannot be read"):
            engine.submit(VICTIM, greedy(4)).result(PATIENCE)


def test_errors_that_many_callers_get_do_not_grow():
    """One instance raised again and again would collect all frames that it ever went through."""
    with running("async") as engine:
        break_it(engine, "plan", ValueError("broken"))
        handle = engine.submit(VICTIM, greedy(100))
        depths = []
        for _ in range(3):
            with pytest.raises(EngineDead) as dead:
                handle.result(PATIENCE)
            depths.append(len(dead.traceback))
            with pytest.raises(EngineDead) as dead:
                engine.submit(VICTIM)
            depths.append(len(dead.traceback))
        assert depths[:2] == depths[2:4] == depths[4:]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_idle_costs_no_cpu_time(mode):
    """A40, A39: with nothing to do, before the first request and after the last, every thread blocks."""
    with running(mode) as engine:
        for _ in range(2):
            before = time.process_time()
            time.sleep(0.5)
            assert time.process_time() - before < 0.05
            engine.generate(VICTIM, greedy(5))
            quiet(engine)
