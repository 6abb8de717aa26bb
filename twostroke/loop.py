"""The two loops. They know the scheduler, the runner and the slots by what they do, and nothing of CUDA."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Scheduler(Protocol):
    """Decides what runs next; `commit` takes one step's output and returns what there is to hand over."""

    @property
    def has_work(self) -> bool: ...
    def plan(self) -> Any: ...
    def unhold(self, plan: Any, patience: float) -> Any: ...
    def commit(self, plan: Any, output: Any) -> Any: ...


class Runner(Protocol):
    """Takes plans through slots. `wait` is the only place where the CPU waits for the device.

    `complete` queues what was left out of the launch of the oldest step in flight: that which needs the tokens of all
    earlier steps. It does nothing for a step that was launched as a whole.
    """

    def launch(self, plan: Any, slot: Any) -> None: ...
    def complete(self, unhold: Callable[[Any, float], Any]) -> None: ...
    def wait(self, plan: Any, slot: Any) -> Any: ...
    def rest(self) -> None: ...


class Inbox(Protocol):
    """Commands from other threads; each is called with the scheduler and may return something to hand over."""

    @property
    def open(self) -> bool: ...
    def take(self, *, block: bool) -> list[Callable[[Any], Any]]: ...


class Loop:
    """What both loops share: commands are taken between steps, and with no work the loop blocks."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        slots: Sequence[Any],
        inbox: Inbox,
        deliver: Callable[[Any], None],
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.slots = slots
        self.inbox = inbox
        self.deliver = deliver

    def run(self) -> None:
        """Run until the inbox closes."""
        raise NotImplementedError

    def serve(self, in_flight: int = 0) -> bool:
        """Take the commands that have come; block for one if there is nothing to do. False: stop."""
        idle = not in_flight and not self.scheduler.has_work
        if idle:
            self.runner.rest()
        for command in self.inbox.take(block=idle):
            self.deliver(command(self.scheduler))
        return self.inbox.open or bool(in_flight)

    def launch(self, plan: Any, slot: Any) -> None:
        """Launch a step; if nothing else is in flight, all of it."""
        self.runner.launch(plan, slot)
        self.runner.complete(self.scheduler.unhold)

    def finish(self, plan: Any, slot: Any) -> None:
        """Wait for the oldest step in flight, commit it, hand over what it gave, and complete the one behind it."""
        self.deliver(self.scheduler.commit(plan, self.runner.wait(plan, slot)))
        self.runner.complete(self.scheduler.unhold)

    def stuck(self) -> RuntimeError:
        return RuntimeError("the scheduler has work, but plans nothing and has nothing in flight")


class SyncLoop(Loop):
    """Plan, launch, wait, commit: the reference.

    CPU      plan 0 | fill |                     | commit 0 | plan 1 | fill |
    H2D                    | in 0 |                                         | in 1 |
    compute                       | step 0 |       (idle)                          | step 1 |
    D2H                                    | out 0 |
    """

    def run(self) -> None:
        slot = self.slots[0]
        while self.serve():
            plan = self.scheduler.plan()
            if plan is not None:
                self.launch(plan, slot)
                self.finish(plan, slot)
            elif self.scheduler.has_work:
                raise self.stuck()


class AsyncLoop(Loop):
    """Plan and launch the next step while the last one runs; only then wait for the last one, and commit it.

        CPU      plan 0, fill A | plan 1, fill B |   wait | commit 0, plan 2, fill A |  wait | commit 1, plan 3 ...
        H2D                     | in 0 (A) |     | in 1 (B) |                        | in 2 (A) |
        compute                            | step 0         | step 1                 | step 2               | ...
        D2H                                                 | out 0 (A) |            | out 1 (B) |

    The tokens of step 0 reach step 1 on the device (carry-over): its plan knew the rows, not the tokens. With S slots,
    S steps can be in flight; a slot is filled again only after its last step is committed.
    """

    def run(self) -> None:
        in_flight: deque[tuple[Any, Any]] = deque()
        while self.serve(len(in_flight)):
            plan = self.scheduler.plan()
            if plan is not None:
                slot = self.slots[plan.step % len(self.slots)]
                self.launch(plan, slot)
                in_flight.append((plan, slot))
            elif not in_flight and self.scheduler.has_work:
                raise self.stuck()
            if in_flight and (plan is None or len(in_flight) == len(self.slots)):
                self.finish(*in_flight.popleft())
