"""A batch whose process is killed, or whose disk is full, at any moment, goes on to a complete output."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import time

import pytest
from batch_case import ENGINE, plain, read_lines, run_in_child, tokens_by_id, write_lines
from watching import PATIENCE, wait_until

from twostroke import Engine, SamplingParams
from twostroke.errors import BatchStopped
from twostroke.jobs import batch_output, journal
from twostroke.jobs.batch_job import BatchJob
from twostroke.request import mix_seed

REQUESTS = 90


@pytest.fixture(scope="module")
def processes():
    """Processes that have imported what they need, and run nothing yet: they start within milliseconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["twostroke.jobs.batch_job", "batch_case"])
    first = context.Process()
    first.start()
    first.join(PATIENCE)
    return context


@pytest.fixture(scope="module")
def expected():
    """The tokens that an engine gives when nobody disturbs it, whatever the order."""
    lines = plain(REQUESTS)
    fields = ("max_tokens", "ignore_eos", "temperature")
    params = [
        SamplingParams(seed=mix_seed(ENGINE["seed"], number), **{name: line[name] for name in fields})
        for number, line in enumerate(lines, 1)
    ]
    with Engine(**ENGINE) as engine:
        outputs = engine.generate([line["prompt"] for line in lines], params)
    return {f"line-{number}": [output.token_ids] for number, output in enumerate(outputs, 1)}


def start(processes, source, output, file_bytes=None):
    process = processes.Process(target=run_in_child, args=(source, output, file_bytes))
    process.start()
    return process


def kill_until(processes, folder, expected, kills, seed):
    """Kill runs at random moments, run others to their end, and check every output; return kills amid the output."""
    draw, killed, amid = random.Random(seed), 0, 0
    source = write_lines(folder / "in.jsonl", plain(REQUESTS))
    while killed < kills:
        output = folder / f"out-{killed}.jsonl"
        while (process := start(processes, source, output)) and killed < kills and not ends(process, output, draw):
            process.kill()
            process.join(PATIENCE)
            killed += 1
            amid += output.exists() and output.stat().st_size > 0
        process.join(PATIENCE)
        assert process.exitcode == 0
        assert tokens_by_id(output) == expected
    return amid


def ends(process, output, draw):
    """Wait for a random moment: of the start, or of the time in which the output grows. True if it ended before."""
    if draw.random() < 0.8:
        length = output.stat().st_size if output.exists() else 0
        wait_until(lambda: not process.is_alive() or (output.exists() and output.stat().st_size != length))
    process.join(draw.uniform(0.0, 0.3))
    return not process.is_alive()


def test_killed_at_random_moments(processes, tmp_path, expected):
    assert kill_until(processes, tmp_path, expected, 6, seed=time.time_ns())


@pytest.mark.exhaustive
def test_killed_fifty_times(processes, tmp_path, expected):
    assert kill_until(processes, tmp_path, expected, 50, seed=time.time_ns()) > 15


def test_a_full_disk_ends_the_run_and_loses_nothing(processes, tmp_path, expected):
    """Every run may make its files a little longer; in each, some write gets only a part of its bytes onto the disk."""
    source, output = write_lines(tmp_path / "in.jsonl", plain(REQUESTS)), tmp_path / "out.jsonl"
    ends = []
    for room in (1000, 10_000, 20_001, 1 << 30):
        process = start(processes, source, output, room)
        process.join(PATIENCE)
        ends.append(process.exitcode)
    assert ends == [1, 1, 1, 0]
    assert tokens_by_id(output) == expected
    assert len(read_lines(output)) == REQUESTS


@pytest.mark.parametrize(
    ("synced", "left", "message"),
    [
        (0, False, r"No space left.*: '/.*'\. Nothing was written yet"),
        (3, False, r"No space left.*/out'\. Nothing was written yet"),
        (5, True, r"No space left.*/out'\. What .*out\.journal.*the same command goes on"),
    ],
    ids=["the first record", "the first group", "a later group"],
)
def test_what_the_user_is_told(tmp_path, monkeypatch, synced, left, message):
    """The error says how to go on, and that works; it points at no journal that is gone."""
    job = BatchJob(source=write_lines(tmp_path / "in", plain(20)), output=tmp_path / "out", engine=ENGINE)
    room = itertools.count(synced, -1)

    def fsync(file):
        if next(room) <= 0:
            refuse(file)

    with monkeypatch.context() as patch:
        patch.setattr(batch_output, "GROUP_LINES", 1)
        patch.setattr(journal.os, "fsync", fsync)
        with pytest.raises(BatchStopped, match=message):
            job.run(print)
        assert (tmp_path / "out.journal").exists() == left
    job.run(print)
    assert len(tokens_by_id(tmp_path / "out")) == 20


def refuse(file):
    raise OSError(28, "No space left on device")
