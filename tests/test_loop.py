"""The loops, over a scheduler and a runner that only write down what happens."""

import threading
import time
from typing import NamedTuple

import pytest

from twostroke.errors import EngineClosed
from twostroke.inbox import Inbox
from twostroke.loop import AsyncLoop, SyncLoop


class FakePlan(NamedTuple):
    step: int


class FakeScheduler:
    """Plans `todo` steps; each must be committed in order."""

    def __init__(self, log):
        self.log, self.todo, self.step, self.committed = log, 0, 0, 0

    @property
    def has_work(self):
        return self.todo > 0 or self.committed < self.step

    def plan(self):
        if not self.todo:
            return None
        self.todo -= 1
        self.step += 1
        self.log.append(f"plan {self.step - 1}")
        return FakePlan(self.step - 1)

    def unhold(self, plan, patience):
        assert plan.step == self.committed, "a second part before all earlier steps were committed"

    def commit(self, plan, output):
        assert plan.step == self.committed == output
        self.committed += 1
        self.log.append(f"commit {plan.step}")
        return f"tokens {plan.step}"


class FakeRunner:
    """Runs steps as a whole, or, if they are split, notes when their second parts are queued."""

    def __init__(self, log, split=False):
        self.log, self.busy, self.rests = log, {}, 0
        self.split, self.first_parts = split, []

    def launch(self, plan, slot):
        assert slot not in self.busy, "a slot was filled before its last step was committed"
        self.busy[slot] = plan.step
        self.log.append(f"launch {plan.step} in {slot}")
        if self.split:
            self.first_parts.append(plan)

    def complete(self, unhold):
        if self.first_parts and self.first_parts[0].step == min(self.busy.values()):
            plan = self.first_parts.pop(0)
            unhold(plan, 0.0)
            self.log.append(f"complete {plan.step}")

    def wait(self, plan, slot):
        self.log.append(f"wait {plan.step}")
        assert plan not in self.first_parts, "a wait for a step whose second part is not queued would last for ever"
        return self.busy.pop(slot)

    def rest(self):
        self.rests += 1


def run_steps(make_loop, slots, steps, split=False):
    log, delivered, inbox = [], [], Inbox()
    scheduler, runner = FakeScheduler(log), FakeRunner(log, split)

    def begin(scheduler):
        scheduler.todo = steps

    def deliver(committed):
        delivered.append(committed)
        if committed == f"tokens {steps - 1}":
            inbox.close(EngineClosed("done"))

    inbox.put(begin)
    make_loop(scheduler, runner, slots, inbox, deliver).run()
    assert delivered == [None] + [f"tokens {i}" for i in range(steps)]
    return log, runner


def test_the_synchronous_loop_plans_launches_waits_commits():
    log, _ = run_steps(SyncLoop, "AB", 2)
    once = ["plan {0}", "launch {0} in A", "wait {0}", "commit {0}"]
    assert log == [line.format(step) for step in range(2) for line in once]


def test_the_asynchronous_loop_launches_the_next_step_before_it_waits_for_the_last():
    log, _ = run_steps(AsyncLoop, "AB", 4)
    assert log == [
        *["plan 0", "launch 0 in A", "plan 1", "launch 1 in B"],  # cold start
        *["wait 0", "commit 0", "plan 2", "launch 2 in A"],  # steady state
        *["wait 1", "commit 1", "plan 3", "launch 3 in B"],
        *["wait 2", "commit 2", "wait 3", "commit 3"],  # drain
    ]


def test_three_slots_keep_three_steps_in_flight():
    log, _ = run_steps(AsyncLoop, "ABC", 6)
    assert log.index("launch 2 in C") < log.index("wait 0") < log.index("launch 3 in A")


def test_one_slot_is_the_synchronous_order():
    assert run_steps(AsyncLoop, "A", 3)[0] == run_steps(SyncLoop, "A", 3)[0]


def test_a_second_part_is_queued_behind_the_commit_before_it_and_ahead_of_the_next_plan():
    log, _ = run_steps(AsyncLoop, "AB", 4, split=True)
    assert log == [
        *["plan 0", "launch 0 in A", "complete 0", "plan 1", "launch 1 in B"],
        *["wait 0", "commit 0", "complete 1", "plan 2", "launch 2 in A"],
        *["wait 1", "commit 1", "complete 2", "plan 3", "launch 3 in B"],
        *["wait 2", "commit 2", "complete 3", "wait 3", "commit 3"],
    ]


@pytest.mark.parametrize(("make_loop", "slots"), [(SyncLoop, "A"), (AsyncLoop, "A"), (AsyncLoop, "ABC")])
def test_every_second_part_is_queued_once(make_loop, slots):
    log, _ = run_steps(make_loop, slots, 6, split=True)
    assert [line for line in log if line.startswith("complete")] == [f"complete {step}" for step in range(6)]


@pytest.mark.parametrize("make_loop", [SyncLoop, AsyncLoop])
def test_an_idle_loop_blocks_and_wakes_for_a_command(make_loop):
    """A39, A40, A41: started with nothing to do it waits, at no CPU time."""
    log, inbox, woken = [], Inbox(), threading.Event()
    loop = make_loop(FakeScheduler(log), FakeRunner(log), "AB", inbox, lambda committed: None)
    used = {}

    def run():
        before = time.thread_time()
        loop.run()
        used["cpu"] = time.thread_time() - before

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.3)
    inbox.put(lambda scheduler: woken.set())
    assert woken.wait(5)
    assert loop.runner.rests == 2, "one block before the command, one after: it did not poll"
    inbox.close(EngineClosed("done"))
    thread.join(5)
    assert not thread.is_alive()
    assert used["cpu"] < 0.1


@pytest.mark.parametrize("make_loop", [SyncLoop, AsyncLoop])
def test_work_without_a_plan_is_an_error_and_no_hang(make_loop):
    log, inbox = [], Inbox()
    scheduler = FakeScheduler(log)
    scheduler.committed = -1  # has work for ever, and plans nothing
    with pytest.raises(RuntimeError, match="plans nothing"):
        make_loop(scheduler, FakeRunner(log), "AB", inbox, lambda committed: None).run()


@pytest.mark.parametrize("make_loop", [SyncLoop, AsyncLoop])
def test_the_last_command_runs_and_steps_in_flight_are_committed_at_the_end(make_loop):
    log, inbox = [], Inbox()
    scheduler, runner = FakeScheduler(log), FakeRunner(log)

    def begin(scheduler):
        scheduler.todo = 10**6

    def stop(scheduler):
        scheduler.todo = 0

    def deliver(committed):
        if committed == "tokens 5":
            inbox.close(EngineClosed("closed"), last=stop)

    inbox.put(begin)
    make_loop(scheduler, runner, "AB", inbox, deliver).run()
    assert not runner.busy
    assert scheduler.committed == scheduler.step < 10
    with pytest.raises(EngineClosed):
        inbox.put(begin)
