"""The accounting: gaps of the compute stream by cause, the CPU's time by phase."""

import time
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from delays import DelayedStream

from twostroke import Engine, SamplingParams
from twostroke.device.activity import Activity
from twostroke.device.cpu import CpuDevice
from twostroke.device.step_times import CAUSES, PHASES
from twostroke.plan import ROW_RECORD, Plan

NONE = np.zeros(0, np.int32)
TOKENS = 8
PARAMS = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
SLOW = 0.02


def make_plan(step):
    return Plan(step, NONE, NONE.reshape(0, 4), NONE, np.zeros(0, ROW_RECORD), NONE.reshape(0, 4), NONE.reshape(0, 2))


class StubDevice:
    """A device whose meter says what the test wants."""

    def __init__(self):
        self.spans = deque()
        self.arrived_at = 0.0
        self.meter = SimpleNamespace(read=self.spans.popleft, time_of=lambda event: self.arrived_at)


class Story:
    """An engine's life told by hand: times are seconds after the activity began."""

    def __init__(self):
        self.activity, self.device = Activity(), StubDevice()
        self.zero = self.activity._ended
        self.steps = self.seen = 0
        self.writes = deque()  # (the step that comes after, begin, end)

    def at(self, moment):
        return self.zero + moment

    def plan(self, began, ended):
        self.activity.planned(self.at(began), self.at(ended))

    def launch(self, began, queued_at, ended):
        times = (self.at(t) for t in (began, began, queued_at, ended))
        self.activity.launched(make_plan(self.steps), *times, None, None)
        self.steps += 1

    def done(self, waited, seen, *, compute, arrived, clock=0.0):
        """`clock`: how far the device's clock is ahead."""
        while self.writes and self.writes[0][0] == self.seen:
            compute = (*self.writes.popleft()[1:], *compute)
        moments = [self.at(moment + clock) for moment in compute]
        self.device.spans.extend(zip(moments[::2], moments[1::2], strict=True))
        self.device.arrived_at = self.at(arrived + clock)
        self.activity.done(self.seen, self.at(waited), self.at(seen), self.device)
        self.seen += 1

    def write(self, began, ended):
        """New weights, behind the steps that are launched."""
        self.activity.wrote_weights()
        self.writes.append((self.steps, began, ended))

    def commit(self, began, ended):
        self.activity.committed(self.at(began), self.at(ended))

    def idle(self):
        return {cause: round(seconds, 6) for cause, seconds in self.activity.idle.items() if seconds > 1e-9}


def first_step():
    """Nothing to do for 10 s, then a step from 14 to 20, whose output is seen at 21 and committed by 23."""
    story = Story()
    story.plan(10, 12)
    story.launch(12, 12.5, 12.6)
    story.done(12.6, 21, compute=(14, 20), arrived=13)
    story.commit(21, 23)
    return story


def test_the_first_step_waits_for_a_request_then_for_its_plan_its_input_and_its_launch():
    story = first_step()
    assert story.idle() == {"nothing": 10, "plan": 2.5, "h2d": 0.5, "launch": 1}
    assert story.activity.idle_seconds == pytest.approx(10)
    assert story.activity.gap_seconds == pytest.approx(4)
    assert story.activity.busy_seconds == pytest.approx(6)
    assert story.activity.cpu == pytest.approx({"plan": 2, "fill": 0, "queue": 0.6, "wait": 8.4, "commit": 2})


def test_a_step_of_the_synchronous_loop_waits_for_commit_plan_and_input():
    """The output's way to the CPU counts as the commit's, commands and hand-over as the plan's."""
    story = first_step()
    story.plan(24, 25)
    story.launch(25, 26, 27)
    story.done(27, 40, compute=(28.5, 39), arrived=28)
    assert story.idle() == {"nothing": 10, "commit": 3, "plan": 2.5 + 3, "h2d": 0.5 + 2, "launch": 1 + 0.5}
    assert sum(story.activity.idle.values()) + story.activity.busy_seconds == pytest.approx(39)


def test_a_step_launched_while_the_last_one_runs_waits_for_neither_plan_nor_commit():
    story = first_step()
    story.plan(24, 25)
    story.launch(25, 26, 27)
    story.plan(27, 28)
    story.launch(28, 28.5, 29)
    story.done(29, 41, compute=(28.5, 40), arrived=28)
    before = story.idle()
    story.commit(41, 42)
    story.done(42, 51, compute=(40.25, 50), arrived=29)
    assert {cause: story.idle()[cause] - before[cause] for cause in before} == pytest.approx(
        {"nothing": 0, "commit": 0, "plan": 0, "h2d": 0, "launch": 0.25}
    )


