"""`twostroke bench`: run a benchmark, print its table, keep its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..bench.options import BenchOptions
from ..bench.registry import BENCHMARKS, find
from ..bench.result import Result, Run
from ..errors import InvalidConfig
from .table import print_table

NAMES = "\n\n".join(f"{benchmark.name}: {benchmark.summary}." for benchmark in BENCHMARKS.values())


def bench(
    name: Annotated[str, typer.Argument(help=f"Which benchmark.\n\n{NAMES}", show_default=False)],
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="Write the result here; a folder gets a file NAME-MACHINE-DATE.json."
        ),
    ] = None,
    repetitions: Annotated[
        int | None, typer.Option(min=1, help="Measured runs of each engine; the benchmark's own number if not given.")
    ] = None,
    loop: Annotated[str, typer.Option(help="sync, async or both.")] = "both",
    impl: Annotated[str, typer.Option(help="native, transformers or auto.")] = "auto",
    slots: Annotated[int, typer.Option(min=1, help="Sets of buffers; steps in flight.")] = 2,
    max_step_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of one step.")] = 2048,
) -> None:
    """Measure twostroke, beside its peers where the benchmark has some."""
    benchmark = find(name)
    if loop not in LOOPS:
        raise InvalidConfig(f"loop={loop!r} must be one of {', '.join(LOOPS)}")
    options = BenchOptions(
        repetitions=benchmark.repetitions if repetitions is None else repetitions,
        loops=LOOPS[loop],
        impl=impl,
        slots=slots,
        max_step_tokens=max_step_tokens,
    )
    result = benchmark.run(options, lambda line: typer.echo(line, err=True))
    _print_result(result)
    if json_file is not None:
        typer.echo(f"\nwritten to {result.write(json_file)}")


LOOPS = {"sync": ("sync",), "async": ("async",), "both": ("sync", "async")}

COLUMNS: dict[str, Callable[[Run], str | None]] = {
    "seconds": lambda run: f"{run.seconds:.2f}",
    "tokens": lambda run: str(run.tokens),
    "tokens/s": lambda run: f"{run.tokens_per_s:.1f}",
    "ms/step": lambda run: None if run.ms_per_step is None else f"{run.ms_per_step:.2f}",
    "active": lambda run: None if run.gpu_active is None else f"{100 * run.gpu_active:.1f}%",
    "GB/s": lambda run: None if run.bytes_per_s is None else f"{run.bytes_per_s / 1e9:.0f}",
    "floor s": lambda run: None if run.floor_seconds is None else f"{run.floor_seconds:.2f}",
    "of floor": lambda run: None if run.floor_share is None else f"{100 * run.floor_share:.1f}%",
}
"""Figures of a run. A column that no run has a figure for is left out."""


def _print_result(result: Result) -> None:
    machine = result.gpu or f"{result.machine['cpu']}, {result.machine['cores']} cores"
    typer.echo(f"{result.benchmark} on {machine}, {result.date[:10]}")
    typer.echo(", ".join(f"{key} {value}" for key, value in result.workload.items()))
    typer.echo("the median repetition of each engine; speed is relative to the fastest\n")
    runs = _medians(result.runs)
    fastest = max(run.tokens_per_s for run in runs)
    columns = {name: [show(run) for run in runs] for name, show in COLUMNS.items()}
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    columns["speed"] = [f"{run.tokens_per_s / fastest:.2f}" for run in runs]
    rows = zip(*([cell or "-" for cell in cells] for cells in columns.values()), strict=True)
    named = [(run.engine, run.loop or "-", *cells) for run, cells in zip(runs, rows, strict=True)]
    print_table(("engine", "loop", *columns), named)


def _medians(runs: Sequence[Run]) -> list[Run]:
    """The run with the median time of each engine and loop; of an even number, the slower of the middle two."""
    groups: dict[tuple[str, str | None], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.engine, run.loop), []).append(run)
    return [sorted(group, key=lambda run: run.seconds)[len(group) // 2] for group in groups.values()]
