"""The figures of `twostroke bench tail`, and that both ways run."""

import pytest
from engines import running

from twostroke.request import Timings

pytest.importorskip("pydantic")
pytest.importorskip("msgspec")

from twostroke.bench import tail


def life(begin, end):
    return Timings(submitted=0.0, admitted=begin, finished=end)


def test_occupancy_counts_rows_and_finds_the_tail():
    """Two of four rows for ten seconds, all four for the first half of them."""
    found = tail.occupancy([life(0, 10), life(0, 10), life(0, 5), life(0, 5)], 0.0, 10.0, 4)
    assert found["occupancy_percent"] == pytest.approx(75, abs=0.1)
    assert found["tail_seconds"] == pytest.approx(5, abs=0.01)
    assert found["rows_in_use"] == "█" * 30 + "▄" * 30


def test_a_job_that_never_fills_the_rows_is_all_tail():
    assert tail.occupancy([life(1, 2)], 0.0, 4.0, 8)["tail_seconds"] == 4.0
    assert tail.occupancy([], 0.0, 4.0, 8)["rows_in_use"] == " " * 60


def test_lengths_are_always_the_same_and_within_bounds():
    job = tail.Job("tiny", 4, 500, median=20, longest=50)
    assert job.lengths() == job.lengths()
    assert len(set(job.lengths())) > 20
    assert min(job.lengths()) >= 1
    assert max(job.lengths()) == 50


def test_both_ways_make_the_same_number_of_tokens():
    job = tail.Job("tiny", 4, 20, prompt=4, median=6, longest=20)
    with running("async", max_rows=4, num_blocks=100) as engine:
        runs = [way(engine, job, "async", job.lengths()) for way in (tail.in_file_order, tail.as_batch)]
    assert [run.tokens for run in runs] == [sum(job.lengths())] * 2
    assert all(50 < run.extra["occupancy_percent"] <= 100 for run in runs)
