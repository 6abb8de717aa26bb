"""The fit of the step-time model to the results of benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np

from ..bench.offline_workloads import WORKLOADS
from ..bench.result import Result, Run
from ..bench.summary import medians
from ..errors import InvalidConfig, shown
from .benchmarks import KNOWN, Simulated, model_of, simulate_benchmark
from .shape import cost_of_preset
from .step_time import StepTime

ROUNDS = 4
"""Where requests come at times of their own, which of them share a step depends on the fit: so it is made again."""

FIRST_FACTOR = 1.3
"""Of the roofline, in the first round."""


@dataclass(frozen=True)
class Point:
    """A measured mean time of a step, seconds, and what the fit makes of it."""

    benchmark: str
    measured: float
    fitted: float

    @property
    def error(self) -> float:
        """Relative."""
        return self.fitted / self.measured - 1


@dataclass(frozen=True)
class Fit:
    """Attributes:
    step_time: the model. model: of which LLM. gpu: on which device.
    points: one per result.
    """

    step_time: StepTime
    model: str
    gpu: str
    points: tuple[Point, ...]

    @property
    def error(self) -> float:
        """Root of the mean squared relative error of the points."""
        return float(np.sqrt(np.mean([point.error**2 for point in self.points])))


def read_result(path: Path) -> Result:
    """A result that the model can be fitted to, or the simulator held against.

    Raises:
        InvalidConfig: the file cannot be read, or holds none.
    """
    try:
        result = Result.read(path)
    except OSError as error:
        raise InvalidConfig(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidConfig(f"{path} is not a result of twostroke bench: {type(error).__name__}: {error}") from None
    if result.benchmark not in KNOWN or result.gpu is None:
        raise InvalidConfig(f"{path}: benchmark {result.benchmark!r} is none of {', '.join(KNOWN)}, on a GPU")
    if not loops_of(result):
        raise InvalidConfig(f"{path} holds no run of twostroke")
    _check_figures(result, path)
    return result


def _check_figures(result: Result, path: Path) -> None:
    """Raise `InvalidConfig` if the ceilings, or the time of a step, are nothing that the model could be fitted to."""
    facts = result.workload if isinstance(result.workload, Mapping) else {}
    figures = [(name, facts.get(name)) for name in ("read_bytes_per_s", "flop_per_s")]
    figures += [("ms_per_step", run.ms_per_step) for run in loops_of(result).values()]
    for name, value in figures:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise InvalidConfig(f"{path}: {name}={shown(value)} must be a number above 0, and finite")


def loops_of(result: Result) -> dict[str, Run]:
    """The median run of each loop of twostroke; where several cases are compared, of the first."""
    runs = [run for run in result.runs if run.engine == "twostroke" and run.ms_per_step]
    runs = [run for run in runs if run.case == runs[0].case]
    return {run.loop: run for run in medians(runs) if run.loop is not None}


def step_seconds(result: Result) -> tuple[float, float | None]:
    """Mean seconds of a step on the device, and of what the CPU does between two steps if nothing hides it.

    The first is what a step takes under the asynchronous loop, the second what it takes longer under the synchronous
    one. Where the steps of the two are not alike, or one loop was not measured, the synchronous one's idle time tells
    the second, or nothing does.
    """
    runs = loops_of(result)
    sync, overlapped = (1e-3 * (runs[loop].ms_per_step or 0.0) if loop in runs else 0.0 for loop in ("sync", "async"))
    if not sync:
        return overlapped, None
    active = runs["sync"].gpu_active
    idle = sync * (1 - active) if active is not None else 0.0
    if overlapped and (active is None or result.benchmark in WORKLOADS):
        idle = max(0.0, sync - overlapped)
    return overlapped or sync - idle, idle


def fit_results(results: Sequence[Result], memory_bytes: float) -> Fit:
    """Fit `StepTime` to the mean times of steps that results state.

    What a step had to do on average is read off a simulation of the benchmark. Then `factor`, `per_step` and `per_row`
    are those, none of them negative, for which the sum of the squared relative errors is least. One result decides on
    the factor alone, two on `per_step` as well, three or more on all. `host` is the mean of what results
    state, 0 if none does.

    Raises:
        InvalidConfig: they are not of one model and one GPU.
    """
    kinds = {(model_of(result.benchmark), result.gpu or "") for result in results}
    if len(kinds) != 1:
        raise InvalidConfig(f"results of one model and one GPU are needed, these are of {sorted(kinds)}")
    model, gpu = kinds.pop()
    facts = results[0].workload
    step_time = StepTime(cost_of_preset(model), facts["read_bytes_per_s"], facts["flop_per_s"], factor=FIRST_FACTOR)
    stated = [step_seconds(result) for result in results]
    device = np.array([seconds for seconds, _ in stated])
    hosts = [seconds for _, seconds in stated if seconds is not None]
    step_time = replace(step_time, host=float(np.mean(hosts)) if hosts else 0.0)
    means: list[Simulated] = []
    for _ in range(ROUNDS):
        # NOTE: where all requests come at once, who shares a step does not depend on how long it takes.
        means = [
            means[place] if means and result.benchmark in WORKLOADS else _simulate(result, step_time, memory_bytes)
            for place, result in enumerate(results)
        ]
        terms = np.array([[one.roofline, 1.0, one.rows] for one in means])
        factor, per_step, per_row = least_squares(terms / device[:, None], min(len(results), 3))
        step_time = replace(step_time, factor=factor, per_step=per_step, per_row=per_row)
    fitted = terms @ np.array([factor, per_step, per_row])
    points = zip((result.benchmark for result in results), device.tolist(), fitted.tolist(), strict=True)
    return Fit(step_time, model, gpu, tuple(Point(*point) for point in points))


def _simulate(result: Result, step_time: StepTime, memory_bytes: float) -> Simulated:
    loop = "async" if "async" in loops_of(result) else "sync"
    return simulate_benchmark(result.benchmark, step_time, loop, result.workload, memory_bytes)


def least_squares(terms: np.ndarray, count: int) -> list[float]:
    """The weights of the first `count` columns of `terms`, [N, K], none negative, whose sums are nearest to 1.

    Those of the other columns are 0. With so few columns every choice of which are 0 can be tried.
    """
    best, least = [0.0] * terms.shape[1], np.inf
    for size in range(1, count + 1):
        for columns in combinations(range(count), size):
            chosen, *_ = np.linalg.lstsq(terms[:, columns], np.ones(len(terms)), rcond=None)
            error = float(((terms[:, columns] @ chosen - 1) ** 2).sum())
            if (chosen >= 0).all() and error < least - 1e-12:
                best, least = [0.0] * terms.shape[1], error
                for column, weight in zip(columns, chosen.tolist(), strict=True):
                    best[column] = weight
    return best
