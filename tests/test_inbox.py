"""The inbox: nothing that is left there is lost, whatever thread leaves it, and whenever."""

from __future__ import annotations

import itertools
import sys
import threading

import pytest

from twostroke.errors import EngineClosed
from twostroke.inbox import Inbox

PATIENCE = 20


def command(scheduler):
    return scheduler


LEAVE = {
    "put": lambda inbox: inbox.put(command),
    "close": lambda inbox: inbox.close(EngineClosed("closed"), last=command),
}


def take_interrupted(inbox, leave, moment):
    """Take in a thread of its own, which at its line number `moment` leaves a command itself: what it took, if ever."""
    taken, lines, left = [], itertools.count(), threading.Event()

    def trace(frame, event, argument):
        if event == "line" and next(lines) == moment:
            left.set()
            leave(inbox)
        return trace

    def take():
        sys.settrace(trace)
        taken.extend(inbox.take(block=True))
        sys.settrace(None)

    taker = threading.Thread(target=take, daemon=True)
    taker.start()
    taker.join(PATIENCE if left.wait(0.2) else 0)
    return left.is_set(), taken


@pytest.mark.parametrize("leave", LEAVE.values(), ids=LEAVE)
def test_a_finalizer_on_the_thread_that_is_about_to_wait_is_heard(leave):
    """The collector may run one at any line: of a forgotten engine, or of an iteration that was left early."""
    for moment in itertools.count():
        inbox = Inbox()
        left, taken = take_interrupted(inbox, leave, moment)
        if not left:
            inbox.put(command)  # the thread waits already
            break
        assert taken == [command], f"left at line {moment}, and never taken"
    assert moment >= 2


def test_a_closing_inbox_is_open_until_its_last_command_is_there():
    """The loop asks without a lock; if it stopped before the last command, running requests would wait for ever."""
    inbox = Inbox()
    seen = []

    class Commands(list):
        def append(self, item):
            seen.append(inbox.open)
            super().append(item)

    inbox._commands = Commands()
    inbox.close(EngineClosed("closed"), last=command)
    assert seen == [True]
    assert inbox.open
    assert inbox.take(block=True) == [command]
    assert not inbox.open


def test_many_threads_leave_and_one_takes():
    inbox, taken = Inbox(), []

    def leave():
        for number in range(500):
            inbox.put(number)

    threads = [threading.Thread(target=leave) for _ in range(4)]
    for thread in threads:
        thread.start()
    while len(taken) < 2000:
        taken += inbox.take(block=True)
    assert sorted(taken) == sorted(list(range(500)) * 4)
    assert inbox.take(block=False) == []
