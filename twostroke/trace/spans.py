"""The spans of a window of steps: what each row of a timeline shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median_low

from ..device.step_times import PHASES, StepTimes, gap_parts

ROWS = CPU, H2D, COMPUTE, D2H = "CPU", "H2D", "compute", "D2H"

COPY, STEP = "copy", "step"


@dataclass(frozen=True)
class Span:
    """A stretch of time on one row. Those of one row do not overlap.

    Attributes:
        row: of `ROWS`.
        kind: of the CPU, a phase; of a copy row, `copy`; of the compute row, `step`, or `idle: ` and the cause.
        step: the step's number; for an idle stretch, the step that was waited for.
        begin, end: host times, seconds.
    """

    row: str
    kind: str
    step: int
    begin: float
    end: float

    @property
    def idle(self) -> bool:
        return self.kind.startswith(IDLE)

    @property
    def cause(self) -> str:
        """What an idle stretch waited for."""
        return self.kind.removeprefix(IDLE)

    @property
    def name(self) -> str:
        return self.kind if self.idle else f"{self.kind} {self.step}"


IDLE = "idle: "


def spans_of(window: Sequence[StepTimes]) -> list[Span]:
    """The spans of consecutive steps, without the gap before the first.

    All device times are shifted by one skew, so that spans of the device stay in order where the skew changed.
    """
    skew = median_low(times.skew for times in window)
    spans = []
    for place, times in enumerate(window):
        spans += _cpu(times) + _device(times, skew)
        if place:
            spans += _idle(replace(times, skew=skew))
    return spans


def _cpu(times: StepTimes) -> list[Span]:
    phases = [(phase, getattr(times, phase)) for phase in PHASES]
    return [Span(CPU, phase, times.step, *span) for phase, span in phases if span is not None]


def _device(times: StepTimes, skew: float) -> list[Span]:
    rows = ((H2D, COPY, times.h2d), (COMPUTE, STEP, times.compute), (D2H, COPY, times.d2h))
    return [Span(row, kind, times.step, span[0] + skew, span[1] + skew) for row, kind, span in rows if span is not None]


def _idle(times: StepTimes) -> list[Span]:
    return [
        Span(COMPUTE, IDLE + cause, times.step, begin, end) for cause, begin, end in gap_parts(times) if begin < end
    ]
