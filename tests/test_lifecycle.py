"""How an engine ends: closed, forgotten, interrupted; and that it does not grow while it lives."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
from engines import MODES, running
from watching import PATIENCE, quiet, wait_until

import twostroke.build
from twostroke import Engine, EngineClosed, InvalidConfig, InvalidWeights, SamplingParams

PROMPT, OTHER = list(range(3, 14)), list(range(100, 117))


def greedy(max_tokens=10, **others):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **others)


def engine_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("twostroke")]


@pytest.mark.parametrize("mode", MODES)
def test_close_gives_every_running_request_its_output(mode):
    """G07: running, waiting for a place, streamed or not; nobody waits, and no thread stays."""
    before = engine_threads()
    with running(mode, num_blocks=600, max_rows=2) as engine:
        whole = engine.generate(PROMPT, greedy(40))[0].token_ids
        handles = [engine.submit(PROMPT, greedy(1500)) for _ in range(4)]
        stream = engine.stream(PROMPT, greedy(1500))
        seen, awaited = [], []

        async def wait():
            awaited.append(await engine.submit(PROMPT, greedy(1500)))

        consumers = [
            threading.Thread(target=lambda: seen.extend(stream)),
            threading.Thread(target=lambda: asyncio.run(wait())),
        ]
        for thread in consumers:
            thread.start()
        wait_until(lambda: len(engine._life.delivery._handles) == 6 and engine.stats().running == 2)
        engine.close()
        for thread in consumers:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        outputs = [*(handle.result(0) for handle in handles), stream.result(0), *awaited]
        assert [output.finish_reason for output in outputs] == ["cancelled"] * 6
        assert all(output.token_ids[:40] == whole[: len(output.token_ids)] for output in outputs)
        assert seen[-1].finish_reason == "cancelled"
        assert [token for delta in seen for token in delta.token_ids] == stream.result().token_ids
        assert engine_threads() == before


@pytest.mark.parametrize("mode", MODES)
def test_close_again_and_use_after_close(mode):
    with running(mode) as engine:
        handle = engine.submit(PROMPT, greedy(500))
        closers = [threading.Thread(target=engine.close) for _ in range(3)]
        for thread in closers:
            thread.start()
        for thread in closers:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        engine.close()
        for call in (engine.submit, engine.stream, engine.generate):
            with pytest.raises(EngineClosed, match="the engine is closed"):
                call(PROMPT)
        handle.cancel()
        assert handle.result(0).finish_reason == "cancelled"
        assert list(handle)[-1].finish_reason == "cancelled"
        assert engine.stats().running == 0


@pytest.mark.parametrize("mode", MODES)
def test_submits_that_race_with_close_end_in_one_way_or_the_other(mode):
    """A request is either refused, or gets its final output: it never hangs, and never fails for being late."""
    for round_ in range(6):
        ends = []

        def submit_until_refused(engine, ends=ends):
            handles = []
            try:
                while True:
                    handles.append(engine.submit(PROMPT, greedy(3)))
            except EngineClosed:
                ends.extend(handle.result(PATIENCE).finish_reason for handle in handles)

        with running(mode, num_blocks=100) as engine:
            threads = [threading.Thread(target=submit_until_refused, args=(engine,)) for _ in range(2)]
            for thread in threads:
                thread.start()
            time.sleep(0.004 * round_)
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        assert ends
        assert set(ends) <= {"length", "cancelled"}


def test_commands_left_just_before_the_close_are_taken():
    """The loop reads the inbox, then commands and the close come: they must not be lost between two looks."""
    with running("sync") as engine:
        inbox, take = engine._life.inbox, engine._life.inbox.take
        looked, handles = threading.Event(), []

        def close_behind_the_look(*, block):
            commands = take(block=block)
            if commands and looked.is_set() and not handles:
                handles.append(engine.submit(PROMPT, greedy(100)))
                engine._life._end(EngineClosed("the engine is closed"))
            return commands

        inbox.take = close_behind_the_look
        inbox.put(lambda scheduler: looked.set())  # the loop may still wait in the method proper
        assert looked.wait(PATIENCE)
        inbox.put(lambda scheduler: None)
        engine._life._thread.join(PATIENCE)
        assert handles[0].result(PATIENCE).finish_reason == "cancelled"


@pytest.mark.parametrize("mode", MODES)
def test_an_interrupt_in_generate_cancels_its_requests(mode):
    """Ctrl-C while the caller waits: its requests stop, the engine and a request beside them go on."""
    with running(mode, num_blocks=600) as engine:
        alone = engine.generate(OTHER, greedy(60))[0].token_ids
        beside = engine.submit(OTHER, greedy(60))

        def interrupt():
            wait_until(lambda: engine.stats().running == 3)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            engine.generate([PROMPT, PROMPT], greedy(1800))
        thread.join()
        assert beside.result(PATIENCE).token_ids == alone
        quiet(engine)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_refused_prompt_starts_none_of_its_call(mode):
    with running(mode) as engine:
        with pytest.raises(ValueError, match="512"):
            engine.generate([PROMPT, [512]], greedy(500))
        quiet(engine)
        assert engine.stats().steps == 0


def test_a_forgotten_engine_in_a_cycle_is_collected_and_closed():
    """Its memory would otherwise be gone for as long as the process lives."""
    before = len(engine_threads())
    engine = Engine("tiny", device="cpu", num_blocks=16, max_rows=2)
    engine.itself = engine
    engine.generate(PROMPT, greedy(3))
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    wait_until(lambda: len(engine_threads()) == before)


def test_a_running_request_keeps_its_engine():
    """`for delta in Engine(...).stream(...)` holds no engine, but wants its output."""
    ids = [
        token for delta in Engine("tiny", device="cpu", seed=0).stream(PROMPT, greedy(30)) for token in delta.token_ids
    ]
    assert len(ids) == 30


def test_an_engine_that_is_never_closed_lets_the_interpreter_end():
    """With requests running."""
    code = (
        "from twostroke import Engine, SamplingParams\n"
        "engine = Engine('tiny', device='cpu')\n"
        "handle = engine.submit([5] * 20, SamplingParams(max_tokens=2000, ignore_eos=True))\n"
        "next(iter(engine.stream([6] * 20)))\n"
        "print('end', flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


@pytest.mark.parametrize("mode", MODES)
def test_a_forked_child_is_refused_and_the_parent_goes_on(mode):
    """B01: no thread of the engine is in the child, so whatever waited there would wait for ever."""
    with running(mode) as engine:
        expected = engine.generate(PROMPT, greedy(200))[0].token_ids
        handle, ended = engine.submit(PROMPT, greedy(200)), engine.submit(OTHER, greedy(2))
        ended.result(PATIENCE)
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # ends the child if it hangs
            code = 1
            with contextlib.suppress(BaseException):
                for call in (lambda: engine.generate(PROMPT), handle.result, lambda: next(iter(handle))):
                    with pytest.raises(EngineClosed, match="forked child"):
                        call()
                assert len(ended.result().token_ids) == 2
                handle.cancel()
                engine.close()
                code = 0
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert handle.result(PATIENCE).token_ids == expected
        quiet(engine)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_memory_is_flat_over_many_requests(mode):
    """G06: finished, cancelled, streamed and refused ones leave nothing behind."""

    def run_some(engine, count):
        for number in range(count):
            handle = engine.submit(PROMPT, greedy(2))
            if number % 4 == 0:
                handle.cancel()
            elif number % 4 == 1:
                for _ in handle:
                    pass
            handle.result(PATIENCE)
        del handle
        quiet(engine)
        gc.collect()
        return sys.getallocatedblocks()

    with running(mode) as engine:
        run_some(engine, 400)  # until what is kept of the last steps and requests is as much as it will be
        first = run_some(engine, 50)
        assert run_some(engine, 200) - first < 100, "half an object for each request stays"


def memory_of(engine):
    """Weights, packed ones too, cache and the host's blocks."""
    parts = engine._parts
    tensors = [*parts.loaded.model.tensors(), *parts.forward.attention.caches, *parts.runner.transfers._blocks._slabs]
    if parts.loaded.impl == "native":
        packed = [linear._packed for block in parts.loaded.model.blocks for linear in block.linears]
        tensors += [tensor for tensor in packed if tensor is not None]
    return [weakref.ref(tensor) for tensor in tensors]


