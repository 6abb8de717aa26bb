"""`cpu-step`: what the CPU does in a steady decode step, with the device's work stubbed.

All but the arithmetic is real: the loop, the scheduler with its prefix cache, the slots, the streams and events of the
CPU device, delivery and its handles. Rows begin with prompts of 1 to 16 tokens, so in every step one row in 16 gets a
block. They publish blocks when they leave, which no measured step sees, and the cache has blank blocks throughout.

    plan      Scheduler.plan
    fill      Slot.fill
    commit    Scheduler.commit, and handing what it returns to delivery
    queueing  the rest of Runner.launch: three streams and their events
    hand_off  Runner.wait until the step is done: the worker threads' turn, and delivery's with the tokens
    reading   the rest of Runner.wait: the output out of the slot, the accounting

The first three are the step's own work: `cpu_us` is their CPU time in the loop's thread, `wall_us` their wall time
together. The others stand beside them, in wall time (`extra`). Every case runs twice: with outputs that are awaited
as a whole, and with all of them streamed. A model with windows in five of its six cache groups is measured, too: a row
that gets its blocks gives back those that have slid out.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from ..device.batch_state import BatchState
from ..device.cpu import CpuDevice
from ..device.layout import input_capacity
from ..device.shapes import ExactShapes, StepShape
from ..device.slot import Slot, StepBuffers
from ..errors import EngineClosed, TwostrokeError
from ..inbox import Inbox
from ..lifecycle import LOOPS
from ..limits import Limits
from ..plan import Flag, Plan, StepOutput
from ..request import Request, Sample
from ..runner import Runner
from ..sampling_params import SamplingParams
from ..scheduler.committed import Committed
from ..scheduler.scheduler import Scheduler
from ..text.delivery import Delivery
from ..text.handle import Handle
from .options import BenchOptions
from .result import Result, Run

ROWS = (32, 256, 1024)
WAITING = (0, 10_000)
STEPS = 1024
WARM_UP_STEPS = 64
BLOCK_SIZE = 16
MAX_STEP_TOKENS = 2048
OWN = ("plan", "fill", "commit")
BESIDE = ("queueing", "hand_off", "reading")
FULL = (0,)
WINDOWS = (0, *[48] * 5)
"""Of the cache groups; rows are longer than the window before they are measured."""
LIMITS = Limits(vocab_size=128, max_model_len=4096, block_size=BLOCK_SIZE, usable_blocks=1 << 20)


@dataclass(frozen=True)
class Case:
    """A steady state.

    Attributes:
        rows: samples that decode. waiting: samples in the queue behind them.
        streamed: the rows' tokens are handed over as they come.
        steps: consecutive steps to measure.
        windows: of the model's cache groups.
    """

    rows: int
    waiting: int
    streamed: bool
    steps: int = STEPS
    windows: tuple[int, ...] = FULL


def run(name: str, options: BenchOptions, say: Callable[[str], None]) -> Result:
    """Measure every case under each loop asked for."""
    torch.set_num_threads(1)
    cases = [Case(rows, waiting, streamed) for rows in ROWS for waiting in WAITING for streamed in (False, True)]
    cases += [Case(rows, 0, streamed=False, windows=WINDOWS) for rows in ROWS]
    runs = []
    for case in cases:
        say(f"{case.rows} rows, {case.waiting} waiting{', streamed' if case.streamed else ''}, windows {case.windows}")
        runs += [run_case(case, loop, options.slots) for loop in options.loops for _ in range(options.repetitions)]
    workload = {
        "steps": STEPS,
        "block_size": BLOCK_SIZE,
        "slots": options.slots,
        "windows": WINDOWS,
        "prefix_cache": True,
        "device": "stubbed",
    }
    return Result(benchmark=name, gpu=None, workload=workload, runs=tuple(runs))


def run_case(case: Case, loop: str, slots: int) -> Run:
    """Measure one case; `seconds` is the time of the measured steps from end to end."""
    watch = Watch(case)
    delivery = Delivery(None, _raise)
    device = CpuDevice()
    try:
        _run_loop(case, LOOPS[loop], slots, watch, delivery, device)
    finally:
        delivery.close()
        device.close()
    beside = {f"{phase}_us": us for phase, us in watch.wall_us(BESIDE).items()}
    extra = {"streamed": case.streamed, "wall_us": sum(watch.wall_us(OWN).values()), **beside}
    return Run(
        engine="twostroke",
        loop=loop,
        seconds=watch.seconds,
        tokens=case.rows * case.steps,
        ms_per_step=1e3 * watch.seconds / case.steps,
        cpu_us=watch.cpu_us(OWN),
        case="full" if case.windows == FULL else "windows",
        rows=case.rows,
        waiting=case.waiting,
        extra=extra,
    )


def _run_loop(case: Case, loop: Any, slots: int, watch: Watch, delivery: Delivery, device: CpuDevice) -> None:
    """Run the loop in this thread until the watch has seen enough, then let all samples go."""
    scheduler = TimedScheduler(
        watch,
        max_rows=case.rows,
        max_step_tokens=MAX_STEP_TOKENS,
        max_model_len=LIMITS.max_model_len,
        block_size=BLOCK_SIZE,
        num_blocks=1 + len(case.windows) * case.rows * (LIMITS.max_model_len // BLOCK_SIZE),
        windows=case.windows,
    )
    inbox = Inbox()
    watch.on_end = lambda: inbox.close(EngineClosed("measured"), last=lambda scheduler: scheduler.abandon())
    runner = _make_runner(case, watch, device)
    ring = [_make_slot(case, watch, device) for _ in range(slots)]
    samples = _submit(case, inbox, delivery)
    loop(scheduler, runner, ring, inbox, timed_delivery(delivery, scheduler, watch)).run()
    if not watch.complete or scheduler.stats().preemptions or any(len(s.output) < case.steps for s in samples):
        raise TwostrokeError(f"{case} did not run {case.steps} steady steps")


def _submit(case: Case, inbox: Inbox, delivery: Delivery) -> list[Sample]:
    """Leave the case's requests in the inbox; returns the samples that get rows."""
    handles = [Handle([Sample(make_request(index))], _Nobody()) for index in range(case.rows + case.waiting)]
    samples = [handle.sample for handle in handles]
    delivery.register(handles)

    def submit(scheduler: Scheduler) -> None:
        for sample in samples:
            scheduler.submit(sample)
        for sample in samples[: case.rows] if case.streamed else ():
            scheduler.stream(sample)

    inbox.put(submit)
    return samples[: case.rows]


