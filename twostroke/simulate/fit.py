"""The fit of the step-time model to the results of benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

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

APART = 0.2
"""By how much the shares of computing in the rooflines of results must differ to tell reading and computing apart."""


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
    numbers: of the model that were fitted to them.
    """

    step_time: StepTime
    model: str
    gpu: str
    points: tuple[Point, ...]
    numbers: int

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

    What a step had to do on average is read off a simulation of the benchmark; then `stretch` finds the factors and
    `per_step`. `host` is the mean of what results state, 0 if none does.

    Raises:
        InvalidConfig: they are not of one model and one GPU.
    """
    kinds = {(model_of(result.benchmark), result.gpu or "") for result in results}
    if len(kinds) != 1:
        raise InvalidConfig(f"results of one model and one GPU are needed, these are of {sorted(kinds)}")
    model, gpu = kinds.pop()
    facts = results[0].workload
    step_time = StepTime(cost_of_preset(model), facts["read_bytes_per_s"], facts["flop_per_s"])
    step_time = replace(step_time, read_factor=FIRST_FACTOR, compute_factor=FIRST_FACTOR)
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
        reading, computing = np.array([[one.reading, one.computing] for one in means]).T
        read_factor, compute_factor, per_step, numbers = stretch(reading, computing, device)
        step_time = replace(step_time, read_factor=read_factor, compute_factor=compute_factor, per_step=per_step)
    fitted = read_factor * reading + compute_factor * computing + per_step
    points = zip((result.benchmark for result in results), device.tolist(), fitted.tolist(), strict=True)
    return Fit(step_time, model, gpu, tuple(Point(*point) for point in points), numbers)


def _simulate(result: Result, step_time: StepTime, memory_bytes: float) -> Simulated:
    loop = "async" if "async" in loops_of(result) else "sync"
    return simulate_benchmark(result.benchmark, step_time, loop, result.workload, memory_bytes)


class Stretch(NamedTuple):
    """The numbers of `StepTime` that are fitted, and how many of them were free."""

    read_factor: float
    compute_factor: float
    per_step: float
    numbers: int


def stretch(reading: np.ndarray, computing: np.ndarray, measured: np.ndarray) -> Stretch:
    """Find the numbers for which the sum of the squared relative errors is least.

    No factor is less than 1, since ceilings cannot be beaten, and `per_step` is not negative. Results whose rooflines
    are shared out between reading and computing alike, as that of a single one is, decide on one factor for both
    alone. Of others, two decide on `compute_factor` and `per_step`, with reading at its ceiling: what decode steps
    take beyond the reading hardly grows with it. Three or more decide on `read_factor`, too.

    Args:
        reading, computing: mean rooflines of a step, seconds; one per result, as all here.
        measured: mean times of a step, seconds.
    """
    roofline = reading + computing
    beyond = (measured - roofline) / measured
    if np.ptp(computing / roofline) < APART:
        factor = 1 + float(least_squares((roofline / measured)[:, None], beyond)[0])
        return Stretch(factor, factor, 0.0, numbers=1)
    terms = np.stack([computing, np.ones(len(measured)), reading], axis=1)[:, : len(measured)]
    found = np.zeros(3)
    found[: terms.shape[1]] = least_squares(terms / measured[:, None], beyond)
    compute, per_step, read = found.tolist()
    return Stretch(1 + read, 1 + compute, per_step, numbers=terms.shape[1])


def least_squares(terms: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """The weights, none negative, of the columns of `terms`, [N, K], that bring it nearest to `sums`, [N].

    With so few columns every choice of which are 0 can be tried.
    """
    best, least = np.zeros(terms.shape[1]), float((sums**2).sum())
    for size in range(1, terms.shape[1] + 1):
        for columns in map(list, combinations(range(terms.shape[1]), size)):
            chosen, *_ = np.linalg.lstsq(terms[:, columns], sums, rcond=None)
            error = float(((terms[:, columns] @ chosen - sums) ** 2).sum())
            if (chosen >= 0).all() and error < least - 1e-12:
                best, least = np.zeros(terms.shape[1]), error
                best[columns] = chosen
    return best
