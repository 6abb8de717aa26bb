"""Fronts of one engine, as several API processes have them: what they share, and how each comes and goes."""

from __future__ import annotations

import asyncio
import errno
import logging
import multiprocessing
import os
import socket
import threading
from multiprocessing.reduction import send_handle
from typing import Any

import pytest
from counting import count_up, hold
from test_server_metrics import stats
from watching import PATIENCE, wait_until

from twostroke import Engine, EngineDead, QueueFull, SamplingParams
from twostroke.server.api_process import EngineSeat, Task
from twostroke.server.api_processes import ApiProcesses
from twostroke.server.board import WAITING
from twostroke.server.engine_child import EngineChild, hang_up
from twostroke.server.metrics import Metrics, make_board
from twostroke.server.settings import ServerSettings
from twostroke.server.shared_engine import SharedEngine
from twostroke.server.wire import NewEngine, encode

TOO_LONG = 1900
START = 90.0
"""Seconds that a process may take to start on a busy machine."""
ARGUMENTS = {"model": "tiny", "device": "cpu", "num_blocks": 1200, "max_rows": 2, "max_waiting": 5, "seed": 0}


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def expected():
    """What the engine itself answers to [3, 4]."""
    with Engine(**ARGUMENTS) as engine:
        return engine.generate([3, 4], greedy(9))[0].token_ids


# One engine, two fronts


@pytest.fixture(scope="module")
def child():
    """An engine process."""
    child = EngineChild(ARGUMENTS)
    yield child
    child.close()
    assert child.exitcode == 0


@pytest.fixture(scope="module")
def fronts(child):
    """Two fronts to one engine, as two API processes have them."""
    board = make_board(2)
    made = [SharedEngine(child.attach(), child.ready, 7, board.at(place), lambda: None) for place in range(2)]
    yield made
    for front in made:
        front.close()


def test_fronts_draw_seeds_of_their_own(fronts):
    """With one seed for the engine: equal prompts to two processes must not get equal answers."""
    drawn = [front.generate([3, 4], SamplingParams(max_tokens=2))[0].seed for front in fronts]
    assert drawn[0] != drawn[1]


def test_the_queue_is_one_and_requests_are_their_own(fronts, expected):
    """Both number their requests alike; the queue's limit is theirs together, a cancel is not."""
    running = [front.stream([3, 4], greedy(TOO_LONG)) for front in fronts]
    for handle in running:
        handle.next_delta()
    first, second = fronts
    waiting = [front.submit([3, 4], greedy(9)) for front in (first, second, first, second, first)]
    for front in fronts:
        with pytest.raises(QueueFull, match="5 wait"):
            front.submit([3], greedy(2))
    running[1].cancel()
    assert running[1].result(PATIENCE).finish_reason == "cancelled"
    assert [handle.result(PATIENCE).token_ids for handle in waiting] == [expected] * 5
    assert not running[0].done
    running[0].cancel()


def test_a_front_that_is_gone_leaves_nothing_behind(fronts, expected):
    first, second = fronts
    lost = first.submit([5], greedy(TOO_LONG))
    wait_until(lambda: second.ask_stats().result(PATIENCE)["running"] > 0)
    hang_up(first._connection)
    with pytest.raises(EngineDead):
        lost.result(PATIENCE)
    wait_until(lambda: second.ask_stats().result(PATIENCE)["running"] == 0)
    assert second.generate([3, 4], greedy(9))[0].token_ids == expected
    assert not first.failed


# An API process and its parent


@pytest.fixture
def seated():
    """The parent's end of its connection to an API process, that process's seat, and whether it was told to end."""
    parent, here = multiprocessing.Pipe()
    with socket.socket() as listener:
        seat = EngineSeat(Task(ServerSettings(), 7, logging.ERROR, make_board(2), listener, here, None))
        ended = threading.Event()
        thread = threading.Thread(target=seat.follow, args=(ended.set,))
        thread.start()
        yield parent, seat, ended
        parent.close()
        thread.join(PATIENCE)
    seat.close()


def test_an_api_process_ends_with_its_parent(seated):
    parent, seat, ended = seated
    assert seat.engine is None
    parent.close()
    assert ended.wait(PATIENCE)
    assert not seat.failed


