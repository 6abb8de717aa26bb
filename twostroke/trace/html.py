"""The timeline as one HTML page without outside assets, light or dark as the reader's system is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from .colors import CAUSE_COLORS, PHASE_COLORS, STEP_COLORS, color_of
from .spans import COMPUTE, COPY, D2H, Span
from .timeline import PLACES, Panel, show_seconds

LEFT, WIDTH, RIGHT = 70, 1080, 30
TOP, ROW, BAR = 16, 46, 26
"""Pixels: the names of the rows, the time axis, half of its last number; above the first row, a row, and its bar."""

CHARACTER = 6.2
"""Pixels of a character of a label."""

STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --text: #1f2328; --faint: #59636e; --line: #d1d9e0;
  --idle: #b3122b; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #0d1117; --text: #e6edf3; --faint: #9198a1; --line: #30363d; --idle: #ff8182; }
}
body { background: var(--ground); color: var(--text); font: 14px/1.4 system-ui, sans-serif; margin: 24px; }
h1 { font-size: 20px; } h2 { font-size: 15px; margin: 20px 0 4px; }
svg { display: block; max-width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: var(--text); }
svg .name { fill: #ffffff; text-anchor: middle; pointer-events: none; }
svg .idle { fill: var(--idle); font-size: 11px; text-anchor: middle; pointer-events: none; }
svg .tick { fill: var(--faint); text-anchor: middle; } svg line { stroke: var(--line); }
rect.span { stroke: var(--ground); stroke-width: 0.5; } rect.copy { stroke: none; }
rect.span:hover { stroke: var(--text); stroke-width: 1.5; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin-top: 16px; color: var(--faint); }
.legend i { display: inline-block; width: 14px; height: 14px; margin-right: 6px; vertical-align: -2px; }
#tip { position: fixed; display: none; padding: 4px 8px; border: 1px solid var(--line); border-radius: 4px;
  background: var(--ground); color: var(--text); pointer-events: none; white-space: nowrap; }
"""

SCRIPT = """
const tip = document.getElementById("tip");
document.addEventListener("mousemove", (event) => {
  const text = event.target.dataset ? event.target.dataset.tip : undefined;
  tip.style.display = text ? "block" : "none";
  if (!text) return;
  tip.textContent = text;
  tip.style.left = Math.max(0, Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = event.clientY + 14 + "px";
});
"""


def write_html(panels: Sequence[Panel], path: Path) -> None:
    """Write the panels one above the other on one time scale; a span under the mouse tells its times."""
    body = "".join(f"<h2>{escape(panel.title)}</h2>{_svg(panel)}" for panel in panels)
    path.write_text(
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>twostroke timeline</title>'
        f"<style>{STYLE}</style></head><body><h1>Timeline</h1>{body}{_legend()}"
        f'<div id="tip"></div><script>{SCRIPT}</script></body></html>\n',
        encoding="utf-8",
    )


def _svg(panel: Panel) -> str:
    bottom = TOP + ROW * (PLACES[D2H] + 1)
    parts = [_ticks(panel, bottom)]
    parts += [f'<text x="0" y="{_middle(row) + 4}">{row}</text>' for row in PLACES]
    parts += [_bar(span, panel.seconds) for span in panel.spans]
    parts += [_idle_label(gap, panel.seconds) for gap in panel.gaps()]
    width = LEFT + WIDTH + RIGHT
    return f'<svg viewBox="0 0 {width} {bottom + 24}" width="{width}" role="img">{_hatches()}{"".join(parts)}</svg>'


def _hatches() -> str:
    """A pattern per cause; pages may define the same one twice."""
    return "".join(
        f'<pattern id="{cause}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="6" height="6" fill="{color}" fill-opacity="0.25"/><rect width="2.4" height="6" fill="{color}"/>'
        "</pattern>"
        for cause, color in CAUSE_COLORS.items()
    )


def _middle(row: str) -> float:
    return TOP + ROW * (PLACES[row] + 0.5)


def _x(seconds: float, panel_seconds: float) -> float:
    return LEFT + WIDTH * seconds / panel_seconds


def _bar(span: Span, panel_seconds: float) -> str:
    left, right = _x(span.begin, panel_seconds), _x(span.end, panel_seconds)
    fill = f"url(#{span.cause})" if span.idle else color_of(span)
    tip = f"{span.row}: {span.name}, {show_seconds(span.end - span.begin)}, at {1e3 * span.begin:.3f} ms"
    least, kind = (1.5, "span copy") if span.kind == COPY else (0.5, "span")
    bar = (
        f'<rect class="{kind}" x="{left:.2f}" y="{_middle(span.row) - BAR / 2}" width="{max(right - left, least):.2f}" '
        f'height="{BAR}" fill="{fill}" data-tip="{escape(tip)}"/>'
    )
    if span.idle or right - left < CHARACTER * len(span.name):
        return bar
    return f'{bar}<text class="name" x="{(left + right) / 2:.1f}" y="{_middle(span.row) + 4}">{span.name}</text>'


def _idle_label(gap: Span, panel_seconds: float) -> str:
    x = _x((gap.begin + gap.end) / 2, panel_seconds)
    y = _middle(COMPUTE) - BAR / 2
    return (
        f'<text class="idle" x="{x:.1f}" y="{y - 14}">idle {show_seconds(gap.end - gap.begin)}</text>'
        f'<text class="idle" x="{x:.1f}" y="{y - 3}">{gap.kind}</text>'
    )


def _ticks(panel: Panel, bottom: float) -> str:
    lines = []
    for seconds in _round_times(panel.seconds):
        x = _x(seconds, panel.seconds)
        lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
        lines.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 16}">{1e3 * seconds:g} ms</text>')
    return "".join(lines)


def _round_times(seconds: float) -> list[float]:
    """About ten times from 0 on, 1, 2 or 5 times a power of ten apart."""
    power = 10.0 ** math.floor(math.log10(seconds / 10))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * 10 >= seconds)
    return [round(step * place, 9) for place in range(math.floor(seconds / step + 1e-6) + 1)]


def _legend() -> str:
    fills = dict(PHASE_COLORS) | dict(zip(("even step", "odd step"), STEP_COLORS, strict=True))
    fills |= {
        f"idle: {cause}": f"repeating-linear-gradient(45deg, {color} 0 2px, {color}40 2px 5px)"
        for cause, color in CAUSE_COLORS.items()
    }
    items = "".join(f'<span><i style="background: {fill}"></i>{name}</span>' for name, fill in fills.items())
    return f'<div class="legend">{items}</div>'
