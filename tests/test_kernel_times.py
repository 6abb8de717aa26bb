"""Kernels of steady steps: sums and shares."""

import pytest

from twostroke.bench.kernels import Interval, KernelTimes
from twostroke.bench.result import Run
from twostroke.bench.summary import kernel_table


def test_overlapping_kernels_are_counted_once_and_gaps_not_at_all():
    intervals = [Interval("b", 15, 30), Interval("a", 0, 20), Interval("a", 90, 100)]
    times = KernelTimes.of(intervals, steps=2)
    assert times.active == pytest.approx(0.4)
    assert times.us == {"a": 15, "b": 7.5}
    assert times.runs == {"a": 1, "b": 0.5}


def test_a_kernel_inside_another_adds_nothing():
    assert KernelTimes.of([Interval("a", 0, 10), Interval("b", 2, 4), Interval("c", 12, 20)], 1).active == 0.9


def test_no_kernel_is_no_activity():
    assert KernelTimes.of([], 5).active == 0


def test_the_table_has_the_longest_kernel_first():
    run = Run(engine="twostroke", loop="async", seconds=1.0, tokens=1, kernel_us={"long": 9.0, "short": 1.0},
              kernel_runs={"short": 3.0, "long": 1.0})  # fmt: skip
    table = kernel_table(run)
    assert table is not None
    assert table.rows == [["long", "9.0", "1.0"], ["short", "1.0", "3.0"]]
    assert kernel_table(Run(engine="twostroke", loop="async", seconds=1.0, tokens=1)) is None
