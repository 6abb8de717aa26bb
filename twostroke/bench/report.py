"""The tables of docs/performance.md, made from the result files: `python -m twostroke.bench.report RESULTS PAGE`."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

from ..errors import TwostrokeError
from .registry import BENCHMARKS
from .result import Result
from .summary import Table, compare, machine_of, table_of

BEGIN = "<!-- tables: made by `make tables` from bench/results -->"
END = "<!-- end of tables -->"
PRICE = 5.0
"""Dollars for an hour of the device, in the comparison of the loops."""


def newest(results: Iterable[Result]) -> list[Result]:
    """The newest result of each title and machine, in the order of the registry, then of titles and machines."""
    found: dict[tuple[str, str], Result] = {}
    for result in sorted(results, key=lambda result: result.date):
        found[result.title, machine_of(result)] = result
    order = list(BENCHMARKS)
    return sorted(found.values(), key=lambda result: (order.index(result.benchmark), result.title, machine_of(result)))


def read_results(folder: Path) -> list[Result]:
    """All results of known benchmarks in a folder; it may hold other JSON files too."""
    paths = [
        path for path in sorted(folder.glob("*.json")) if json.loads(path.read_text()).get("benchmark") in BENCHMARKS
    ]
    return [Result.read(path) for path in paths]


def section(result: Result) -> str:
    """A result as Markdown: heading, facts, table, and the comparison of the loops if both were measured."""
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items() if version)
    parts = [
        f"### {result.title}, {machine_of(result)}",
        f"{BENCHMARKS[result.benchmark].summary[0].upper()}{BENCHMARKS[result.benchmark].summary[1:]}.",
        _markdown(table_of(result)),
    ]
    comparison = compare(result, PRICE)
    if comparison is not None:
        parts.append(_markdown(comparison.table()))
    parts += [f"{peer} failed." for peer in result.failures]
    commit = result.commit or "unknown"
    facts = f"{result.date[:10]}, commit {commit[:10]}{commit[40:]}; {versions}."  # behind a hash: "+changes"
    parts.append(textwrap.fill(facts, 120, break_on_hyphens=False))
    return "\n\n".join(parts)


def updated(page: str, results: Iterable[Result]) -> str:
    """`page` with the tables of `results` between its two marks.

    Raises:
        TwostrokeError: the page lacks a mark.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise TwostrokeError(f"the page needs the lines {BEGIN!r} and {END!r}")
    return "\n\n".join([before + BEGIN, *map(section, newest(results)), END + after])


def _markdown(table: Table) -> str:
    heading = "| " + " | ".join(table.columns) + " |"
    rule = "| " + " | ".join(["---"] + ["---:"] * (len(table.columns) - 1)) + " |"
    return "\n".join([heading, rule, *("| " + " | ".join(row) + " |" for row in table.rows)])


def main(folder: Path, page: Path) -> None:
    """Bring the page up to date with the results."""
    page.write_text(updated(page.read_text(), read_results(folder)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
