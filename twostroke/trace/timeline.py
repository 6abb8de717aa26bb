"""A few steps of each loop on one time scale: what both pictures draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from statistics import median

from .profile import Profile
from .spans import COMPUTE, CPU, D2H, H2D, STEP, Span, spans_of

STEPS_SHOWN = 3

PLACES = {CPU: 0.0, H2D: 1.0, COMPUTE: 2.3, D2H: 3.3}
"""Where the middle of a row is, from the top, in rows: above `compute` is room for the labels of idle stretches."""

NAMED_SHARE = 0.15
"""A cause is named where this share of an idle stretch is its."""

VISIBLE_SHARE = 0.002
"""An idle stretch is labelled where it is this share of the panel's width."""


@dataclass(frozen=True)
class Panel:
    """The rows of one loop.

    Attributes:
        title: the loop, and how its whole run went.
        spans: begin and end in seconds from the panel's left edge, cut off at its edges.
        seconds: the panel's width; the same for all panels of a picture.
    """

    title: str
    spans: Sequence[Span]
    seconds: float

    def gaps(self) -> list[Span]:
        """The idle stretches wide enough to label, and not cut off; their kind names the main causes, longest first."""
        idle = sorted((span for span in self.spans if span.idle), key=lambda span: (span.step, span.begin))
        gaps = [_whole(list(parts)) for _, parts in groupby(idle, key=lambda span: span.step)]
        return [gap for gap in gaps if gap.end < self.seconds and gap.end - gap.begin >= VISIBLE_SHARE * self.seconds]


def make_panels(profiles: Sequence[Profile], steps: int = STEPS_SHOWN) -> list[Panel]:
    """Return a panel per profile, each as wide as `steps` steps of the slowest loop take.

    Of all places where a panel could begin, it takes the one with the median idle time: neither the best nor the worst.
    """
    shown = {profile.loop: spans_of(profile.window) for profile in profiles}
    seconds = max(_period(spans) for spans in shown.values()) * min(steps, *(len(p.window) - 1 for p in profiles))
    return [Panel(_title(profile), _cut(shown[profile.loop], seconds), seconds) for profile in profiles]


def show_seconds(seconds: float) -> str:
    """A duration as people read it."""
    return f"{1e6 * seconds:.0f} µs" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"


def _whole(parts: list[Span]) -> Span:
    begin, end = parts[0].begin, parts[-1].end
    longest = sorted(parts, key=lambda part: part.begin - part.end)
    named = [part.cause for part in longest if part.end - part.begin >= NAMED_SHARE * (end - begin)]
    return replace(parts[0], kind=" + ".join(dict.fromkeys(named)), begin=begin, end=end)


def _period(spans: Sequence[Span]) -> float:
    """The median time from the begin of one step to the begin of the next."""
    begins = [span.begin for span in spans if span.kind == STEP]
    return median(after - before for before, after in pairwise(begins))


def _cut(spans: Sequence[Span], seconds: float) -> list[Span]:
    begins = [span.begin for span in spans if span.kind == STEP]
    last = max(begins[0], max(span.end for span in spans if span.row == COMPUTE) - seconds)
    cuts = [_between(spans, begin, seconds) for begin in begins if begin <= last]
    return sorted(cuts, key=_idle_seconds)[len(cuts) // 2]


def _idle_seconds(spans: Sequence[Span]) -> float:
    return sum(span.end - span.begin for span in spans if span.idle)


def _between(spans: Sequence[Span], begin: float, seconds: float) -> list[Span]:
    moved = (replace(span, begin=span.begin - begin, end=span.end - begin) for span in spans)
    return [
        replace(span, begin=max(span.begin, 0.0), end=min(span.end, seconds))
        for span in moved
        if span.begin < seconds and span.end > 0
    ]


def _title(profile: Profile) -> str:
    total = profile.busy + sum(profile.idle.values()) - profile.idle["nothing"]
    causes = sorted(((1e2 * seconds / total, cause) for cause, seconds in profile.idle.items()), reverse=True)
    shown = ", ".join(f"{cause} {share:.1f}%" for share, cause in causes if cause != "nothing" and share >= 0.05)
    idle = f"idle {100 * (1 - profile.active):.1f}% of the run" + (f" ({shown})" if shown else "")
    return f"{profile.loop} loop: compute active {100 * profile.active:.1f}%, {idle}"