def make_request(index: int) -> Request:
    """A request that decodes for as long as it may, after a prompt of 1 to 16 tokens."""
    prompt = np.ones(1 + index % BLOCK_SIZE, np.int32)
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    return Request.create(str(index), prompt, params, seed=index, limits=LIMITS)


class _Nobody:
    """An owner for handles that nobody cancels."""

    def cancel(self, sample: Sample) -> None: ...

    def stream(self, sample: Sample) -> None: ...

    def finish(self, sample: Sample, count: int) -> None: ...


def _raise(error: BaseException) -> None:
    raise error


class Moment(NamedTuple):
    """A reading of two clocks, nanoseconds: the wall's, and the CPU time of this thread."""

    wall: int
    cpu: int


def now() -> Moment:
    return Moment(time.perf_counter_ns(), time.thread_time_ns())


class Watch:
    """Sums up times by phase over the steps of the window.

    The window begins when all rows decode and the warm-up is over. A step that is not steady, once it has begun, is an
    error of the benchmark.
    """

    def __init__(self, case: Case) -> None:
        self.on_end: Callable[[], None] = lambda: None
        self.complete = False
        self._case = case
        self._cpu: dict[str, int] = defaultdict(int)
        self._wall: dict[str, int] = defaultdict(int)
        self._steady_from: int | None = None
        self._began = self._ended = 0

    def planned(self, plan: Plan) -> None:
        """See every plan: find the first steady step, insist that none after it is another kind."""
        steady = plan.num_lanes == self._case.rows and not len(plan.chunks)
        if self._steady_from is None and steady:
            self._steady_from = plan.step
        elif self._steady_from is not None and not steady and not self.complete:
            raise TwostrokeError(f"step {plan.step} is not a steady decode step: {plan.num_lanes} lanes")

    def add(self, phase: str, step: int, began: Moment) -> None:
        """Count the time since `began` as `phase` of `step`."""
        ended = now()
        if self._in_window(step):
            self._began = self._began or began.wall
            self._ended = ended.wall
            self._cpu[phase] += ended.cpu - began.cpu
            self._wall[phase] += ended.wall - began.wall

    def ended(self, step: int) -> None:
        """Note that `step` was committed and handed over."""
        if self._in_window(step) and not self._in_window(step + 1):
            self.complete = True
            self.on_end()

    def _in_window(self, step: int) -> bool:
        if self._steady_from is None or self.complete:
            return False
        return 0 <= step - self._steady_from - WARM_UP_STEPS < self._case.steps

    @property
    def seconds(self) -> float:
        """From the beginning of the window's first plan to the end of its last commit."""
        return (self._ended - self._began) * 1e-9

    def cpu_us(self, phases: Sequence[str]) -> dict[str, float]:
        """Mean CPU time of the loop's thread per step, microseconds."""
        return self._means(self._cpu, phases)

    def wall_us(self, phases: Sequence[str]) -> dict[str, float]:
        """Mean wall time per step, microseconds."""
        return self._means(self._wall, phases)

    def _means(self, sums: dict[str, int], phases: Sequence[str]) -> dict[str, float]:
        own = {phase: sums[phase] for phase in phases}
        if "queueing" in own:
            own["queueing"] -= sums["fill"]  # `launch` fills the slot, then queues
        return {phase: nanoseconds * 1e-3 / self._case.steps for phase, nanoseconds in own.items()}


