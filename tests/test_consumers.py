"""Consumers that iterate, await, stop early, never read, or vanish: their request ends, nobody else's does."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from engines import MODES, running
from watching import PATIENCE, quiet, wait_until

from twostroke import Delta, FinishReason, Handle, SamplingParams
from twostroke.bench.cpu_step import make_request
from twostroke.request import Sample
from twostroke.text.ending import Ending

PROMPT, OTHER = list(range(3, 14)), list(range(100, 117))
TOO_LONG = 1800


def greedy(max_tokens=10, **others):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **others)


def ids_of(deltas):
    return [token for delta in deltas for token in delta.token_ids]


@pytest.fixture(scope="module", params=MODES)
def engine(request):
    with running(request.param, num_blocks=600) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(engine):
    return [engine.generate(prompt, greedy(40))[0].token_ids for prompt in (PROMPT, OTHER)]


@pytest.fixture
def beside(engine, alone):
    """A request that runs meanwhile and must not notice; at the end the engine is idle, long before `TOO_LONG`."""
    handle = engine.submit(OTHER, greedy(40))
    yield handle
    steps = engine.stats().steps
    assert handle.result(PATIENCE).token_ids == alone[1]
    quiet(engine)
    assert engine.stats().steps < steps + 300


def test_for(engine, beside, alone):
    deltas = list(engine.stream(PROMPT, greedy(40)))
    assert ids_of(deltas) == alone[0]
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert all(delta.token_ids for delta in deltas[:-1])


def test_async_for(engine, beside, alone):
    async def consume():
        return [delta async for delta in engine.stream(PROMPT, greedy(40))]

    deltas = asyncio.run(consume())
    assert ids_of(deltas) == alone[0]
    assert deltas[-1].finish_reason == "length"


def test_many_coroutines_of_one_loop(engine, alone):
    async def stream(prompt):
        return ids_of([delta async for delta in engine.stream(prompt, greedy(40))])

    async def wait(prompt):
        return (await engine.submit(prompt, greedy(40))).token_ids

    async def gather():
        return await asyncio.gather(*(way(prompt) for way in (stream, wait) for prompt in (PROMPT, OTHER) * 3))

    assert asyncio.run(gather()) == alone * 6


def test_two_streams_read_in_turn(engine, alone):
    streams = [iter(engine.stream(prompt, greedy(40))) for prompt in (PROMPT, OTHER)]
    read = [[], []]
    for which in (0, 1, 0, 1):
        read[which] += itertools.islice(streams[which], 1)  # all may have come already, in one delta
    for which in (1, 0):
        assert ids_of([*read[which], *streams[which]]) == alone[which]


@pytest.mark.parametrize("begin", ["at once", "late", "at the end"])
def test_a_submitted_request_can_be_streamed_later(engine, beside, alone, begin):
    """Whenever the iteration begins, its deltas together are the whole output."""
    handle = engine.submit(PROMPT, greedy(40))
    if begin == "late":
        sample, rows = handle.sample, engine._parts.scheduler.rows
        row_of = engine._parts.scheduler.batch.row_of
        wait_until(lambda: handle.done or (sample in row_of and rows.confirmed[row_of[sample]] > len(PROMPT) + 5))
    elif begin == "at the end":
        handle.result(PATIENCE)
    assert ids_of(handle) == alone[0]
    assert list(handle) == [Delta("", [], "length")]
    assert handle.result(0).token_ids == alone[0]


def test_a_consumer_that_never_reads_costs_its_output_once(engine, beside):
    """R15: what it does not take is merged into one delta."""
    unread = engine.stream(PROMPT, greedy(300))
    assert unread.wait(PATIENCE)
    (delta,) = unread
    assert delta == Delta("", unread.result().token_ids, "length")
    assert len(delta.token_ids) == 300


def test_a_slow_consumer_gets_merged_deltas(engine, alone):
    stream = iter(engine.stream(PROMPT, greedy(40)))
    first = next(stream)
    assert stream._handle.wait(PATIENCE)
    rest = list(stream)
    assert len(rest) == 1
    assert first.token_ids + rest[0].token_ids == alone[0]


class NoOwner:
    def cancel(self, sample): ...

    def stream(self, sample): ...

    def finish(self, sample, count): ...


def test_text_may_come_before_its_token_and_a_token_without_text():
    """Of a request with stop strings: a consumer gets either at once, and nothing for nothing."""
    handle = Handle([Sample(make_request(0))], NoOwner())
    handle.begin_stream()
    taken = []
    consumer = threading.Thread(target=lambda: taken.extend([handle.next_delta(), handle.next_delta()]), daemon=True)
    consumer.start()
    handle.push(0, [], "")
    handle.push(0, [], "a")
    wait_until(lambda: not handle._pieces.get(0))
    handle.push(0, [7], "")
    consumer.join(PATIENCE)
    assert taken == [Delta("a", []), Delta("", [7])]


def test_an_output_is_made_once_and_by_who_asks_for_it(engine, alone, monkeypatch):
    """Delivery makes none, not even for who is called back; what nobody took may be iterated over, and once."""
    makers, make = [], Ending._make
    monkeypatch.setattr(Ending, "_make", lambda ending: makers.append(threading.current_thread()) or make(ending))
    handle, ended = engine.submit(PROMPT, greedy(12)), threading.Event()
    handle.on_end(lambda handle: ended.set())
    assert ended.wait(PATIENCE)
    assert handle.done
    assert not makers
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda _: handle.result(), range(8)))
    assert all(output is outputs[0] for output in outputs)
    assert len(makers) == 1
    deltas = list(handle)
    assert [(delta.token_ids, delta.finish_reason) for delta in deltas] == [(alone[0][:12], FinishReason.LENGTH)]
    assert deltas[0].token_ids is not outputs[0].token_ids
    assert handle.next_delta().token_ids == []
    assert len(makers) == 1


def test_result_with_a_timeout(engine, beside):
    handle = engine.submit(PROMPT, greedy(200))
    with pytest.raises(TimeoutError, match=f"{handle.request_id}.*timeout=0.001"):
        handle.result(0.001)
    with pytest.raises(TimeoutError):
        handle.result(timeout=0)
    assert len(handle.result(PATIENCE).token_ids) == 200


@pytest.mark.parametrize("timeout", [math.inf, 1e300, math.nan, 10**400])
def test_a_timeout_beyond_every_clock_is_none(engine, alone, timeout):
    assert engine.submit(PROMPT, greedy(40)).result(timeout).token_ids == alone[0]


def test_leaving_a_for_loop_cancels(engine, beside, alone):
    """D17."""
    handle = engine.stream(PROMPT, greedy(TOO_LONG))
    for delta in handle:
        assert delta.token_ids
        break
    output = handle.result(PATIENCE)
    assert output.finish_reason == "cancelled"
    assert alone[0][: len(output.token_ids)] == output.token_ids[:40]


def test_leaving_an_async_for_loop_cancels(engine, beside):
    """D17: even where the asyncio loop never turns again."""
    handle = engine.stream(PROMPT, greedy(TOO_LONG))

    async def consume():
        async for _ in handle:
            break

    loop = asyncio.new_event_loop()
    loop.run_until_complete(consume())
    assert handle.result(PATIENCE).finish_reason == "cancelled"
    loop.close()


def test_an_error_of_the_consumer_cancels(engine, beside):
    """D13, D14."""
    handle = engine.stream(PROMPT, greedy(TOO_LONG))

    def consume():
        for _ in handle:
            raise ValueError("the connection is gone")

    with pytest.raises(ValueError, match="the connection"):
        consume()
    assert handle.result(PATIENCE).finish_reason == "cancelled"


async def iterate(handle):
    async for _ in handle:
        pass


async def wait_for(handle):
    return await handle


@pytest.mark.parametrize("consume", [iterate, wait_for])
def test_a_cancelled_task_cancels_its_request(engine, beside, consume):
    """D13, D14, R10: a server's client hangs up."""
    handle = engine.submit(PROMPT, greedy(TOO_LONG))

    async def hang_up():
        task = asyncio.create_task(consume(handle))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(hang_up())
    assert handle.result(PATIENCE).finish_reason == "cancelled"


