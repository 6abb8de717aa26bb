"""An engine in a process of its own answers like one in this process, and its death reaches everybody who waits."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from watching import PATIENCE, wait_until

from twostroke import Delta, Engine, EngineClosed, EngineDead, InvalidConfig, QueueFull, SamplingParams
from twostroke.server import engine_process, remote_commands
from twostroke.server.remote_engine import RemoteEngine

TOO_LONG = 1800
PROMPT = list(range(3, 14))


def greedy(max_tokens: int = 10, **others: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=5, **others)


def arguments(model: Any = "tiny", **others: Any) -> dict[str, Any]:
    return {"model": os.fspath(model), "device": "cpu", "seed": 0, "num_blocks": 600, "max_rows": 8, **others}


def idle(engine: RemoteEngine) -> bool:
    stats = engine.ask_stats().result(PATIENCE)
    return stats["running"] == stats["waiting"] == 0


@pytest.fixture(scope="module")
def engine(small_dir):
    with RemoteEngine(arguments(small_dir)) as engine:
        yield engine


@pytest.fixture(scope="module")
def local(small_dir):
    with Engine(**arguments(small_dir)) as engine:
        yield engine


def test_outputs_equal_those_of_an_engine_in_this_process(engine, local):
    """Greedy, seeded, with a stop string, with stop ids, by ids and by text, whole and in pieces."""
    prompts = [PROMPT, "Once upon a time", [{"role": "user", "content": "Hello"}], [7] * 2040, [9], "end"]
    plain = greedy(30)
    text = local.generate("end", plain)[0].text
    params = [
        *(plain, SamplingParams(seed=2**64 - 1, max_tokens=20), greedy(5, skip_special_tokens=False)),
        *(SamplingParams(seed=3, top_k=10**15, max_tokens=2**40, min_tokens=2**39, stop_token_ids=[5, 6]), greedy(1)),
        greedy(30, stop=[text[9:14]]),
    ]
    expected = [(out.token_ids, out.text, out.finish_reason, out.seed) for out in local.generate(prompts, params)]
    remote = engine.generate(prompts, params)
    assert [(out.token_ids, out.text, out.finish_reason, out.seed) for out in remote] == expected
    assert expected[-1][1:3] == (text[: text.index(text[9:14])], "stop")
    streams = [engine.stream(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    for stream, (ids, whole, reason, _) in zip(streams, expected, strict=True):
        deltas = list(stream)
        assert [token for delta in deltas for token in delta.token_ids] == ids
        assert "".join(delta.text for delta in deltas) == whole
        assert deltas[-1].finish_reason == reason


def test_what_the_engine_process_does_not_take_ends_alone(engine, local, monkeypatch):
    """Should the two processes' checks ever differ, that is the one request's trouble."""
    entry = remote_commands._entry

    def spoilt(number, request):
        made = entry(number, request)
        spoils = request.prompt.tolist() == [8]
        return msgspec.structs.replace(made, prompt=np.full(3, -4, np.int32).tobytes()) if spoils else made

    monkeypatch.setattr(remote_commands, "_entry", spoilt)
    prompts, params = [PROMPT, [8], [9]], [greedy(), greedy(n=3), greedy()]
    outputs = engine.generate(prompts, params)
    assert [len(sample.token_ids) for sample in outputs[1].outputs] == [0, 0, 0]
    for sample in outputs[1].outputs:
        assert sample.finish_reason == "error"
        assert "prompt" in sample.error
    for here, there in zip(local.generate([PROMPT, [9]], greedy()), (outputs[0], outputs[2]), strict=True):
        assert there.token_ids == here.token_ids
    stream = engine.stream([8], greedy())
    assert [delta.finish_reason for delta in stream] == ["error"]
    stream.cancel()
    assert engine._submitted == engine._remote.begun
    wait_until(lambda: idle(engine))


def test_samples_of_one_prompt_are_those_of_an_engine_in_this_process(engine, local):
    prompts, params = [PROMPT, [9], PROMPT], [SamplingParams(seed=4, n=n, max_tokens=20) for n in (3, 1, 12)]
    expected, remote = local.generate(prompts, params), engine.generate(prompts, params)
    for here, there in zip(expected, remote, strict=True):
        assert [sample.token_ids for sample in there.outputs] == [sample.token_ids for sample in here.outputs]
    deltas = list(engine.stream(PROMPT, params[0]))
    for sample in expected[0].outputs:
        assert [t for delta in deltas if delta.index == sample.index for t in delta.token_ids] == sample.token_ids
    wait_until(lambda: idle(engine))


def test_logprobs_are_those_of_an_engine_in_this_process(engine, local):
    prompts = [PROMPT, [9, 8, 7], PROMPT]
    params = [
        SamplingParams(seed=4, logprobs=3, prompt_logprobs=2, max_tokens=20),
        greedy(),
        SamplingParams(seed=4, n=2, best_of=4, logprobs=0, max_tokens=20),
    ]
    for here, there in zip(local.generate(prompts, params), engine.generate(prompts, params), strict=True):
        assert len(there.outputs) == len(here.outputs)
        for mine, yours in zip(here.outputs, there.outputs, strict=True):
            assert (yours.token_ids, yours.seed) == (mine.token_ids, mine.seed)
            assert (yours.logprobs is None) == (mine.logprobs is None)
            close(mine.logprobs or [], yours.logprobs or [])
        close(here.prompt_logprobs or [], there.prompt_logprobs or [])


def close(mine, yours):
    for here, there in zip(mine, yours, strict=True):
        assert (here is None) == (there is None)
        if here is not None:
            assert (here.token_id, here.rank, list(here.top)) == (there.token_id, there.rank, list(there.top))
            assert here.logprob == pytest.approx(there.logprob, abs=1e-4)


def test_unseeded_requests_draw_seeds_in_the_front(engine):
    first, second = engine.generate([PROMPT, PROMPT], SamplingParams(max_tokens=20))
    assert first.seed != second.seed
    assert first.token_ids != second.token_ids
    assert engine.generate(PROMPT, SamplingParams(seed=first.seed, max_tokens=20))[0].token_ids == first.token_ids


def test_the_output_tells_what_became_of_the_request(engine):
    prompt = list(range(100, 140))
    engine.generate(prompt, greedy(2))
    output = engine.generate(prompt, greedy(2))[0]
    assert output.cached_tokens == 32
    times = output.timings
    assert times.submitted <= times.admitted <= times.first_token <= times.finished <= time.perf_counter()


def test_a_cancelled_request_gets_its_output(engine):
    """R10, G03."""
    handle = engine.stream(PROMPT, greedy(TOO_LONG))
    next(iter(handle))
    output = handle.result(PATIENCE)  # the iteration was let go of at once, which cancels
    assert output.finish_reason == "cancelled"
    handle.cancel()
    engine._commands.cancel(handle.sample)  # as a command on its way when the sample ended
    wait_until(lambda: idle(engine))


def test_a_consumer_that_never_reads_gets_one_delta(engine):
    """R15."""
    unread = engine.stream(PROMPT, greedy(300))
    assert unread.wait(PATIENCE)
    (delta,) = unread
    assert len(delta.token_ids) == 300


def test_a_front_that_falls_behind_is_sent_fewer_messages(engine, monkeypatch):
    """The outbox merges what waits; no token is lost, doubled or out of order."""
    taken = []
    put = engine._delivery.put

    def slow(committed):
        taken.append(len(committed.streamed))
        time.sleep(0.03)
        put(committed)

    monkeypatch.setattr(engine._delivery, "put", slow)
    expected = [token for delta in engine.stream(PROMPT, greedy(400)) for token in delta.token_ids]
    assert max(taken) > 4
    monkeypatch.undo()
    assert engine.generate(PROMPT, greedy(400))[0].token_ids == expected


def test_stats(engine):
    assert engine.ask_stats().result(PATIENCE)["steps"] > 0


def test_settings_that_the_engine_refuses_are_refused_here():
    with pytest.raises(InvalidConfig, match="max_model_len=99999"):
        RemoteEngine(arguments(max_model_len=99999))


def die_at_birth(connection: Any, arguments: Any) -> None:
    os._exit(7)


def test_a_process_that_ends_before_it_is_ready():
    with pytest.raises(EngineDead, match="exit code 7"):
        RemoteEngine(arguments(), target=die_at_birth)


def run_and_fail(connection: Any, arguments: Any) -> None:
    """An engine process whose model raises at its fifth step."""
    from twostroke.runner import Runner

    original, steps = Runner.launch, []

    def launch(self: Any, *args: Any) -> None:
        steps.append(0)
        if len(steps) == 5:
            raise RuntimeError("step five")
        original(self, *args)

    Runner.launch = launch
    engine_process.run_engine(connection, arguments)


@pytest.mark.parametrize("how", ["the loop fails", "it is killed"])
def test_the_end_of_the_engine_process_reaches_everybody(how):
    """G10."""
    ended = threading.Event()
    target = {"target": run_and_fail} if how == "the loop fails" else {}
    engine = RemoteEngine(arguments(), on_end=ended.set, **target)
    streaming = engine.stream(PROMPT, greedy(TOO_LONG))
    waiting = [engine.submit(PROMPT, greedy(TOO_LONG)) for _ in range(12)]
    if how == "it is killed":
        streaming.next_delta()
        os.kill(engine.pid, signal.SIGKILL)
    message = "step five" if how == "the loop fails" else "exit code -9"
    for handle in [*waiting, streaming]:
        with pytest.raises(EngineDead, match=message):
            handle.result(PATIENCE)
    assert ended.wait(PATIENCE)
    with pytest.raises(EngineDead, match=message):
        engine.submit(PROMPT, greedy())
    with pytest.raises(EngineDead, match=message):
        engine.ask_stats()
    assert engine.exitcode is not None
    engine.close()


def test_close_hands_over_every_output():
    """G07."""
    engine = RemoteEngine(arguments())
    handles = [engine.submit(PROMPT, greedy(TOO_LONG)) for _ in range(12)]
    streaming = engine.stream(PROMPT, greedy(TOO_LONG))
    engine.close()
    assert {handle.result(0).finish_reason for handle in handles} == {"cancelled"}
    deltas = list(streaming)
    assert deltas[-1].finish_reason == "cancelled"
    assert engine.exitcode == 0
    with pytest.raises(EngineClosed):
        engine.submit(PROMPT, greedy())
    engine.close()


PARENT = """
from twostroke.server.remote_engine import RemoteEngine
from twostroke import SamplingParams
if __name__ == "__main__":
    engine = RemoteEngine({"model": "tiny", "device": "cpu", "num_blocks": 600})
    handle = engine.submit([3, 4], SamplingParams(max_tokens=1800, ignore_eos=True))
    print(engine.pid, flush=True)
    %s
