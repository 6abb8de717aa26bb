"""The times of one step, and why the compute stream idled before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CAUSES = ("plan", "h2d", "commit", "launch", "capture", "weights", "nothing")
PLAN, H2D, COMMIT, LAUNCH, CAPTURE, WEIGHTS, NOTHING = CAUSES
"""What the compute stream waited for, or wrote between two steps, see `gap_parts`."""

PHASES = ("plan", "fill", "queue", "wait", "commit")
"""What the CPU does for a step: `Scheduler.plan`; `Slot.fill`; handing the work to the streams; waiting for the output;
`Scheduler.commit` with delivery."""

Span = tuple[float, float]
"""Begin and end, in seconds."""


@dataclass(slots=True)
class StepTimes:
    """When everything of a step happened, in seconds.

        CPU      | plan | fill | queue |        wait        | commit |
        H2D                       | h2d |
        compute   ------ gap ----------- | compute |
        D2H                                        | d2h |

    Host times are those of `time.perf_counter`. The device's times are on its meter's clock: the same on the CPU; on
    CUDA it may be off by `skew`, see `Activity`.

    Attributes:
        step: its number. lanes, prompt_tokens: of its plan.
        rested: there was nothing to do before it.
        free_at: host time from which the CPU could plan it: the end of the commit or launch before it; if `rested`, the
            begin of its plan.
        plan, fill, queue, wait, commit: phases of the CPU.
        queued_at: host time, within `queue`, at which the step's input was on its way.
        captures: when graphs were captured since the last launch, host times.
        writes: when new weights were written since the step before it, device times.
        arrived_at: device time at which the input was on the device.
        compute: the step itself, device times. gap: seconds from the end of the step before it.
        skew: what to add to device times to get host times.
        h2d, d2h: the copies, device times; None unless they were metered.
    """

    step: int
    lanes: int
    prompt_tokens: int
    rested: bool
    free_at: float
    plan: Span
    fill: Span
    queue: Span
    queued_at: float
    captures: tuple[Span, ...] = ()
    writes: tuple[Span, ...] = ()
    wait: Span = (0.0, 0.0)
    commit: Span | None = None
    arrived_at: float = 0.0
    compute: Span = (0.0, 0.0)
    gap: float = 0.0
    skew: float = 0.0
    h2d: Span | None = None
    d2h: Span | None = None


def gap_parts(times: StepTimes) -> list[tuple[str, float, float]]:
    """Split the gap before a step by what it waited for: (cause, begin, end), host times, some of them empty.

    A step begins late because its launch came after the end of the step before it. So the gap is cut where the CPU's
    work for this step began (`free_at`), where its input was on its way (`queued_at`), and where that arrived:

        step N - 1 |   commit    |          plan           |    h2d     |    launch     | step N
                   | output to   | commands, plan, fill,   | copy of    | the device's  |
                   | CPU, commit | hand-over               | the input  | own way       |
                                 free_at                   queued_at    arrived_at

    If there was nothing to do, the part up to the plan is `nothing` in place of `commit`: without requests a commit
    holds up nobody. Time in which a graph was captured is `capture` wherever it falls, and that in which the stream
    wrote new weights is `weights`. Where the CPU was early, parts are empty; where the input was there before step
    N - 1 ended, all that is left is `launch`, the way from one step to the next on the device, which may lead past
    copies that the step waits for (`Plan.after`).
    """
    end = times.compute[0] + times.skew
    start = end - times.gap
    planning = min(max(times.free_at, start), end)
    copying = min(max(times.queued_at, planning), end)
    arrived = min(max(times.arrived_at + times.skew, copying), end)
    before = NOTHING if times.rested else COMMIT
    parts = [(before, start, planning), (PLAN, planning, copying), (H2D, copying, arrived), (LAUNCH, arrived, end)]
    if times.captures:
        parts = _cut_out(parts, CAPTURE, times.captures)
    if times.writes:
        parts = _cut_out(parts, WEIGHTS, [(began + times.skew, ended + times.skew) for began, ended in times.writes])
    return parts


def _cut_out(
    parts: list[tuple[str, float, float]], other: str, spans: Sequence[Span]
) -> list[tuple[str, float, float]]:
    """Give what lies in `spans`, in their order, to another cause."""
    cut = []
    for cause, start, end in parts:
        for began, ended in spans:
            low, high = max(start, began), min(end, ended)
            if low < high:
                cut += [(cause, start, low), (other, low, high)]
                start = high
        cut.append((cause, start, end))
    return cut