@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize("mode", MODES)
def test_close_frees_weights_and_cache_at_once(mode, impl, no_collection):
    """While somebody still holds the engine, and without the collector; what was asked before and after is answered."""
    with running(mode, impl=impl, num_blocks=64, offload_bytes=1 << 20) as engine:
        weights = engine.model.copy_weights()  # which packs them anew
        memory = memory_of(engine)
        handle = engine.submit(PROMPT, greedy(6, logprobs=1))
        output = engine.generate(PROMPT, greedy(6))[0]
        assert all(tensor() is not None for tensor in memory)
    assert not any(tensor() is not None for tensor in memory)
    assert handle.result(0).token_ids == output.token_ids
    engine.close()
    with pytest.raises(EngineClosed):
        engine.submit(PROMPT)
    with pytest.raises(EngineClosed):
        engine.update_weights(weights)
    with pytest.raises(InvalidWeights, match="another"):
        engine.update_weights(weights | {"another": weights.popitem()[1]})
    assert engine.stats().generated_tokens >= 12


@pytest.mark.parametrize("mode", MODES)
def test_nothing_but_its_user_keeps_a_closed_engine(mode, no_collection):
    """Cycles would leave its batch state to the collector; the handle of a request that has ended wants no engine."""
    with running(mode) as engine:
        handle = engine.submit(PROMPT, greedy(6))
        assert len(handle.result(PATIENCE).token_ids) == 6
        parts = engine._parts
        held = [weakref.ref(part) for part in (engine, parts.loaded.model, parts.runner.state, *parts.slots)]
    del engine, parts
    assert not any(part() is not None for part in held)
    assert len(handle.result().token_ids) == 6