class TimedScheduler(Scheduler):
    """A scheduler whose `plan` and `commit` are timed."""

    def __init__(self, watch: Watch, **config: Any) -> None:
        super().__init__(**config)
        self._watch = watch

    def plan(self) -> Plan | None:
        began = now()
        plan = super().plan()
        if plan is not None:
            self._watch.add("plan", plan.step, began)
            self._watch.planned(plan)
        return plan

    def commit(self, plan: Plan, output: StepOutput) -> Committed:
        began = now()
        committed = super().commit(plan, output)
        self._watch.add("commit", plan.step, began)
        return committed


class TimedSlot(Slot):
    """A slot whose `fill` is timed, and whose device output says that every row lives and samples its own token."""

    def __init__(self, watch: Watch, device: CpuDevice, input_words: int, max_outputs: int) -> None:
        super().__init__(device, input_words, max_outputs)
        self._watch = watch
        self.device_output[:, 0] = torch.arange(max_outputs)
        self.device_output[:, 1] = int(Flag.TOKEN)

    def fill(self, plan: Plan, outputs: int) -> None:
        began = now()
        super().fill(plan, outputs)
        self._watch.add("fill", plan.step, began)


class TimedRunner(Runner):
    """A runner whose `launch` and `wait` are timed, and whose steps compute nothing."""

    watch: Watch

    def launch(self, plan: Plan, slot: Slot) -> None:
        began = now()
        super().launch(plan, slot)
        self.watch.add("queueing", plan.step, began)

    def wait(self, plan: Plan, slot: Slot) -> StepOutput:
        began = now()
        slot.d2h_done.synchronize()
        self.watch.add("hand_off", plan.step, began)
        began = now()
        output = super().wait(plan, slot)
        self.watch.add("reading", plan.step, began)
        return output

    def step(self, shape: StepShape, buffers: StepBuffers) -> None:
        """The device's work: none."""


def _make_runner(case: Case, watch: Watch, device: CpuDevice) -> Runner:
    state = BatchState(
        device,
        max_rows=case.rows,
        max_lanes=case.rows,
        max_tokens=1,
        table_width=1,
        block_size=BLOCK_SIZE,
    )
    ops: Any = SimpleNamespace(advance=_NOTHING)
    runner = TimedRunner(device, state, ops, _NOTHING, _NOTHING, (), _NOTHING, ExactShapes())
    runner.watch = watch
    return runner


_NOTHING: Any = None
"""In place of the operations, the model and the sampler, which only `Runner.step` calls."""


def _make_slot(case: Case, watch: Watch, device: CpuDevice) -> Slot:
    words = input_capacity(
        max_rows=case.rows,
        max_step_tokens=MAX_STEP_TOKENS,
        max_model_len=LIMITS.max_model_len,
        block_size=BLOCK_SIZE,
        num_groups=len(case.windows),
    )
    return TimedSlot(watch, device, words, case.rows)


def timed_delivery(delivery: Delivery, scheduler: Scheduler, watch: Watch) -> Callable[[Committed | None], None]:
    """Return `delivery.put`, timed as part of the commit before it."""

    def put(committed: Committed | None) -> None:
        began = now()
        delivery.put(committed)
        watch.add("commit", scheduler.batch.committed_step, began)
        watch.ended(scheduler.batch.committed_step)

    return put
