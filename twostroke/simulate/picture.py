"""Reports as a picture, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InvalidConfig
from .report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_POINTS = 2000
"""Of a curve."""


def require_matplotlib(name: str) -> None:
    """Raise `InvalidConfig` if there is nothing to draw `name` with."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InvalidConfig(f"{name} needs matplotlib: pip install 'twostroke[profile]'") from error


def write_picture(reports: Sequence[tuple[str, Report]], price: float, path: Path) -> None:
    """Draw how long requests waited, throughput and cost, of each labelled report."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 7.5), layout="constrained")
    (first, inter), (speed, cost) = figure.subplots(2, 2)
    labels = [label for label, _ in reports]
    for label, report in reports:
        waits = report.measures.times_to_first_token()
        _draw_shares(first, waits, np.ones(len(waits)), label)
        _draw_shares(inter, np.array(report.measures.gaps), np.array(report.measures.gap_counts), label)
    _finish(first, "time to first token, ms", "share of requests")
    _finish(inter, "time from token to token, ms", "share of tokens")
    if first.lines:
        first.legend(fontsize=8)
    speed.bar(labels, [report.tokens_per_s for _, report in reports], color="#2f6fb5")
    _finish(speed, "", "output tokens/s")
    cost.bar(labels, [report.cost_per_million(price) for _, report in reports], color="#c8742a")
    _finish(cost, "", f"$ per million output tokens, ${price:g} per hour")
    figure.savefig(path, dpi=120)


def _draw_shares(axes: Axes, values: np.ndarray, counts: np.ndarray, label: str) -> None:
    """The share of all that does not exceed each value."""
    if not len(values):
        return
    order = np.argsort(values, kind="stable")
    shares = np.cumsum(counts[order]) / counts.sum()
    shown = np.unique(np.linspace(0, len(order) - 1, min(len(order), MOST_POINTS)).astype(int))
    axes.step(1e3 * values[order][shown], shares[shown], where="post", label=label, linewidth=1.3)


def _finish(axes: Axes, x: str, y: str) -> None:
    if x:
        axes.set_xscale("log")
        axes.set_ylim(0, 1.02)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#d0d7de", linewidth=0.5)
    axes.set_axisbelow(True)