def test_a_timeout_of_asyncio_cancels_unless_shielded(engine, beside):
    async def hurry():
        shielded, plain = (engine.submit(PROMPT, greedy(300)) for _ in range(2))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting := asyncio.ensure_future(wait_for(shielded))), 0.001)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(plain, 0.001)
        return (await plain).finish_reason, (await waiting).finish_reason

    assert asyncio.run(hurry()) == ("cancelled", "length")


@pytest.mark.parametrize("consume", [iterate, wait_for])
def test_a_closed_asyncio_loop_cancels_its_requests(engine, beside, consume):
    """R04: the loop is closed while the request runs, and nobody cancelled the task."""
    handle = engine.submit(PROMPT, greedy(TOO_LONG))
    loop = asyncio.new_event_loop()
    task = loop.create_task(consume(handle))
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    assert handle.result(PATIENCE).finish_reason == "cancelled"
    assert engine.generate(PROMPT, greedy(2))[0].finish_reason == "length"
    task._log_destroy_pending = False


def test_a_loop_that_is_closed_before_a_wake_up_gets_through_cancels_its_request(engine, beside):
    """R04: the consumer was called, but its loop did not turn again before it was closed."""
    handle = engine.submit(PROMPT, greedy(TOO_LONG))
    loop = asyncio.new_event_loop()
    task = loop.create_task(iterate(handle))
    loop.run_until_complete(asyncio.sleep(0))
    wait_until(lambda: handle._has_news(0))
    loop.close()
    assert handle.result(PATIENCE).finish_reason == "cancelled"
    task._log_destroy_pending = False


def test_someone_else_can_still_wait_when_an_asyncio_loop_was_closed(engine, alone):
    """R04: the waiters of one handle do not depend on each other."""
    handle = engine.submit(PROMPT, greedy(40))
    loop = asyncio.new_event_loop()
    task = loop.create_task(wait_for(handle))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    got = []
    threads = [threading.Thread(target=lambda: got.append(asyncio.run(wait_for(handle)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert len(got) == 3
    assert all(output is handle.result() for output in got)
    task._log_destroy_pending = False


@pytest.mark.parametrize("streaming", [False, True])
def test_cancel_before_the_first_token(engine, beside, streaming):
    """D15, R10: an output without tokens, and a last delta that says so."""
    handle = (engine.stream if streaming else engine.submit)([7] * 1500, greedy(5))
    handle.cancel()
    output = handle.result(PATIENCE)
    assert (output.finish_reason, output.token_ids, output.error) == ("cancelled", [], None)
    assert list(handle) == [Delta("", [], "cancelled")]
    assert handle.done
    handle.cancel()


def test_cancel_reaches_whoever_awaits(engine, beside, alone):
    """R10: a final output with the tokens so far."""

    async def wait_and_cancel():
        handle = engine.submit(PROMPT, greedy(TOO_LONG))
        waiting = asyncio.ensure_future(wait_for(handle))
        await asyncio.sleep(0.01)
        handle.cancel()
        return await waiting

    output = asyncio.run(wait_and_cancel())
    assert output.finish_reason == "cancelled"
    assert output.token_ids[:40] == alone[0][: len(output.token_ids)]
