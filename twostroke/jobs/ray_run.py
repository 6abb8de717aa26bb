"""The run of a batch on a Ray cluster: engines anywhere in it, the output and its journal here."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.data import DataContext
from ray.exceptions import RayError

from ..errors import EngineDead, InvalidConfig, counted
from ..openai.errors import ApiError
from .answered import Answered
from .batch_input import BatchInput, Survey
from .batch_output import BatchOutput
from .ray import answer
from .ray_input import input_dataset


@dataclass(frozen=True)
class RayRun:
    """One run.

    Attributes:
        address: of the cluster, which this machine must be a part of; `auto` finds it.
        engines: how many at most; None: one for each GPU that the cluster has now, or one without GPUs.
        engine: arguments of `Engine`.
        model_name: what lines call the model.
        on_error: called with the number of a line that failed, and why.
    """

    address: str
    engines: int | None
    engine: Mapping[str, Any]
    model_name: str
    on_error: Callable[[int, ApiError], None]
    _active: dict[str, float] = field(default_factory=dict, init=False)

    def active(self) -> float | None:
        """Share of the working time in which devices ran steps, the mean of the engines; None before their answers."""
        return sum(self._active.values()) / len(self._active) if self._active else None

    def run(self, source: BatchInput, survey: Survey, output: BatchOutput, on_change: Callable[[], None]) -> None:
        """Answer what the output does not have yet.

        Args:
            on_change: called after each change of the output's totals.

        Raises:
            InvalidConfig: an argument of the engine was refused, or the cluster is too small.
            EngineDead: the cluster cannot go on.
            OSError: the cluster is not there, or the output cannot be written.
        """
        with self._connected():
            done = bytearray(survey.last + 1)
            lines, count = input_dataset(source, survey, output.state), self._count()
            answered = answer(
                lines,
                engines=(1, count),
                gpus=self._gpus_of_engine,
                model_name=self.model_name,
                duplicates=survey.duplicates,
                **self._arguments,
            )
            for block in answered.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
                for row in block.to_pylist():
                    self._hear(row.pop("engine"), row.pop("active"), count)
                    if self._take(Answered(**row | {"text": row["text"].encode()}), output, done):
                        on_change()
                output.flush()

    def _hear(self, engine: str, active: float, count: int) -> None:
        """Note how active an engine is; of more than there can be, the one not heard of for longest is gone."""
        self._active.pop(engine, None)
        self._active[engine] = active
        if len(self._active) > count:
            del self._active[next(iter(self._active))]

    def _take(self, answered: Answered, output: BatchOutput, done: bytearray) -> bool:
        """Add an answer, unless Ray gave it before: what it tries again may have been done already."""
        if done[answered.line]:
            return False
        done[answered.line] = 1
        output.add(answered)
        if answered.failed:
            self.on_error(answered.line, _error(answered))
        return True

    @property
    def _arguments(self) -> dict[str, Any]:
        """Those of the engine, for processes whose working folder is another one."""
        given = dict(self.engine)
        if (model := given.get("model")) is not None and os.path.exists(model):
            given["model"] = os.path.abspath(model)
        return given

    @property
    def _gpus_of_engine(self) -> float:
        return 0.0 if str(self.engine.get("device", "auto")).startswith("cpu") else 1.0

    def _count(self) -> int:
        """How many engines there shall be; what the cluster can never run would wait for ever."""
        there = ray.cluster_resources()
        cpus, gpus = there.get("CPU", 0), int(there.get("GPU", 0))
        if self.engines is None and self._gpus_of_engine and not gpus:
            raise InvalidConfig(
                f"device={self.engine.get('device', 'auto')!r}: the Ray cluster has no GPU; device='cpu' does without"
            )
        count = self.engines or (gpus if self._gpus_of_engine else 1)
        if count >= cpus:
            raise InvalidConfig(
                f"engines={count} would leave nothing of the Ray cluster's {counted(int(cpus), 'CPU')}, "
                "and lines need one too"
            )
        return count

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Be connected to the cluster; a connection that is there already stays."""
        ours = not ray.is_initialized()
        try:
            if ours:
                ray.init(self.address, log_to_driver=False, logging_level=logging.WARNING)
            DataContext.get_current().enable_progress_bars = False
            yield
        except RayError as error:
            raise EngineDead(f"the engines on Ray ended: {type(error).__name__}: {error}") from error
        finally:
            if ours:
                ray.shutdown()


def _error(answered: Answered) -> ApiError:
    told = json.loads(answered.text)["error"]
    return ApiError(told["status_code"], told["message"], param=told["param"], code=told["code"])
