"""The cluster: replicas behind a router."""

from __future__ import annotations

from collections.abc import Iterable

from .arrivals import Arrival
from .measures import Measures
from .replica import Replica
from .report import Report
from .routing import RULES
from .settings import Settings
from .step_time import StepTime


def simulate(
    arrivals: Iterable[Arrival],
    settings: Settings,
    step_time: StepTime,
    memory_bytes: float,
    *,
    replicas: int = 1,
    routing: str = "round-robin",
) -> Report:
    """Let all requests come and go.

    A request is routed when it comes, by what each replica has to do at the beginning of its first turn after that.

    Args:
        arrivals: by time.
        memory_bytes: of each replica's device, for weights and cache; see `Settings.blocks`.
        replicas: engines, one device each.
        routing: a name of `RULES`.

    Raises:
        InvalidConfig: a setting is out of range. InvalidRequest: a trace is malformed.
    """
    settings.validate()
    measures, num_blocks = Measures(), settings.blocks(step_time.cost, memory_bytes)
    engines = [Replica(settings, num_blocks, step_time, measures) for _ in range(replicas)]
    rule = RULES[routing](settings.block_size, replicas * num_blocks)
    for arrival in arrivals:
        for engine in engines:
            engine.advance(arrival.time)
        engines[rule.choose(arrival, [engine.load for engine in engines])].submit(arrival)
    for engine in engines:
        engine.advance(float("inf"))
    return Report.of(measures, engines)
