"""`twostroke bench`: run a benchmark, print its table, keep its result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ..bench.options import BenchOptions
from ..bench.peers import PEERS
from ..bench.registry import BENCHMARKS, find
from ..bench.report import PRICE
from ..bench.result import Result
from ..bench.summary import Table, compare, drawings, kernel_table, machine_of, table_of
from ..errors import InvalidConfig
from .folders import make_folder
from .streams import tell
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
    impl: Annotated[str, typer.Option(help="native, transformers, auto, or both: the former two.")] = "auto",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Measure the mode of that name too, against the engine without it.")
    ] = False,
    slots: Annotated[int, typer.Option(min=1, help="Sets of buffers; steps in flight.")] = 2,
    max_step_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of one step; the benchmark's own number if not given.")
    ] = None,
    kernels: Annotated[
        bool, typer.Option(help="Also profile a window of steady steps, kernel by kernel; of the offline workloads.")
    ] = False,
    update_every: Annotated[
        int | None,
        typer.Option(min=1, help="Replace the weights every so many steps of a run; of the offline workloads."),
    ] = None,
    api_processes: Annotated[
        int, typer.Option(min=1, help="Serve by so many API processes too, beside one; of serving.")
    ] = 1,
    price: Annotated[
        float | None, typer.Option(min=0, help=f"Of an hour of the GPU, in dollars; for --loop both: {PRICE:g}.")
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help=f"Measure a peer too: {' or '.join(PEERS)}; may be repeated.")
    ] = None,
    peer_dir: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="The peers' scripts, configurations and packages.")
    ] = None,
    commit: Annotated[
        str | None, typer.Option(help="The commit that is measured, where the code does not lie in a checkout.")
    ] = None,
) -> None:
    """Measure twostroke, beside its peers where the benchmark has some."""
    benchmark = find(name)
    if loop not in LOOPS:
        raise InvalidConfig(f"loop={loop!r} must be one of {', '.join(LOOPS)}")
    if price is not None and loop != "both":
        raise InvalidConfig(f"price={price:g} is for the comparison of both loops, not for loop={loop!r}")
    options = BenchOptions(
        repetitions=benchmark.repetitions if repetitions is None else repetitions,
        loops=LOOPS[loop],
        impl=impl,
        slots=slots,
        deterministic=deterministic,
        max_step_tokens=max_step_tokens,
        kernels=kernels,
        update_every=update_every,
        api_processes=api_processes,
        peers=tuple(peer or ()),
        peer_dir=peer_dir,
    )
    if json_file is not None:
        make_folder(json_file.parent if json_file.suffix == ".json" and not json_file.is_dir() else json_file, "--json")
    result = benchmark.run(options, tell)
    if result.commit is None:
        result = replace(result, commit=commit)
    _print_result(result, PRICE if price is None else price)
    if json_file is not None:
        typer.echo(f"\nwritten to {result.write(json_file)}")


LOOPS = {"sync": ("sync",), "async": ("async",), "both": ("sync", "async")}


def _print_result(result: Result, price: float) -> None:
    typer.echo(f"{result.title} on {machine_of(result)}, {result.date[:10]}")
    typer.echo(", ".join(f"{key} {value}" for key, value in result.workload.items()))
    table = table_of(result)
    speed = "; speed is relative to the fastest" if "speed" in table.columns else ""
    typer.echo(f"the median repetition of each engine and case{speed}\n")
    _print_table(table)
    for line in drawings(result):
        typer.echo(line)
    comparison = compare(result, price)
    if comparison is not None:
        typer.echo()
        _print_table(comparison.table())
    for run in {run.loop: run for run in result.runs}.values():
        if profiled := kernel_table(run):
            typer.echo(f"\na steady step of the {run.loop} loop, kernel by kernel")
            _print_table(profiled)
    for peer, failure in result.failures.items():
        typer.echo(f"\n{peer} failed: {failure}")


def _print_table(table: Table) -> None:
    print_table(table.columns, table.rows)
