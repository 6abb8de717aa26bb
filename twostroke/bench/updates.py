"""New weights while a workload runs: how often, and for how long the device pauses for them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from statistics import median
from typing import TYPE_CHECKING, Any

from .measure import Measured, measure

if TYPE_CHECKING:
    import torch

    from ..device.step_times import StepTimes
    from ..engine import Engine
    from ..sampling_params import SamplingParams
    from ..text.output import RequestOutput


class Updates:
    """Replaces an engine's weights about every so many steps, from a thread of its own, while it is entered.

    It is the engine's `Activity.window` meanwhile: told of every step by the loop, it need not ask how far that is.

    Attributes:
        after: times of the steps ahead of which weights were written while there was work.
    """

    def __init__(self, engine: Engine, weights: Mapping[str, torch.Tensor], every: int) -> None:
        self.after: list[StepTimes] = []
        self._engine = engine
        self._weights = weights
        self._every = every
        self._steps = 0
        self._over = False
        self._lock = threading.Lock()  # of `_over`: once it is set, nothing more is submitted
        self._thread = ThreadPoolExecutor(1, "twostroke-updates")
        self._updates: list[Future[int]] = []

    def append(self, times: StepTimes) -> None:
        """Count a step; those that were in flight at the end still come, and count no more."""
        with self._lock:
            if self._over:
                return
            if times.writes and not times.rested:
                self.after.append(times)
            self._steps += 1
            if self._steps % self._every == 0:
                self._updates.append(self._thread.submit(self._engine.update_weights, self._weights))

    def __enter__(self) -> Updates:
        self._engine._parts.runner.activity.window = self
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Wait for the update under way.

        Raises:
            TwostrokeError: one failed, and no other exception is under way.
        """
        self._engine._parts.runner.activity.window = None
        with self._lock:
            self._over = True
        self._thread.shutdown(cancel_futures=True)
        for update in self._updates:
            if kind is None and not update.cancelled():
                update.result()


def measure_updates(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    weights: Mapping[str, torch.Tensor],
    every: int,
) -> tuple[Measured, dict[str, Any]]:
    """Measure a run in which `weights` are written over the engine's about every so many steps.

    Returns:
        What `measure` gives, and the further figures: the number of updates; the pause of each, milliseconds from the
        end of a step to the begin of the next one on the compute stream, and what the writing takes of it; the share of
        the working time in which the stream ran a step or wrote weights, in percent; `seconds` less the pauses; samples
        that were preempted; and whether the weight versions of the outputs are those of the updates.
    """
    before, first = engine.stats(), engine.weight_version
    with Updates(engine, weights, every) as updates:
        measured = measure(engine, prompts, params)
        after = engine.stats()
    written = [1e3 * sum(ended - began for began, ended in times.writes) for times in updates.after]
    pauses = [1e3 * times.gap for times in updates.after]
    busy = after.busy_seconds - before.busy_seconds
    working = busy + after.gap_seconds - before.gap_seconds
    return measured, {
        "updates": len(pauses),
        "pause_p50_ms": median(pauses) if pauses else None,
        "pause_max_ms": max(pauses, default=None),
        "write_p50_ms": median(written) if written else None,
        "write_max_ms": max(written, default=None),
        "active_or_writing_percent": 100 * (busy + 1e-3 * sum(written)) / working,
        "seconds_less_pauses": measured.seconds - 1e-3 * sum(pauses),
        "preemptions": after.preemptions - before.preemptions,
        "versions_fit": versions_fit(measured.outputs, first, sum(len(times.writes) for times in updates.after)),
        "pauses_ms": pauses,
        "writes_ms": written,
    }


def versions_fit(outputs: Sequence[RequestOutput], first: int, updates: int) -> bool:
    """Whether each output has consecutive versions for all its tokens, and all have those from `first` on, no other."""
    seen: set[int] = set()
    for output in outputs:
        versions = [version for version, _ in output.weight_versions]
        if versions != list(range(versions[0], versions[-1] + 1)):
            return False
        if sum(count for _, count in output.weight_versions) != len(output.token_ids):
            return False
        seen.update(versions)
    return seen == set(range(first, first + updates + 1))
