"""Ctrl-C at any moment: whatever is going on then, it is heard, and nothing is left in its midst."""

from __future__ import annotations

import builtins
import io
import itertools
import os
import signal
import sys
import threading
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
from command_line import run
from rich.console import Console
from terminal import on_terminal
from watching import PATIENCE

import twostroke
from twostroke.bench.cpu_step import make_request
from twostroke.cli.conversation import Conversation
from twostroke.interrupts import Interrupts
from twostroke.request import Sample
from twostroke.text.handle import Handle


def press():
    signal.raise_signal(signal.SIGINT)


def press_unnoticed():
    """As Ctrl-C just before the main thread waits: Python has noted it, and the wait is not ended by it."""
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)


class PressedAt:
    """Presses Ctrl-C at the `moment`th place, from `start` on, where Python would see that it was pressed.

    Attributes:
        came: whether it has.
    """

    def __init__(self, moment):
        self._moment = moment
        self._passed = itertools.count()
        self.came = False

    def start(self):
        sys.setprofile(self._see)

    def stop(self):
        sys.setprofile(None)

    def _see(self, frame, event, argument):
        stops = frame.f_code is PressedAt.stop.__code__
        if event in ("call", "c_return") and not stops and next(self._passed) == self._moment:
            self.came = True
            press()


class Scripted:
    """Says the same to whatever it hears."""

    def answer(self, messages):
        yield from ("one ", "two ")


def talk(monkeypatch, moment):
    """What a conversation shows in which Ctrl-C is pressed between the first prompt and /quit; None if it was not."""
    pressed, lines, written = PressedAt(moment), iter(["Hello", "/quit"]), io.StringIO()

    def read():
        line = next(lines, "/quit")
        pressed.start() if line == "Hello" else pressed.stop()
        return line

    monkeypatch.setattr(builtins, "input", read)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    Conversation(Scripted(), None, Console(file=written, force_terminal=True, color_system=None)).run()
    return written.getvalue() if pressed.came else None


@pytest.mark.parametrize("first", range(5))
def test_a_chat_goes_on_whenever_ctrl_c_is_pressed(monkeypatch, first):
    """It stops the answer, or says how to end, exactly once; also amid what the console writes with."""
    said = {"(stopped)": 0, "(/quit or Ctrl-D ends)": 0}
    for moment in itertools.count(first, 5):
        if (shown := talk(monkeypatch, moment)) is None:
            break
        found = [text for text in said if text in shown]
        assert len(found) == 1, (moment, shown)
        assert shown.count(found[0]) == 1
        assert shown.count("> ") >= 2, "it asks again"
        said[found[0]] += 1
    assert all(said.values())


PRESSED_UNNOTICED = """
import os, signal, sys, threading
from twostroke.cli.main import app

def listen(number):
    while os.read(number, 1):
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

threading.Thread(target=listen, args=(int(sys.argv.pop(1)),), daemon=True).start()
app(prog_name="twostroke")
"""


def test_a_prompt_hears_what_came_just_before_it_waited(small_dir):
    theirs, ours = os.pipe()
    flags = ("chat", "--model", os.fspath(small_dir), "--device", "cpu", "--num-blocks", "200")
    with (
        open(ours, "wb", buffering=0) as presses,
        open(theirs, "rb"),
        on_terminal(str(theirs), *flags, python=("-c", PRESSED_UNNOTICED), pass_fds=(theirs,)) as (process, terminal),
    ):
        terminal.expect("> ")
        for _ in range(3):
            presses.write(b"x")
            terminal.expect("/quit or Ctrl-D ends")
            terminal.expect("> ")
        terminal.type("/quit\n")
        assert process.wait(PATIENCE) == 0


def test_generate_hears_what_came_just_before_it_waited(monkeypatch):
    rescued, cancelled = threading.Event(), threading.Event()
    rescue = threading.Timer(PATIENCE, rescued.set)

    class Endless:
        def __init__(self, **_):
            self.tokenizer = object()

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def submit(self, prompt, params):
            return SimpleNamespace(result=wait, cancel=cancelled.set)

    def wait():
        threading.Timer(0.2, press_unnoticed).start()
        rescue.start()
        rescued.wait()

    monkeypatch.setattr(twostroke, "Engine", Endless, raising=False)
    assert run("generate", "--prompt", "a", "--json").exit_code == 130
    rescue.cancel()
    assert cancelled.is_set()
    assert not rescued.is_set(), "it was heard when the wait was over"


class NoOwner:
    def cancel(self, sample):
        pass

    stream = finish = cancel


@pytest.mark.parametrize("wait", [Handle.next_delta, partial(Handle.wait, timeout=0)], ids=["delta", "wait"])
def test_an_interrupted_wait_leaves_no_lock_behind(monkeypatch, wait):
    """Delivery, for which all requests wait, would wait for it for ever."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # where a generator is dropped
    for moment in itertools.count():
        handle = Handle([Sample(make_request(0))], NoOwner())
        handle.push(0, [1], "a")
        pressed = PressedAt(moment)
        try:
            pressed.start()
            wait(handle)
        except KeyboardInterrupt:
            assert pressed.came
        pressed.stop()
        delivery = threading.Thread(target=handle.push, args=(0, [2], "b"), daemon=True)
        delivery.start()
        delivery.join(PATIENCE)
        assert not delivery.is_alive(), moment
        if not pressed.came:
            break
    assert moment > 3


@contextmanager
def restored():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_is_pressed_is_raised_where_it_is_asked_for():
    with restored(), Interrupts() as interrupts:
        interrupts.check()
        press()
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
        interrupts.check()
        press()
        with pytest.raises(KeyboardInterrupt):
            interrupts.call(lambda: pytest.fail("it was pressed before"))
        with pytest.raises(KeyboardInterrupt):
            interrupts.call(press)
        assert interrupts.call(lambda: 3) == 3
        with pytest.raises(ZeroDivisionError):
            interrupts.call(lambda: 1 / 0)


def test_an_error_that_an_interrupt_has_caused_is_the_interrupt():
    """As where a wait that is left at the wrong moment gives up a lock that it has not."""

    def give_up():
        try:
            press()
        finally:
            threading.RLock().release()

    with restored(), Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        interrupts.call(give_up)


def test_what_nobody_asked_for_is_raised_at_the_end():
    with restored(), pytest.raises(KeyboardInterrupt), Interrupts():
        press()
    with restored(), pytest.raises(ZeroDivisionError), Interrupts():
        print(press() or 1 / 0)


def test_what_a_finalizer_swallows_is_raised_later(monkeypatch):
    """Python only writes that what a finalizer raised is ignored."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)

    class Finalized:
        def __del__(self):
            press()

    with restored(), Interrupts() as interrupts:
        interrupts.call(lambda: Finalized() and None)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()


def test_who_has_taken_ctrl_c_over_keeps_it():
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        with Interrupts() as interrupts:
            press()
            interrupts.check()
    finally:
        signal.signal(signal.SIGINT, before)
    assert pressed
