"""`admission`: what a long queue costs, in bytes and in time; the device's work is stubbed.

All else is real: requests are checked and made by the front, go through the inbox into the queue, get a row and a step
from the scheduler, and their outputs go through delivery. Each has a prompt of its own, and one token to generate.

    start_per_s        from `Front.start`, with all of them in one call, to the queue
    submit_per_s       from `Front.submit`, one by one, to the queue
    admit_per_s        from the queue to a row and into a plan, with all that makes room for it: commit and release
    result_per_s       from the handle to the whole output, which is made when it is asked for
    start_us, submit_us, admit_us, result_us  the same per request, in CPU time of the caller's and of the loop's thread
    bytes_per_request  all that the process holds for a request that waits: handle, sample, request, prompt, queue entry

Rates are of wall time: beside `admit` the delivery worker has the interpreter for its share. Garbage is collected as
Python does by default, which takes a share of every time that grows with what is alive.
"""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from ..constraints.constraints import Constraints
from ..engine import InboxCommands
from ..front import Front
from ..inbox import Inbox
from ..limits import Limits
from ..plan import Flag, StepOutput
from ..sampling_params import SamplingParams
from ..scheduler.scheduler import Scheduler
from ..text.delivery import Delivery
from ..text.handle import Handle
from .cpu_step import Moment, now
from .options import BenchOptions
from .result import Result, Run

REQUESTS = 100_000
PROMPT_TOKENS = 16
MAX_ROWS = 256
MAX_STEP_TOKENS = 8192
BLOCK_SIZE = 16
LIMITS = Limits(vocab_size=1 << 15, max_model_len=4096, block_size=BLOCK_SIZE, usable_blocks=1 << 14)
PARAMS = SamplingParams(temperature=0.0, max_tokens=1)


def run(name: str, options: BenchOptions, say: Callable[[str], None]) -> Result:
    """Measure time and, in a run of its own, since that slows everything, memory."""
    say("memory")
    bytes_per_request = measure_bytes(REQUESTS)
    runs = []
    for repetition in range(options.repetitions):
        say(f"time, {repetition + 1} of {options.repetitions}")
        runs.append(measure_seconds(REQUESTS, {"bytes_per_request": bytes_per_request}))
    workload = {"requests": REQUESTS, "prompt_tokens": PROMPT_TOKENS, "max_rows": MAX_ROWS, "device": "stubbed"}
    return Result(benchmark=name, gpu=None, workload=workload, runs=tuple(runs))


def measure_bytes(requests: int) -> int:
    """Bytes that Python and numpy have allocated for each of so many requests that wait."""
    desk = Desk()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        handles = desk.submit(requests)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        desk.close()
    return round((after - before) / len(handles))


def measure_seconds(requests: int, extra: dict[str, Any]) -> Run:
    """Start so many requests; then submit as many one by one, run these, take their outputs: that is `seconds`."""
    figures: dict[str, Any] = {}
    with closing(Desk()) as desk:
        moments = [now()]
        handles = desk.start(requests)
        moments.append(now())
        figures |= _figures(requests, ("start",), moments)
    with closing(Desk()) as desk:
        moments = [now()]
        handles = desk.submit(requests)
        moments.append(now())
        desk.run()
        moments.append(now())
        for handle in handles:
            handle.result()
        moments.append(now())
        figures |= _figures(requests, ("submit", "admit", "result"), moments)
    seconds = (moments[-1].wall - moments[0].wall) * 1e-9
    extra = figures | extra
    return Run(engine="twostroke", loop=None, seconds=seconds, tokens=requests, waiting=requests, extra=extra)


def _figures(requests: int, names: Sequence[str], moments: Sequence[Moment]) -> dict[str, float]:
    """Rates and CPU times of what happened between the moments."""
    figures = {}
    for name, (began, ended) in zip(names, itertools.pairwise(moments), strict=True):
        figures[f"{name}_per_s"] = requests / (ended.wall - began.wall) * 1e9
        figures[f"{name}_us"] = (ended.cpu - began.cpu) / requests * 1e-3
    return figures


class Desk:
    """A front, a scheduler and a delivery, and in place of the loop and the device a caller."""

    def __init__(self) -> None:
        self._inbox = Inbox()
        self._delivery = Delivery(None, _raise)
        self._scheduler = Scheduler(
            max_rows=MAX_ROWS,
            max_step_tokens=MAX_STEP_TOKENS,
            max_model_len=LIMITS.max_model_len,
            block_size=BLOCK_SIZE,
            num_blocks=LIMITS.usable_blocks + 1,
        )
        commands, self._constraints = InboxCommands(self._inbox, self._scheduler), Constraints(None, LIMITS)
        self._front = Front(None, LIMITS, 0, self._delivery, commands, self._constraints)

    def submit(self, requests: int) -> list[Handle]:
        """Submit so many requests, each with a prompt that no other has, and queue them."""
        handles = [self._front.submit(prompt, PARAMS) for prompt in _prompts(requests)]
        self._take()
        return handles

    def start(self, requests: int) -> list[Handle]:
        """The same in one call."""
        handles = self._front.start(_prompts(requests), [PARAMS] * requests)
        self._take()
        return handles

    def _take(self) -> None:
        for command in self._inbox.take(block=False):
            command(self._scheduler)

    def run(self) -> None:
        """Take every request through a row and a step, to delivery."""
        last = int(Flag.TOKEN | Flag.LENGTH)
        while (plan := self._scheduler.plan()) is not None:
            outputs = plan.num_lanes + len(plan.sampling_chunks())
            output = StepOutput(np.zeros(outputs, np.int32), np.full(outputs, last, np.int32))
            self._delivery.put(self._scheduler.commit(plan, output))

    def close(self) -> None:
        self._delivery.close()
        self._constraints.close()


def _prompts(requests: int) -> list[np.ndarray]:
    return list(np.arange(requests * PROMPT_TOKENS).reshape(requests, PROMPT_TOKENS) % LIMITS.vocab_size)


def _raise(error: BaseException) -> None:
    raise error
