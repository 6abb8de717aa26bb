"""One timed call to `generate`, with what the engine's own accounting says about it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .result import Run

if TYPE_CHECKING:
    from ..engine import Engine, EngineStats
    from ..prompts import Prompt
    from ..sampling_params import SamplingParams
    from ..text.output import RequestOutput


@dataclass(frozen=True)
class Measured:
    """What a call to `generate` gave and took.

    Attributes:
        outputs: in the order of the prompts.
        seconds: wall time of the call.
        steps: steps that the engine ran.
        active: share of the working time in which the device (on a CPU: the compute worker) ran a step, 0 to 1.
        idle: seconds in which it did not, by cause; see `EngineStats.idle_by_cause`.
        cpu: seconds of the loop's thread, by phase; see `EngineStats.cpu_seconds`.
    """

    outputs: list[RequestOutput]
    seconds: float
    steps: int
    active: float
    idle: Mapping[str, float]
    cpu: Mapping[str, float]

    @property
    def tokens(self) -> int:
        """Output tokens of all prompts."""
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def cpu_us(self) -> dict[str, float]:
        """The CPU's own work for a step, on average, in microseconds: all phases but the wait for the device."""
        return {phase: 1e6 * seconds / self.steps for phase, seconds in self.cpu.items() if phase != "wait"}

    def as_run(self, loop: str, **figures: Any) -> Run:
        """The entry of a result file; `figures` are those of a `Run` that only the benchmark knows."""
        return Run(
            engine="twostroke",
            loop=loop,
            seconds=self.seconds,
            tokens=self.tokens,
            ms_per_step=1e3 * self.seconds / self.steps,
            gpu_active=self.active,
            cpu_us=self.cpu_us,
            **figures,
        )


def measure(engine: Engine, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]) -> Measured:
    """Answer `prompts` together on an engine that does nothing else; earlier work is not counted in.

    Raises:
        InvalidRequest: a prompt or a parameter was refused.
    """
    before = engine.stats()
    start = time.perf_counter()
    outputs = engine.generate(prompts, params, progress=False)
    seconds = time.perf_counter() - start
    return measured_between(before, engine.stats(), outputs, seconds)


def measured_between(before: EngineStats, after: EngineStats, outputs: list[RequestOutput], seconds: float) -> Measured:
    """What an engine did between two looks at it, `seconds` apart."""
    busy = after.busy_seconds - before.busy_seconds
    gaps = after.gap_seconds - before.gap_seconds
    active = busy / (busy + gaps) if busy else 0.0
    idle = _difference(after.idle_by_cause, before.idle_by_cause)
    cpu = _difference(after.cpu_seconds, before.cpu_seconds)
    return Measured(outputs, seconds, after.steps - before.steps, active, idle, cpu)


def _difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in after}
