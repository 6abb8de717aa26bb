"""Results as tables: what the command line prints and what the documentation shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .result import Result, Run

FIGURES: dict[str, Callable[[Run], str | None]] = {
    "case": lambda run: run.case,
    "rows": lambda run: _number(run.rows, "d"),
    "waiting": lambda run: _number(run.waiting, ",d"),
    "seconds": lambda run: f"{run.seconds:.2f}",
    "relative": lambda run: _number(run.relative, ".3f"),
    "tokens": lambda run: str(run.tokens),
    "tokens/s": lambda run: f"{run.tokens_per_s:.1f}",
    "ms/step": lambda run: _number(run.ms_per_step, ".2f"),
    "active": lambda run: _number(run.gpu_active, ".1%"),
    "kernels": lambda run: _number(run.kernel_active, ".1%"),
    "GB/s": lambda run: _number(run.bytes_per_s, ".0f", 1e-9),
    "floor s": lambda run: _number(run.floor_seconds, ".2f"),
    "of floor": lambda run: _number(run.floor_share, ".1%"),
}
"""Figures of a run. A column that no run has a figure for is left out."""


@dataclass(frozen=True)
class Table:
    """Attributes:
    columns: headings. rows: cells, as many as there are columns.
    """

    columns: list[str]
    rows: list[list[str]]


def machine_of(result: Result) -> str:
    return result.gpu or f"{result.machine['cpu']}, {result.machine['cores']} cores"


def table_of(result: Result) -> Table:
    """The median repetition of each engine, loop and case; with one case, `speed` is relative to the fastest."""
    runs = medians(result.runs)
    columns: dict[str, list[str | None]] = {"engine": [run.engine for run in runs], "loop": [run.loop for run in runs]}
    columns |= {name: [show(run) for run in runs] for name, show in FIGURES.items()}
    for phase in dict.fromkeys(phase for run in runs for phase in run.cpu_us or {}):
        columns[f"{phase} us"] = [_number((run.cpu_us or {}).get(phase), ".1f") for run in runs]
    for name in dict.fromkeys(name for run in runs for name in run.extra):
        columns[name.replace("_", " ")] = [_extra(run.extra.get(name)) for run in runs]
    if all(run.rows is None for run in runs):
        fastest = max(run.tokens_per_s for run in runs)
        columns["speed"] = [f"{run.tokens_per_s / fastest:.2f}" for run in runs]
    shown = {name: [cell or "-" for cell in cells] for name, cells in columns.items() if any(cells)}
    return Table(list(shown), [list(row) for row in zip(*shown.values(), strict=True)])


def medians(runs: Sequence[Run]) -> list[Run]:
    """The run with the median time of each engine, loop and case; of an even number, the slower of the middle two."""
    groups: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        case = (run.engine, run.loop, run.case, run.rows, run.waiting, run.extra.get("streamed"))
        groups.setdefault(case, []).append(run)
    return [sorted(group, key=lambda run: run.seconds)[len(group) // 2] for group in groups.values()]


def _number(value: float | None, form: str, scale: float = 1) -> str | None:
    return None if value is None else format(value * scale if scale != 1 else value, form)


def _extra(value: object) -> str | None:
    """A cell for a further figure: a truth, or a number.

    A drawing gets a line of its own, see `drawings`; a list of numbers is for the file alone.
    """
    if isinstance(value, str | list):
        return None
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.1f}" if isinstance(value, float) else None if value is None else str(value)


def drawings(result: Result) -> list[str]:
    """Lines that show what runs have drawn over their time, beside what was drawn."""
    drawn = [(run, name, value) for run in medians(result.runs) for name, value in run.extra.items()]
    return [
        f"|{value}| {name.replace('_', ' ')}, {run.loop} loop, {run.case}"
        for run, name, value in drawn
        if isinstance(value, str)
    ]


def kernel_table(run: Run) -> Table | None:
    """The kernels of a steady step, the longest first; None if they were not profiled."""
    if run.kernel_us is None or run.kernel_runs is None:
        return None
    rows = [[name[:100], f"{us:.1f}", f"{run.kernel_runs[name]:.1f}"] for name, us in run.kernel_us.items()]
    return Table(["kernel", "us per step", "runs per step"], rows)


@dataclass(frozen=True)
class Comparison:
    """What the asynchronous loop saves, in the form of the published comparison.

    Attributes:
        sync, async_: the median run of each loop.
        price: of an hour of the device.
    """

    sync: Run
    async_: Run
    price: float

    @property
    def saved(self) -> float:
        """Share of the synchronous loop's time that the asynchronous one does not take."""
        return 1 - self.async_.seconds / self.sync.seconds

    def idle_cost(self, run: Run) -> float:
        """What the device's idle time costs in a day of such a run."""
        assert run.gpu_active is not None
        return (1 - run.gpu_active) * 24 * self.price

    def table(self) -> Table:
        columns = ["loop", "seconds", "saved", "GPU active", f"idle cost per day at ${self.price:g} per hour"]
        saved = [None, f"{self.saved:.1%}"]
        rows = [
            [
                run.loop or "-",
                f"{run.seconds:.2f}",
                share or "-",
                _number(run.gpu_active, ".1%") or "-",
                "-" if run.gpu_active is None else f"${self.idle_cost(run):.2f}",
            ]
            for run, share in zip((self.sync, self.async_), saved, strict=True)
        ]
        return Table(columns, rows)


def compare(result: Result, price: float) -> Comparison | None:
    """Set twostroke's loops side by side; None unless both were measured, on one case, on a GPU."""
    runs = [run for run in medians(result.runs) if run.engine == "twostroke"]
    by_loop = {run.loop: run for run in runs}
    if result.gpu is None or len(runs) != 2 or set(by_loop) != {"sync", "async"}:
        return None
    return Comparison(by_loop["sync"], by_loop["async"], price)
