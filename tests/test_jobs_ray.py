"""Batches on a Ray cluster of two nodes: complete and exact, whatever is killed meanwhile."""

from __future__ import annotations

import json
import os
import re
import signal
from functools import partial
from typing import Any
from unittest import mock

import pytest
from batch_case import ENGINE, plain, read_lines, tokens_by_id, write_lines

from twostroke import InvalidConfig
from twostroke.errors import BatchStopped, EngineClosed, EngineDead
from twostroke.jobs.batch_job import BatchJob

pytest.importorskip("ray", reason="needs the packages of the extra ray")
pytestmark = pytest.mark.exhaustive

WORKERS = "MapWorker(MapBatches(LineAnswerer))"


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Lines, and the tokens that an engine gives them without Ray."""
    folder = tmp_path_factory.mktemp("case")
    source = write_lines(folder / "in.jsonl", plain(160, tokens=40))
    BatchJob(source=source, output=folder / "out.jsonl", engine=ENGINE).run(print)
    return source, tokens_by_id(folder / "out.jsonl")


@pytest.fixture
def small_batches(monkeypatch, ray_cluster):
    """Let engines have few lines at a time, and be on different nodes."""
    from ray_nodes import CPUS_OF_ENGINE

    from twostroke.jobs import ray_run
    from twostroke.jobs.ray import answer

    monkeypatch.setattr(ray_run, "answer", partial(answer, cpus=CPUS_OF_ENGINE, batch_size=4, batches=3))


def on_ray(ray_cluster, source, output, **changes: Any) -> BatchJob:
    return BatchJob(source=source, output=output, engine=ENGINE, ray=ray_cluster.address, engines=2, **changes)


class AtAnswer:
    """Does something when so many answers are there."""

    def __init__(self, count: int, act: Any) -> None:
        self.count, self.act = count, act
        self.show = self._show

    def _show(self) -> None:
        self.count -= 1
        if self.count == 0:
            self.act()


@pytest.fixture
def at_answer(monkeypatch):
    """Return a function that has something done when so many answers are in the output."""

    def arrange(count: int, act: Any) -> None:
        bar = AtAnswer(count, act)
        monkeypatch.setattr("twostroke.jobs.batch_progress.BatchProgress.show", lambda self: bar.show())

    return arrange


@pytest.mark.usefixtures("small_batches")
def test_answers_are_those_of_one_engine(ray_cluster, case, tmp_path, capsys):
    source, expected = case
    totals = on_ray(ray_cluster, source, tmp_path / "out").run(print, progress=True).totals
    assert tokens_by_id(tmp_path / "out") == expected
    assert (totals.requests, totals.failed) == (160, 0)
    assert totals.completion_tokens == sum(len(tokens) for choices in expected.values() for tokens in choices)
    active = re.findall(r"device active ([.0-9]+)%", capsys.readouterr().err)
    assert 0 < float(active[-1]) <= 100


def test_the_device_is_as_active_as_the_mean_of_the_engines_that_there_can_be():
    from twostroke.jobs.ray_run import RayRun

    run = RayRun("auto", 2, {}, "model", print)
    assert run.active() is None
    for engine, active, mean in (("a", 0.5, 0.5), ("b", 0.9, 0.7), ("a", 0.7, 0.8), ("c", 0.1, 0.4)):
        run._hear(engine, active, 2)
        assert run.active() == pytest.approx(mean)


@pytest.mark.usefixtures("small_batches")
def test_an_engine_is_killed(ray_cluster, case, tmp_path, at_answer):
    source, expected = case
    killed = []

    def kill() -> None:
        killed.append(ray_cluster.workers(WORKERS)[0])
        os.kill(killed[0].pid, signal.SIGKILL)

    at_answer(40, kill)
    on_ray(ray_cluster, source, tmp_path / "out").run(print)
    assert tokens_by_id(tmp_path / "out") == expected
    assert len(killed) == 1


@pytest.mark.usefixtures("small_batches")
def test_a_node_is_lost(ray_cluster, case, tmp_path, at_answer):
    source, expected = case
    lost = []

    def lose() -> None:
        lost.extend(ray_cluster.workers_of_node(WORKERS))
        ray_cluster.lose_node()

    at_answer(40, lose)
    on_ray(ray_cluster, source, tmp_path / "out").run(print)
    assert tokens_by_id(tmp_path / "out") == expected
    assert len(lost) == 1, "an engine was on it"


@pytest.mark.parametrize("error", [EngineDead("a fault"), EngineClosed("closed")])
def test_an_actor_ends_with_its_engine(error):
    """Ray starts another actor for one that is gone, but not for one that raises."""
    import pyarrow as pa

    from twostroke.jobs.ray import LineAnswerer

    answerer = LineAnswerer(ENGINE, None, {})
    exits = mock.patch("os._exit", side_effect=SystemExit)
    with exits, mock.patch("twostroke.jobs.batch_run.BatchRun.run", side_effect=error), pytest.raises(SystemExit):
        answerer(pa.table({"text": ["{}"]}))


@pytest.mark.usefixtures("small_batches")
def test_the_driver_stops_and_goes_on_without_ray(ray_cluster, case, tmp_path, at_answer):
    source, expected = case

    def fail() -> None:
        raise OSError("no space left")

    at_answer(40, fail)
    with pytest.raises(BatchStopped, match="no space left"):
        on_ray(ray_cluster, source, tmp_path / "out").run(print)
    before = read_lines(tmp_path / "out")
    assert 0 < len(before) < 160
    BatchJob(source=source, output=tmp_path / "out", engine=ENGINE).run(print)
    assert read_lines(tmp_path / "out")[: len(before)] == before
    assert tokens_by_id(tmp_path / "out") == expected


def test_bad_lines_hurt_no_other(ray_cluster, tmp_path):
    lines: list[Any] = plain(6)
    lines[1] = "{"
    lines[3]["max_tokens"] = 0
    lines[4]["custom_id"] = lines[5]["custom_id"] = "same"
    source = write_lines(tmp_path / "in.jsonl", lines)
    told = []
    job = on_ray(ray_cluster, source, tmp_path / "out", errors=tmp_path / "errors")
    totals = job.run(lambda line, error: told.append((line, error.code))).totals
    assert (totals.requests, totals.failed) == (6, 3)
    assert sorted(told) == [(2, "invalid_json"), (4, "invalid_value"), (6, "duplicate_custom_id")]
    assert sorted(line["error"]["line"] for line in read_lines(tmp_path / "errors")) == [2, 4, 6]
    assert set(tokens_by_id(tmp_path / "out")) == {"line-1", "line-3", "same"}


def test_the_stage_takes_lines_without_numbers(ray_cluster):
    import ray

    from twostroke.jobs.ray import answer

    lines = [line | {"custom_id": f"own-{place}"} for place, line in enumerate(plain(9))]
    rows = [{"text": json.dumps(line)} for line in [*lines, plain(1)[0]]]
    answered = answer(ray.data.from_items(rows), gpus=0, batch_size=5, **ENGINE).take_all()
    texts = {(text := json.loads(row["text"]))["custom_id"]: (text, row) for row in answered}
    assert sorted(name for name in texts if name.startswith("own-")) == [f"own-{place}" for place in range(9)]
    for place, line in enumerate(lines):
        text, row = texts[f"own-{place}"]
        tokens = text["response"]["body"]["choices"][0]["token_ids"]
        assert (row["failed"], row["completion_tokens"]) == (False, len(tokens))
        assert 0 < row["active"] <= 1
        assert len(tokens) == line["max_tokens"]
    assert len({row["engine"] for row in answered}) == 1
    (nameless,) = (row for row in answered if row["failed"])
    assert json.loads(nameless["text"])["error"]["param"] == "custom_id"


@pytest.mark.parametrize(
    ("engine", "engines", "message"),
    [
        ({"device": "auto"}, None, "has no GPU"),
        ({}, 6, "engines=6 would leave nothing of the Ray cluster's 6 CPUs"),
        ({"max_rows": 0}, 1, "max_rows=0"),
    ],
)
def test_what_the_cluster_can_never_run_is_refused(ray_cluster, tmp_path, engine, engines, message):
    source = write_lines(tmp_path / "in.jsonl", plain(1))
    job = BatchJob(
        source=source, output=tmp_path / "out", engine=ENGINE | engine, ray=ray_cluster.address, engines=engines
    )
    with pytest.raises(InvalidConfig, match=message):
        job.run(print)


def test_what_no_engine_takes_is_refused_before_one_starts(ray_cluster):
    import ray

    from twostroke.jobs.ray import answer

    rows = ray.data.from_items([{"text": "{}"}])
    for arguments, word in (({"max_rows": 0}, "max_rows"), ({"nonsense": 1}, "nonsense"), ({"batches": 0}, "batches")):
        with pytest.raises(InvalidConfig, match=word):
            answer(rows, **arguments)
