"""`admission`: what a long queue costs, in bytes and in time; the device's work is stubbed.

All else is real: requests are checked and made by the front, go through the inbox into the queue, get a row and a step
from the scheduler, and their outputs go through delivery. Each has a prompt of its own, and one token to generate.

    submit_per_s       from `Front.submit` to the queue
    admit_per_s        from the queue to a row and into a plan, with all that makes room for it: commit and release
    submit_us, admit_us  the same per request, in CPU time of the caller's and of the loop's thread
    bytes_per_request  all that the process holds for a request that waits: handle, sample, request, prompt, queue entry
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
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
from .cpu_step import now
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
    """Submit so many requests, then run them all."""
    desk = Desk()
    try:
        moments = [now()]
        handles = desk.submit(requests)
        moments.append(now())
        desk.run()
        moments.append(now())
        for handle in handles:
            handle.result()
    finally:
        desk.close()
    figures: dict[str, Any] = {}
    for name, begin, end in zip(("submit", "admit"), moments, moments[1:], strict=False):
        figures[f"{name}_per_s"] = requests / (end.wall - begin.wall) * 1e9
        figures[f"{name}_us"] = (end.cpu - begin.cpu) / requests * 1e-3
    seconds = (moments[-1].wall - moments[0].wall) * 1e-9
    extra = figures | extra
    return Run(engine="twostroke", loop=None, seconds=seconds, tokens=requests, waiting=requests, extra=extra)


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
        prompts = np.arange(requests * PROMPT_TOKENS).reshape(requests, PROMPT_TOKENS) % LIMITS.vocab_size
        handles = [self._front.submit(prompt, PARAMS) for prompt in prompts]
        for command in self._inbox.take(block=False):
            command(self._scheduler)
        return handles

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


def _raise(error: BaseException) -> None:
    raise error
