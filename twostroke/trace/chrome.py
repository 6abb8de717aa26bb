"""A trace in the Trace Event Format, which chrome://tracing and Perfetto open.

Source of the format: the "Trace Event Format" document of the Chromium project: complete events (`X`) with `ts` and
`dur` in microseconds, and metadata events (`M`) that name processes and threads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .profile import Profile
from .spans import ROWS, Span, spans_of

COLORS = {"idle": "terrible", "wait": "grey"}


def write_chrome_trace(profiles: Sequence[Profile], path: Path) -> None:
    """Write the windows of all profiles: a loop is a process, a row a thread; each loop begins at 0."""
    events: list[dict[str, Any]] = []
    for pid, profile in enumerate(profiles, 1):
        spans = spans_of(profile.window)
        start = min(span.begin for span in spans)
        events += _names(pid, profile.loop)
        events += [_event(pid, span, start) for span in spans]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _names(pid: int, loop: str) -> list[dict[str, Any]]:
    events = [
        _metadata(pid, 0, "process_name", name=f"{loop} loop"),
        _metadata(pid, 0, "process_sort_index", sort_index=pid),
    ]
    for tid, row in enumerate(ROWS, 1):
        events.append(_metadata(pid, tid, "thread_name", name=row))
        events.append(_metadata(pid, tid, "thread_sort_index", sort_index=tid))
    return events


def _metadata(pid: int, tid: int, kind: str, **arguments: object) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": arguments}


def _event(pid: int, span: Span, start: float) -> dict[str, Any]:
    event = {
        "ph": "X",
        "pid": pid,
        "tid": 1 + ROWS.index(span.row),
        "name": span.name,
        "cat": "idle" if span.idle else span.kind,
        "ts": 1e6 * (span.begin - start),
        "dur": 1e6 * (span.end - span.begin),
        "args": {"step": span.step},
    }
    color = COLORS.get(str(event["cat"]))
    return event | {"cname": color} if color else event
