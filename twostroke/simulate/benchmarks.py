"""The benchmarks, simulated: what the step-time model is fitted to, and what the simulator is held against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..bench.mix import WARM_UP_TOKENS, Mix
from ..bench.offline_workloads import WORKLOADS, Workload
from ..errors import InvalidConfig
from .arrivals import Arrival, own_tokens
from .measures import Measures
from .replica import Replica
from .settings import Settings
from .step_time import StepTime, Work

KNOWN = (*WORKLOADS, "mixed")


@dataclass(frozen=True)
class Tally(StepTime):
    """A step time that sums up what it is asked: steps, and both parts of their rooflines."""

    sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])

    def seconds(self, work: Work) -> float:
        for place, value in enumerate((1.0, *self.roofline(work))):
            self.sums[place] += value
        return super().seconds(work)


@dataclass(frozen=True)
class Simulated:
    """Attributes:
    seconds, tokens: as in the benchmark's `Run`.
    steps: that were launched in this time. reading, computing: of their rooflines, means over them.
    extra: the further figures of the benchmark.
    """

    seconds: float
    tokens: int
    steps: int
    reading: float
    computing: float
    extra: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def model_of(name: str) -> str:
    """The preset that a benchmark runs.

    Raises:
        InvalidConfig: it is not one that can be simulated.
    """
    if name not in KNOWN:
        raise InvalidConfig(f"benchmark {name!r} cannot be simulated; those that can are {', '.join(KNOWN)}")
    return _own(name).model


def _own(name: str) -> Mix | Workload:
    return Mix() if name == "mixed" else WORKLOADS[name]()


def simulate_benchmark(
    name: str, step_time: StepTime, loop: str, facts: Mapping[str, Any], memory_bytes: float
) -> Simulated:
    """Simulate a benchmark under `loop`; `facts` are the workload that a result file states, or nothing.

    Raises:
        InvalidConfig: it is not one that can be simulated, or no engine has those settings.
    """
    model_of(name)
    tally = Tally(**vars(step_time))
    settings = Settings(
        loop=loop,
        slots=facts.get("slots", 2),
        max_step_tokens=facts.get("max_step_tokens", _own(name).max_step_tokens),
        num_blocks=facts.get("num_blocks"),
        prefix_cache=False,
    )
    if name == "mixed":
        return _mixed(settings, tally, memory_bytes)
    return _offline(name, settings, facts, tally, memory_bytes)


def _replica(settings: Settings, tally: Tally, memory_bytes: float) -> tuple[Replica, Measures]:
    settings.validate()
    measures = Measures()
    return Replica(settings, settings.blocks(tally.cost, memory_bytes), tally, measures), measures


def _offline(name: str, settings: Settings, facts: Mapping[str, Any], tally: Tally, memory_bytes: float) -> Simulated:
    workload = WORKLOADS[name]()
    max_rows = facts.get("max_rows", workload.max_rows)
    settings = replace(settings, max_rows=max_rows, max_model_len=workload.max_model_len)
    replica, measures = _replica(settings, tally, memory_bytes)
    for prompt, outputs in zip(workload.prompts, workload.outputs, strict=True):
        replica.submit(Arrival(0.0, np.array(prompt, np.int32), outputs, outputs))
    replica.advance(float("inf"))
    return _simulated(tally, replica.clock.now, sum(measures.outputs))


def _mixed(settings: Settings, tally: Tally, memory_bytes: float) -> Simulated:
    """Rows decode; then, as in the benchmark, two prompts to warm up, and the arrivals, whose time is measured."""
    mix = Mix()
    settings = replace(settings, max_rows=mix.rows + mix.spare_rows, max_model_len=mix.max_model_len)
    replica, measures = _replica(settings, tally, memory_bytes)
    replica.shortcut = None
    endless = mix.max_model_len - mix.row_prompt
    for number in range(mix.rows):
        replica.submit(Arrival(0.0, own_tokens(number, mix.row_prompt), endless, endless))
    rows, table = np.arange(mix.rows), replica.scheduler.rows
    while table.confirmed[rows].min() < mix.row_prompt + WARM_UP_TOKENS:
        replica.turn()
    for number in range(2):
        replica.submit(Arrival(replica.clock.now, own_tokens(mix.rows + number, mix.prompt), 1, 1))
    while replica.load > mix.rows:
        replica.turn()
    start, before = replica.clock.now, int(table.confirmed[table.order >= 0].sum())
    tally.sums[:] = [0.0] * 3
    first_gap, first_arrival = len(measures.gaps), len(measures.arrived)
    for number in range(mix.arrivals):
        due = start + number * mix.every
        replica.advance(due)
        replica.submit(Arrival(due, own_tokens(mix.rows + 2 + number, mix.prompt), 1, 1))
    while replica.load > mix.rows:
        replica.turn()
    seconds, decoded = replica.clock.now - start, int(table.confirmed[table.order >= 0].sum()) - before
    if replica.load < mix.rows:
        raise InvalidConfig(f"rows of max_model_len={mix.max_model_len} ended within {seconds:.1f} s")
    waits = measures.times_to_first_token()[first_arrival:]
    del measures.gaps[:first_gap], measures.gap_counts[:first_gap]
    p50, p99 = measures.gap_percentiles(50, 99)
    return _simulated(
        tally,
        seconds,
        decoded + mix.arrivals,
        {
            "inter_token_p50_ms": 1e3 * p50,
            "inter_token_p99_ms": 1e3 * p99,
            "first_token_p50_ms": 1e3 * float(np.percentile(waits, 50)),
            "first_token_p99_ms": 1e3 * float(np.percentile(waits, 99)),
        },
    )


def _simulated(tally: Tally, seconds: float, tokens: int, extra: Mapping[str, float] | None = None) -> Simulated:
    steps, reading, computing = tally.sums
    return Simulated(seconds, tokens, int(steps), reading / steps, computing / steps, extra or {})