def test_input_that_comes_late_under_the_asynchronous_loop_is_the_cause():
    story = first_step()
    story.plan(24, 25)
    story.launch(25, 26, 27)
    story.plan(27, 28)
    story.launch(28, 28.5, 29)
    story.done(29, 31, compute=(28, 30), arrived=28)
    story.commit(31, 32)
    before = story.activity.idle["h2d"]
    story.done(32, 51, compute=(45, 50), arrived=45)
    assert story.activity.idle["h2d"] - before == pytest.approx(15)


def test_a_commit_that_takes_longer_than_a_step_is_the_cause():
    """Two steps in flight: the third is planned only after the first is committed."""
    story = first_step()
    for begin in (24, 26):
        story.plan(begin, begin + 0.5)
        story.launch(begin + 0.5, begin + 1, begin + 1)
    story.done(27, 31, compute=(26, 30), arrived=25.5)
    story.commit(31, 50)
    story.plan(50, 51)
    story.launch(51, 52, 52)
    story.done(52, 52, compute=(30, 36), arrived=28)
    before = story.idle()
    story.commit(52, 53)
    story.done(53, 60, compute=(53, 58), arrived=53)
    after = story.idle()
    assert {cause: after[cause] - before[cause] for cause in before} == pytest.approx(
        {"nothing": 0, "commit": 14, "plan": 2, "h2d": 1, "launch": 0}
    )


def test_capturing_graphs_is_a_cause_of_its_own_and_no_gap_while_nobody_asks():
    story = Story()
    story.activity.captured(story.at(2), story.at(5))
    story.plan(10, 12)
    story.launch(12, 12, 12)
    story.done(12, 21, compute=(12, 20), arrived=12)
    assert story.idle() == {"nothing": 7, "capture": 3, "plan": 2}
    assert story.activity.gap_seconds == pytest.approx(2)
    story.commit(21, 22)
    story.plan(22, 23)
    story.activity.captured(story.at(24), story.at(28))  # while the step is launched
    story.launch(23, 29, 29)
    story.done(29, 41, compute=(29, 40), arrived=29)
    assert story.idle() == {"nothing": 7, "capture": 7, "commit": 2, "plan": 2 + 3}
    assert story.activity.gap_seconds == pytest.approx(2 + 9)


def test_new_weights_are_a_cause_of_their_own_and_no_gap_while_nobody_asks():
    story = Story()
    story.write(2, 5)
    story.plan(10, 12)
    story.launch(12, 12, 12)
    story.done(12, 21, compute=(12, 20), arrived=12)
    assert story.idle() == {"nothing": 7, "weights": 3, "plan": 2}
    assert story.activity.gap_seconds == pytest.approx(2)
    story.commit(21, 22)
    story.write(22, 28)  # queued with the commands, ahead of the step, whose launch is not held up by it
    story.plan(23, 24)
    story.launch(24, 24, 25)
    story.done(25, 41, compute=(29, 40), arrived=24.5)
    assert story.idle() == {"nothing": 7, "weights": 9, "commit": 2, "plan": 2, "launch": 1}
    assert story.activity.gap_seconds == pytest.approx(2 + 9)
    assert story.activity.newest.writes == ((story.at(22), story.at(28)),)
    story.commit(41, 41)
    story.plan(41, 41)
    story.launch(41, 41, 41)
    story.done(41, 51, compute=(41, 50), arrived=41)
    assert story.activity.newest.writes == ()


def test_weights_written_while_a_step_runs_belong_to_the_gap_before_the_next_one():
    """And a device clock that is off shifts them with it."""
    story = first_step()
    story.plan(24, 25)
    story.launch(25, 26, 27)
    story.write(40, 42)
    story.plan(27, 28)
    story.launch(28, 28.5, 29)
    story.done(29, 40.5, compute=(28, 40), arrived=27, clock=-5)
    before = story.idle()
    story.commit(40.5, 41)
    story.done(41, 51, compute=(42.5, 50), arrived=29, clock=-5)
    grown = {cause: seconds - before.get(cause, 0) for cause, seconds in story.idle().items()}
    assert {cause: round(seconds, 6) for cause, seconds in grown.items() if seconds > 1e-6} == {
        "weights": 2,
        "launch": 0.5,
    }