def test_an_api_process_that_cannot_take_an_engine_ends(seated, child, monkeypatch, caplog):
    """It went on without one, answered 503 for ever, and did not hear that it should end."""

    def refuse(*args: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("twostroke.server.api_process.SharedEngine", refuse)
    parent, _, ended = seated
    with child.attach() as connection:
        parent.send_bytes(encode(NewEngine(child.ready)))
        send_handle(parent, connection.fileno(), os.getpid())
    assert ended.wait(PATIENCE)
    assert "can't start new thread" in caplog.text


def test_an_api_process_that_fails_ends_and_one_whose_engine_dies_takes_another(seated, child):
    """So that another is put in its place, and no request goes to one that can answer none."""
    parent, seat, ended = seated
    for number in range(2):
        with child.attach() as connection:
            parent.send_bytes(encode(NewEngine(child.ready)))
            send_handle(parent, connection.fileno(), os.getpid())
        wait_until(lambda: seat.engine is not None)
        if number == 0:
            hang_up(seat.engine._connection)
            wait_until(lambda: seat.engine is None)
    assert not ended.is_set()
    engine = seat.engine
    engine._fail(RuntimeError("no text"))
    assert ended.wait(PATIENCE)
    assert seat.failed
    with pytest.raises(EngineDead, match="no text"):
        engine.submit([3])


def test_a_process_that_cannot_be_started_now_is_started_later(monkeypatch):
    """A system without memory or files for it for a moment: the others go on, and the server does, too."""
    started, ends = [], [asyncio.Event() for _ in range(3)]

    class Child:
        def __init__(self, *task: Any) -> None:
            if len(started) == 1:
                started.append(None)
                raise OSError(errno.EMFILE, "Too many open files")
            self.end = ends[len(started)]
            started.append(self)

        async def listening(self) -> None:
            return

        async def ended(self) -> int:
            await self.end.wait()
            return -9

    monkeypatch.setattr("twostroke.server.api_processes.ApiChild", Child)
    monkeypatch.setattr("twostroke.server.supervisor.FIRST_DELAY", 0.01)

    async def run(listener: socket.socket) -> None:
        processes = ApiProcesses(ServerSettings(), 7, [listener])
        await processes.start()
        ends[0].set()
        keeping = asyncio.ensure_future(processes.keep())
        async with asyncio.timeout(PATIENCE):
            while len(started) < 3:
                await asyncio.sleep(0.01)
        assert not keeping.done()
        keeping.cancel()

    with socket.socket() as listener:
        asyncio.run(run(listener))


# The board


def test_processes_count_together_on_a_board():
    board = make_board(3)
    context = multiprocessing.get_context("spawn")
    counting = [context.Process(target=count_up, args=(board.at(place), 1000)) for place in range(3)]
    for process in counting:
        process.start()
    for process in counting:
        process.join(START)
        assert process.exitcode == 0
    assert board.total(WAITING) == 1000


def test_a_process_that_dies_lets_others_at_the_board():
    board = make_board(2)
    holder = multiprocessing.get_context("spawn").Process(target=hold, args=(board.at(1),))
    holder.start()
    wait_until(lambda: board.elsewhere(WAITING) == 1, START)
    holder.kill()
    with board.locked():
        assert board.total(WAITING) == 1


def test_metrics_of_two_processes_and_two_engines():
    """Histograms are sums; the engine's counters go on, whoever looks at which engine; a late look does no harm."""
    board = make_board(2)
    first, second = (Metrics("small", None, board.at(place)) for place in range(2))
    for metrics in (first, second, second):
        metrics._observe("request_prompt_tokens", 2.0)
    first.engine.update(1.0, 10, stats(steps=5))
    second.engine.update(2.0, 10, stats(steps=3))
    first.engine.update(1.0, 10, stats(steps=6))
    first.engine.update(2.0, 10, stats(steps=4))
    for metrics in (first, second):
        text = metrics.expose("")[0].decode()
        assert 'twostroke:engine_steps_total{model_name="small"} 9.0' in text
        assert 'twostroke:request_prompt_tokens_sum{model_name="small"} 6.0' in text
        assert 'twostroke:request_prompt_tokens_bucket{le="1.0",model_name="small"} 0.0' in text
        assert 'twostroke:request_prompt_tokens_bucket{le="2.0",model_name="small"} 3.0' in text
