"""While `generate` waits: it hears of who has ended, makes its output, and keeps errors for the end."""

from __future__ import annotations

import threading
import weakref
from contextlib import closing
from unittest.mock import Mock

import pytest
from engines import MODES, running
from watching import PATIENCE, quiet, wait_until

from twostroke import EngineDead, Handle, SamplingParams
from twostroke.bench.cpu_step import make_request
from twostroke.constraints.constraints import Constraints
from twostroke.front import Front
from twostroke.limits import Limits
from twostroke.progress import Progress
from twostroke.request import FinishReason, Sample
from twostroke.text.delivery import Delivery
from twostroke.text.ending import Ending

LIMITS = Limits(vocab_size=97, max_model_len=64, block_size=4, usable_blocks=99)


class NoOwner:
    def cancel(self, sample): ...

    def stream(self, sample): ...

    def finish(self, sample, count): ...


def end(handle):
    handle.sample.finish_reason = FinishReason.LENGTH
    handle.finish(Ending(handle.sample, None))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_requests_are_told_of_as_they_end(order):
    """In whatever order they do, and while others run."""
    handles = [Handle([Sample(make_request(place))], NoOwner(), place) for place in range(3)]
    *early, last = (handles[place] for place in order)
    with Progress(handles, False) as progress:
        ended = progress.wait()
        for handle in early:
            end(handle)
            assert next(ended) is handle
        end(last)
        assert list(ended) == [last]
    assert all(handle.done for handle in handles)


def test_requests_that_have_ended_before_are_told_of():
    ended, running_on = (Handle([Sample(make_request(place))], NoOwner(), place) for place in range(2))
    end(ended)
    assert list(Progress([ended], False).wait()) == [ended]
    assert next(Progress([ended, running_on], False).wait()) is ended


def test_the_end_of_the_last_request_is_heard_of_at_once(monkeypatch):
    """Not at the next look at what has ended; and the bar counts all."""
    monkeypatch.setattr("twostroke.progress._REFRESH_SECONDS", 100 * PATIENCE)
    handles = [Handle([Sample(make_request(place))], NoOwner(), place) for place in range(2)]
    with Progress(handles, False) as progress:
        progress._bar, progress._task = Mock(), 0
        heard = []
        waiter = threading.Thread(target=lambda: heard.extend(progress.wait()), daemon=True)
        waiter.start()
        for handle in handles:
            end(handle)
        waiter.join(PATIENCE)
        progress._bar.update.assert_called_with(0, completed=2)
    assert heard == handles


@pytest.mark.parametrize("mode", MODES)
def test_outputs_are_made_while_others_run(mode, monkeypatch):
    """The last request ends only because those of the others were made."""
    made, make = [], Ending._make
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1, 1500, 2)]

    def make_and_cancel(ending):
        made.append(ending.sample)
        if len(made) == 2:
            for handle in list(engine._life.delivery._handles.values()):
                handle.cancel()
        return make(ending)

    with running(mode, num_blocks=100) as engine:
        alone = [engine.generate([place], params[place])[0].token_ids for place in (0, 2)]
        monkeypatch.setattr(Ending, "_make", make_and_cancel)
        outputs = engine.generate([[0], [1], [2]], params)
        quiet(engine)
    assert [output.finish_reason for output in outputs] == ["length", "cancelled", "length"]
    assert [outputs[0].token_ids, outputs[2].token_ids] == alone
    assert len(made) == 3, "each is made once"


class Started:
    """In place of a loop: keeps what was submitted, and what was cancelled."""

    begun = 0

    def __init__(self):
        self.samples, self.cancelled = [], []

    def submit(self, samples):
        self.samples += samples

    def cancel(self, sample):
        self.cancelled.append(sample)


def test_a_request_that_has_ended_is_let_go_of_while_others_run():
    """What `generate` holds of many requests is not to be freed while the device waits."""
    commands, outputs = Started(), []

    def generate():
        outputs.extend(front.generate([[1], [2], [3]], SamplingParams(), progress=False))

    with closing(Delivery(None, pytest.fail)) as delivery, closing(Constraints(None, LIMITS)) as constraints:
        front = Front(None, LIMITS, 0, delivery, commands, constraints)
        caller = threading.Thread(target=generate, daemon=True)
        caller.start()
        wait_until(lambda: len(commands.samples) == 3)
        handles = [delivery._handles.pop(sample) for sample in commands.samples]
        commands.samples.clear()
        first = weakref.ref(handles[0])
        end(handles.pop(0))
        end(handles.pop(0))
        wait_until(lambda: first() is None)
        assert caller.is_alive()
        end(handles.pop())
        caller.join(PATIENCE)
    assert [output.index for output in outputs] == [0, 1, 2]


def test_the_error_is_that_of_the_first_prompt_once_all_have_ended(monkeypatch):
    """Also where the request of another failed before, and was heard of."""
    raised, asked, result = [], threading.Event(), Handle.result
    monkeypatch.setattr(Handle, "result", lambda handle: asked.set() or result(handle))
    commands = Started()

    def generate():
        with pytest.raises(EngineDead) as caught:
            front.generate([[1], [2], [3]], SamplingParams(), progress=False)
        raised.append(str(caught.value))

    with closing(Delivery(None, pytest.fail)) as delivery, closing(Constraints(None, LIMITS)) as constraints:
        front = Front(None, LIMITS, 0, delivery, commands, constraints)
        caller = threading.Thread(target=generate, daemon=True)
        caller.start()
        wait_until(lambda: len(commands.samples) == 3)
        first, second, third = (delivery._handles[sample] for sample in commands.samples)
        second.fail(EngineDead("second"))
        assert asked.wait(PATIENCE)
        end(third)
        assert caller.is_alive(), "it waits for the first"
        assert not commands.cancelled
        first.fail(EngineDead("first"))
        caller.join(PATIENCE)
    assert raised == ["first"]
