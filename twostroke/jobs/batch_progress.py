"""The progress bar of a batch."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..stderr import stderr_console
from .batch_output import BatchOutput

SECONDS_PER_HOUR = 3600


class BatchProgress:
    """Shows on stderr how far a batch is, how fast it goes, and what it has cost so far.

    Args:
        active: gives the share of the working time in which devices ran steps, None while that is not known.
        total: requests, those of earlier runs included.
        price: of an hour, in dollars; 0 is not shown.
        shown: None: if stderr is a terminal.
    """

    def __init__(
        self,
        active: Callable[[], float | None],
        output: BatchOutput,
        total: int,
        price: float,
        shown: bool | None,
    ) -> None:
        self._active = active
        self._output = output
        self._price = price
        self._tokens = output.totals.completion_tokens
        self._began = time.perf_counter()
        self._bar = None
        if (console := stderr_console(shown)) is not None:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[rates]}"))
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task("requests", total=total, completed=output.totals.requests, rates="")

    def show(self) -> None:
        """Show the present state."""
        if self._bar is not None:
            self._bar.update(self._task, completed=self._output.totals.requests, rates=self._rates())

    def _rates(self) -> str:
        tokens = self._output.totals.completion_tokens - self._tokens
        speed = tokens / (time.perf_counter() - self._began)
        rates = [f"{speed:.0f} tokens/s"]
        if (active := self._active()) is not None:
            rates.append(f"device active {active:.1%}")
        if self._price:
            rates.append(f"${cost(self._output.seconds, self._price):.2f}")
        return ", ".join(rates)

    def __enter__(self) -> BatchProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def cost(seconds: float, price: float) -> float:
    """What `seconds` cost at `price` an hour."""
    return seconds / SECONDS_PER_HOUR * price
