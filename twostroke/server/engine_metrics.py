"""Metrics of the engine, read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..device.step_times import CAUSES, NOTHING, PHASES
from .board import Board

HOURS = 24.0
"""Of a day."""


class _Counted(NamedTuple):
    """A counter: its name, what it is, and the stats that it sums, or the mapping of stats that gives its values."""

    name: str
    text: str
    sums: tuple[str, ...]
    label: str | None = None


COUNTERS = (
    _Counted("generation_tokens", "Tokens that were sampled.", ("generated_tokens",)),
    _Counted("prompt_tokens", "Tokens of prompts that were computed.", ("prompt_tokens",)),
    _Counted("prefix_cache_queries", "Tokens looked up in the prefix cache.", ("prefix_hit_tokens", "prompt_tokens")),
    _Counted("prefix_cache_hits", "Those of them that were found.", ("prefix_hit_tokens",)),
    _Counted("num_preemptions", "Times that a sample was put back.", ("preemptions",)),
    _Counted("engine_steps", "Steps.", ("steps",)),
    _Counted("gpu_busy_seconds", "Time in which the compute stream ran a step.", ("busy_seconds",)),
    _Counted("gpu_idle_seconds", "Time in which it did not, by what it waited for.", ("idle_by_cause",), "cause"),
    _Counted("cpu_seconds", "Time of the loop's thread by phase.", ("cpu_seconds",), "phase"),
)
"""What the engine counts since its start. They are made from `EngineStats`."""

_LABELS: Mapping[str | None, tuple[str, ...]] = {None: ("",), "cause": CAUSES, "phase": PHASES}

_KEYS = tuple((counted.name, label) for counted in COUNTERS for label in _LABELS[counted.label])
"""The names and labels of the counters, in their order on a board."""

_BORN, _BEFORE, _TOTALS = 0, 1, 1 + len(_KEYS)
"""Where there stand on a board, for all API processes: which engine was looked at last, and of each counter what the
engines before it had counted, and what it is now."""

SHARED_NUMBERS = _TOTALS + len(_KEYS)


class EngineMetrics(Collector):
    """What is known of the engine.

    Counters go on where another engine takes the place of one that died, whichever API process is asked.

    Args:
        prefix: of all names.
        board: where the counters stand.
    """

    def __init__(self, prefix: str, model_name: str, gpu_price: float | None, board: Board) -> None:
        self._prefix = prefix
        self._model_name = model_name
        self._price = gpu_price
        self._board = board
        self._usable_blocks = 1
        self._stats: Mapping[str, Any] = {}

    def update(self, born: float, usable_blocks: int, stats: Mapping[str, Any]) -> None:
        """Take in a look at an engine.

        Args:
            born: when it started, see `wire.Ready`. usable_blocks: of its cache.
            stats: `EngineStats`, as a dict.
        """
        self._usable_blocks = usable_blocks
        self._stats = stats
        numbers = self._board.shared
        with self._board.locked():
            if born > numbers[_BORN]:
                numbers[_BORN] = born
                numbers[_BEFORE:_TOTALS] = numbers[_TOTALS:SHARED_NUMBERS]
            elif born < numbers[_BORN]:  # another process has seen the next one already
                return
            for place, value in enumerate(_counts(stats)):
                # NOTE: the seconds of rest are measured up to now, and again when they are over: never count backwards.
                numbers[_TOTALS + place] = max(numbers[_TOTALS + place], numbers[_BEFORE + place] + value)

    def lost(self) -> None:
        """There is no engine now."""
        self._stats = {}

    def collect(self) -> Iterator[Metric]:
        stats, blocks = self._stats, self._usable_blocks
        yield self._gauge("engine_up", "1 while there is an engine that takes requests, else 0.", float(bool(stats)))
        yield self._gauge("num_requests_running", "Samples in the batch.", stats.get("running", 0))
        yield self._gauge("num_requests_waiting", "Samples in the queue.", stats.get("waiting", 0))
        usage = 1 - stats.get("free_blocks", blocks) / blocks
        yield self._gauge("kv_cache_usage_perc", "Share of the cache's blocks that are in use, 0 to 1.", usage)
        yield self._gauge(
            "gpu_active_perc",
            "Share of the time with work in which the GPU ran a step, 0 to 1.",
            stats.get("active", 0.0),
        )
        yield self._gauge("engine_paused", "1 while the engine is paused, else 0.", stats.get("paused", False))
        yield self._gauge("engine_asleep", "1 while the engine sleeps, else 0.", stats.get("asleep", False))
        yield self._gauge("weight_version", "How often the weights were replaced.", stats.get("weight_version", 0))
        for counted in COUNTERS:
            yield self._counter(counted)
        if self._price is not None:
            yield self._gauge("gpu_price_per_hour", "What an hour of the GPU costs, as it was configured.", self._price)
            yield self._idle_cost(self._price)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(self._prefix + name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, counted: _Counted) -> Metric:
        labels = ["model_name"] if counted.label is None else ["model_name", counted.label]
        family = CounterMetricFamily(self._prefix + counted.name, counted.text, labels=labels)
        for label, value in self._totals(counted.name):
            family.add_metric([self._model_name, label][: len(labels)], value)
        return family

    def _idle_cost(self, price: float) -> Metric:
        name, text = (
            "idle_cost_per_day",
            "What the GPU's idle time costs a day, by cause, from all time since the start.",
        )
        family = GaugeMetricFamily(self._prefix + name, text, labels=["model_name", "cause"])
        causes = list(self._totals("gpu_idle_seconds"))
        whole = sum(seconds for _, seconds in (*causes, *self._totals("gpu_busy_seconds")))
        for cause, seconds in causes:
            family.add_metric([self._model_name, cause], price * HOURS * seconds / whole if whole else 0.0)
        return family

    def _totals(self, name: str) -> Iterator[tuple[str, float]]:
        """The values of a counter by label."""
        for place, key in enumerate(_KEYS, _TOTALS):
            if key[0] == name:
                yield key[1], self._board.shared[place]


def _counts(stats: Mapping[str, Any]) -> Iterator[float]:
    """The counters of one engine, in the order of `_KEYS`."""
    for counted in COUNTERS:
        if counted.label is None:
            yield sum(stats[name] for name in counted.sums)
        else:
            values = stats[counted.sums[0]]
            for label in _LABELS[counted.label]:
                yield values[label] + (stats["resting_seconds"] if label == NOTHING else 0.0)
