"""Running a workload and keeping the times of its steps."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..device.step_times import StepTimes
from ..engine import Engine, EngineStats
from ..errors import InvalidConfig, counted
from ..sampling_params import SamplingParams

WARM_UP_TOKENS = 4
MIN_STEADY_STEPS = 2


@dataclass(frozen=True)
class Workload:
    """Requests that all start together and all run to their last token.

    Attributes:
        rows: how many. prompt_tokens, max_tokens: of each.
    """

    rows: int
    prompt_tokens: int
    max_tokens: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise InvalidConfig(f"{name}={value} must be at least 1")

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random token ids, always the same."""
        rng = random.Random(0)
        return [[rng.randrange(vocab_size) for _ in range(self.prompt_tokens)] for _ in range(self.rows)]


@dataclass(frozen=True)
class Profile:
    """What a loop did with a workload.

    Attributes:
        loop: `sync` or `async`.
        seconds: wall time of the run.
        steps: steps of the run.
        active: share of the working time in which the compute stream ran a step, 0 to 1.
        busy: seconds in which it did.
        idle: seconds in which it did not, by cause.
        window: the last steady steps, in which every row decodes, in order.
    """

    loop: str
    seconds: float
    steps: int
    active: float
    busy: float
    idle: Mapping[str, float]
    window: Sequence[StepTimes]


def run_profile(loop: str, workload: Workload, window_steps: int, options: Mapping[str, Any]) -> Profile:
    """Run a workload under a loop on an engine of its own, warmed up before.

    Args:
        window_steps: most steps to keep.
        options: further arguments of `Engine`.

    Raises:
        InvalidConfig: an option is out of range, or there was no window of steady steps.
    """
    window: deque[StepTimes] = deque(maxlen=window_steps)
    longest = workload.prompt_tokens + workload.max_tokens
    # NOTE: the prefix cache is off, since the warm-up has the same prompts.
    with Engine(loop=loop, max_rows=workload.rows, max_model_len=longest, prefix_cache=False, **options) as engine:
        prompts = workload.prompts(engine.model.vocab_size)
        engine.generate(prompts, _greedy(min(WARM_UP_TOKENS, workload.max_tokens)), progress=False)
        before = engine.stats()
        engine._parts.runner.activity.window = window
        began = time.perf_counter()
        engine.generate(prompts, _greedy(workload.max_tokens), progress=False)
        seconds = time.perf_counter() - began
        after = engine.stats()
    # NOTE: only now has the loop ended, and nobody writes the window any more.
    return _as_profile(loop, seconds, before, after, _steady(window, workload))


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def _steady(window: Sequence[StepTimes], workload: Workload) -> list[StepTimes]:
    steps = [times for times in window if times.lanes == workload.rows and not times.prompt_tokens]
    if len(steps) < MIN_STEADY_STEPS:
        raise InvalidConfig(
            f"max_tokens={workload.max_tokens} leaves {counted(len(steps), 'step')} with "
            f"{counted(workload.rows, 'row')} decoding; a profile needs {MIN_STEADY_STEPS}"
        )
    return steps


def _as_profile(
    loop: str, seconds: float, before: EngineStats, after: EngineStats, window: Sequence[StepTimes]
) -> Profile:
    busy = after.busy_seconds - before.busy_seconds
    gaps = after.gap_seconds - before.gap_seconds
    idle = {cause: after.idle_by_cause[cause] - before.idle_by_cause[cause] for cause in after.idle_by_cause}
    return Profile(loop, seconds, after.steps - before.steps, busy / (busy + gaps), busy, idle, window)