"""


@pytest.mark.parametrize("end", ["input()", "pass"], ids=["killed", "forgot to close"])
def test_the_engine_process_does_not_outlive_its_parent(tmp_path, end):
    script = tmp_path / "parent.py"
    script.write_text(PARENT % end)
    with subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        if end == "input()":
            parent.kill()
        parent.wait(PATIENCE)
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize("rows", [4, 0], ids=["ready", "refused"])
def test_a_parent_that_is_gone_before_the_engine_has_started(rows):
    """A server that was ended while it started left a traceback of the engine process behind."""
    here, there = multiprocessing.Pipe()
    here.close()
    before = threading.active_count()
    engine_process.run_engine(there, {"model": "tiny", "device": "cpu", "num_blocks": 8, "max_rows": rows})
    there.close()
    wait_until(lambda: threading.active_count() <= before)


def test_the_api_process_does_not_import_torch():
    code = "import sys, twostroke.server.remote_engine; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_signals_that_reach_all_processes_are_left_to_the_parent(tiny_engine):
    """G07: Ctrl-C in a terminal, and a service's end, reach the engine process too, which must finish its requests."""
    engine = tiny_engine.engine
    handle = engine.submit(PROMPT, greedy(300))
    for name in (signal.SIGINT, signal.SIGTERM):
        os.kill(engine.pid, name)
    assert handle.result(PATIENCE).finish_reason == "length"
    assert list(handle) == [Delta("", handle.result().token_ids, "length")]


def test_the_queue_s_limit_and_time_out_hold_across_the_processes():
    """Who runs in the other process waits no longer here, though nothing was sent of its tokens yet."""
    with RemoteEngine(arguments(max_rows=1, max_waiting=2)) as small:
        runs = small.submit(PROMPT, greedy(TOO_LONG))
        wait_until(lambda: small._commands.begun == 1)
        waits = [small.submit(PROMPT, greedy()) for _ in range(2)]
        with pytest.raises(QueueFull):
            small.submit(PROMPT, greedy())
        late = waits[1]
        late.cancel()
        late.result(PATIENCE)
        wait_until(lambda: small._commands.begun == 2)
        timed = small.submit(PROMPT, greedy(queue_timeout=0.01)).result(PATIENCE)
        assert (timed.finish_reason, timed.error) == (
            "error",
            "queue_timeout=0.01 s went by before it could begin to run",
        )
        runs.cancel()
        assert len(waits[0].result(PATIENCE).token_ids) == 10