def test_a_forgotten_engine_is_closed_at_once(no_collection):
    before = engine_threads()
    engine = Engine("tiny", device="cpu", num_blocks=16, max_rows=2, offload_bytes=1 << 20)
    engine.generate(PROMPT, greedy(3))
    memory = memory_of(engine)
    del engine
    assert engine_threads() == before
    assert not any(tensor() is not None for tensor in memory)


@pytest.mark.parametrize("chained", [False, True])
def test_an_engine_that_cannot_start_leaves_no_memory(chained, monkeypatch, no_collection):
    """Whoever keeps its error: the next one may need all of it."""
    memory = []

    def note(name):
        make = getattr(twostroke.build, name)

        def make_noted(*arguments, **options):
            made = make(*arguments, **options)
            memory.append(weakref.ref(made.model if name == "load_model" else made))
            return made

        monkeypatch.setattr(twostroke.build, name, make_noted)

    def refuse(directory):
        last = torch.zeros(5)
        memory.append(weakref.ref(last))
        raise InvalidConfig("no tokenizer")

    def refuse_for_a_reason(directory):
        try:
            refuse(directory)
        except InvalidConfig as error:
            raise ValueError("not readable") from error

    for name in ("load_model", "BatchState", "make_attention", "Runner", "Slot"):
        note(name)
    monkeypatch.setattr(twostroke.build, "find_tokenizer", refuse_for_a_reason if chained else refuse)
    with pytest.raises((InvalidConfig, ValueError)) as failed:
        Engine("tiny", device="cpu", num_blocks=16)
    assert len(memory) == 8
    assert not any(part() is not None for part in memory)
    assert failed.value.__traceback__ is not None
