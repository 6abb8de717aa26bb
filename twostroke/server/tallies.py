"""Histograms and counters whose numbers stand on a board, so that one scrape speaks for all processes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from .board import Board


class HistogramTally:
    """A histogram: a count for each bucket, one for what is larger than all, and the sum of the values.

    Args:
        name, text: of the metric.
        bounds: of the buckets, ascending; a value equal to one belongs below it.
        start: where its numbers begin among those of a process.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float], start: int) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._start = start
        self._sum = start + len(bounds) + 1
        self.end = self._sum + 1

    def observe(self, board: Board, value: float) -> None:
        board.own[self._start + bisect_left(self._bounds, value)] += 1
        board.own[self._sum] += value

    def read(self, board: Board, model_name: str) -> Metric:
        """The metric over all processes."""
        buckets, count = [], 0.0
        for index, bound in enumerate((*self._bounds, float("inf")), self._start):
            count += board.total(index)
            buckets.append((floatToGoString(bound), count))
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        family.add_metric([model_name], buckets, board.total(self._sum))
        return family


class CounterTally:
    """Counters that differ by one label.

    Args:
        name, text: of the metric.
        label: the label's name. values: its values.
        start: where its numbers begin among those of a process.
    """

    def __init__(self, name: str, text: str, label: str, values: Sequence[str], start: int) -> None:
        self._name = name
        self._text = text
        self._label = label
        self._places = {value: start + number for number, value in enumerate(values)}
        self.end = start + len(values)

    def count(self, board: Board, value: str) -> None:
        board.own[self._places[value]] += 1

    def read(self, board: Board, model_name: str) -> Metric:
        """The metric over all processes."""
        family = CounterMetricFamily(self._name, self._text, labels=["model_name", self._label])
        for value, place in self._places.items():
            family.add_metric([model_name, value], board.total(place))
        return family
