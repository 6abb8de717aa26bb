"""The timeline as a PNG, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import TwostrokeError
from .colors import CAUSE_COLORS, PHASE_COLORS, STEP_COLORS, color_of
from .spans import COMPUTE, COPY, D2H, Span
from .timeline import PLACES, Panel, show_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, PANEL_HEIGHT, LEGEND_HEIGHT = 14.0, 2.9, 0.8
"""Inches."""

BAR = 0.62
"""Height of a bar; rows are 1 apart."""

CHARACTER = 0.0075
"""Width of a character of a label, as a share of the panel's width."""


class MissingPackage(TwostrokeError):
    """Drawing a PNG needs matplotlib, which is not installed."""


def write_png(panels: Sequence[Panel], path: Path) -> None:
    """Draw the panels one above the other on one time scale.

    Raises:
        MissingPackage: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackage(f"{path.name} needs matplotlib: pip install 'twostroke[profile]'") from error
    figure = Figure(figsize=(WIDTH, LEGEND_HEIGHT + PANEL_HEIGHT * len(panels)), layout="constrained")
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, panel in zip(all_axes, panels, strict=True):
        _draw(axes, panel)
    all_axes[-1].set_xlabel("ms")
    _legend(figure, panels)
    figure.savefig(path, dpi=120)


def _draw(axes: Axes, panel: Panel) -> None:
    for span in panel.spans:
        _draw_span(axes, span, panel.seconds)
    for gap in panel.gaps():
        place = 1e3 * (gap.begin + gap.end) / 2, PLACES[COMPUTE] - BAR / 2 - 0.04
        label = f"idle {show_seconds(gap.end - gap.begin)}\n{gap.kind}"
        axes.text(*place, label, ha="center", va="bottom", fontsize=7.5, color="#a40e26", linespacing=1.0)
    axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold")
    axes.set_yticks(list(PLACES.values()), list(PLACES))
    axes.set_ylim(PLACES[D2H] + 0.5, -0.5)
    axes.set_xlim(0, 1e3 * panel.seconds)
    axes.tick_params(left=False, labelbottom=True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color="#d0d7de", linewidth=0.5)
    axes.set_axisbelow(True)


def _draw_span(axes: Axes, span: Span, seconds: float) -> None:
    begin, length = 1e3 * span.begin, 1e3 * (span.end - span.begin)
    style: dict[str, Any] = {"facecolor": color_of(span), "edgecolor": "white", "linewidth": 0.4}
    if span.kind == COPY:  # often too short to be seen without an edge
        style |= {"edgecolor": color_of(span), "linewidth": 1.0}
    if span.idle:
        style |= {"facecolor": "white", "edgecolor": color_of(span), "hatch": "//////", "linewidth": 0.6}
    row = PLACES[span.row]
    axes.broken_barh([(begin, length)], (row - BAR / 2, BAR), **style)
    if not span.idle and (span.end - span.begin) / seconds > CHARACTER * len(span.name):
        axes.text(begin + length / 2, row, span.name, ha="center", va="center", fontsize=8, color="white")


def _legend(figure: Any, panels: Sequence[Panel]) -> None:
    from matplotlib.patches import Patch

    seen = {span.cause for panel in panels for span in panel.spans if span.idle}
    patches = [Patch(facecolor=color, label=phase) for phase, color in PHASE_COLORS.items()]
    patches += [
        Patch(facecolor=color, label=name) for name, color in zip(("even step", "odd step"), STEP_COLORS, strict=True)
    ]
    patches += [
        Patch(facecolor="white", edgecolor=color, hatch="//////", label=f"idle: {cause}")
        for cause, color in CAUSE_COLORS.items()
        if cause in seen
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False)