@pytest.mark.parametrize("clock", [-5.0, 5.0])
def test_a_device_clock_that_is_off_is_held_by_what_must_be_true(clock):
    """A step cannot begin before its launch, nor end after its output was seen; lengths stay as measured."""
    story = first_step()
    story.plan(24, 25)
    story.launch(25, 26, 27)
    story.done(27, 40, compute=(28.5, 39.5), arrived=28, clock=clock)
    story.commit(40, 41)
    story.plan(41, 42)
    story.launch(42, 43, 43)
    before, gaps = story.idle(), story.activity.gap_seconds
    story.done(43, 50, compute=(43.5, 49.5), arrived=43.5, clock=clock)
    assert story.activity.gap_seconds - gaps == pytest.approx(43.5 - 39.5)
    shares = {cause: story.idle()[cause] - before[cause] for cause in before}
    assert shares["plan"] == pytest.approx(2, abs=0.01)
    assert shares["commit"] == pytest.approx(1.5, abs=0.51)
    assert shares["h2d"] == pytest.approx(0.5, abs=0.51)


# The engine on the CPU


class OneSlowStream(CpuDevice):
    """A device, one stream of which sleeps before each piece of work."""

    def __init__(self, name):
        super().__init__(strict=True)
        stream = DelayedStream(getattr(self, name), lambda _: time.sleep(SLOW), 0, 0.0)
        setattr(self, name, stream)


def slowed(function):
    def slow(*arguments):
        time.sleep(SLOW)
        return function(*arguments)

    return slow


def run_engine(loop, device=None, slow=()):
    """Run one request; `slow` names what sleeps: `plan`, `commit`, `forward`."""
    torch.set_num_threads(1)
    with Engine("tiny", device=device or CpuDevice(), loop=loop, max_rows=2, num_blocks=32, seed=0) as engine:
        parts = engine._parts
        engine.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True), progress=False)
        for name in {"plan", "commit"} & set(slow):
            setattr(parts.scheduler, name, slowed(getattr(parts.scheduler, name)))
        if "forward" in slow:
            parts.runner._forward = slowed(parts.runner._forward)
        before, start = engine.stats(), time.perf_counter()
        engine.generate([[1, 2, 3]], PARAMS, progress=False)
        seconds, after = time.perf_counter() - start, engine.stats()
    idle = {cause: after.idle_by_cause[cause] - before.idle_by_cause[cause] for cause in CAUSES}
    return SimpleNamespace(before=before, after=after, idle=idle, seconds=seconds)


@pytest.mark.parametrize("loop", ["sync", "async"])
def test_the_sums_agree_with_each_other_and_with_the_wall_time(loop):
    run = run_engine(loop)
    stats = run.after
    assert set(stats.idle_by_cause) == set(CAUSES)
    assert set(stats.cpu_seconds) == set(PHASES)
    assert sum(stats.idle_by_cause.values()) == pytest.approx(stats.gap_seconds + stats.idle_seconds)
    assert stats.idle_seconds == pytest.approx(stats.idle_by_cause["nothing"])
    busy = stats.busy_seconds - run.before.busy_seconds
    assert 0 < busy + sum(run.idle.values()) - run.idle["nothing"] < run.seconds
    cpu = sum(stats.cpu_seconds.values()) - sum(run.before.cpu_seconds.values())
    assert 0 < cpu < run.seconds
    assert min(run.idle.values()) >= 0


@pytest.mark.parametrize(
    ("cause", "slow", "stream"),
    [
        ("plan", ["plan"], None),
        ("commit", ["commit"], None),
        ("commit", [], "d2h"),
        ("h2d", [], "h2d"),
    ],
)
def test_the_synchronous_loop_idles_for_what_is_slow(cause, slow, stream):
    idle = run_engine("sync", OneSlowStream(stream) if stream else None, slow).idle
    expected = (TOKENS - 1) * SLOW
    assert idle[cause] >= expected
    assert max(idle, key=lambda name: idle[name] if name != "nothing" else 0.0) == cause


@pytest.mark.parametrize("slow", ["plan", "commit"])
def test_the_asynchronous_loop_hides_what_is_slow_behind_a_step_that_is_longer(slow):
    """The forward pass sleeps as long as the CPU does: with overlap the two sleeps lie side by side."""
    sync, overlapped = (run_engine(loop, slow=[slow, "forward"]).idle for loop in ("sync", "async"))
    assert sync[slow] >= (TOKENS - 1) * SLOW
    assert overlapped[slow] < sync[slow] / 2


def test_waiting_for_nobody_is_nothing_and_does_not_lower_activity():
    with Engine("tiny", device="cpu", max_rows=2, num_blocks=32, seed=0) as engine:
        engine.generate([[1, 2, 3]], PARAMS, progress=False)
        before = engine.stats()
        time.sleep(0.2)
        engine.generate([[1, 2, 3]], PARAMS, progress=False)
        after = engine.stats()
    assert after.idle_by_cause["nothing"] - before.idle_by_cause["nothing"] >= 0.2
    assert after.gap_seconds - before.gap_seconds < 0.2
