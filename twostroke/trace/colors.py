"""The colors of a timeline, by the kind of a span."""

from __future__ import annotations

from .spans import COPY, STEP, Span

PHASE_COLORS = {
    "plan": "#8250df",
    "fill": "#bf3989",
    "queue": "#d4a72c",
    "wait": "#b8bec5",
    "commit": "#1b7c83",
}
STEP_COLORS = ("#2f6fdb", "#2da44e")
"""Steps take them in turn, and so do their copies."""

CAUSE_COLORS = {
    "plan": "#cf222e",
    "h2d": "#fb8f44",
    "commit": "#e16f8c",
    "launch": "#57606a",
    "capture": "#8a4600",
    "weights": "#0a7d91",
    "nothing": "#8c959f",
}


def color_of(span: Span) -> str:
    """The color of a span, #rrggbb."""
    if span.idle:
        return CAUSE_COLORS[span.cause]
    return STEP_COLORS[span.step % 2] if span.kind in (STEP, COPY) else PHASE_COLORS[span.kind]
