"""Tables for people: drawn on a terminal, plain columns elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

PLAIN_WIDTH = 200
"""Columns where there is no terminal to ask: wide enough that no cell is folded."""


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print `rows` under `columns`; all but the first column are set flush right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    table = Table(box=box.ROUNDED if console.is_terminal else None, pad_edge=console.is_terminal)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table, markup=False, highlight=False)
