"""Batches through engines: what they answer, in which order they ask, and what they hold in memory."""

from __future__ import annotations

import itertools
import re
import signal
import sys
from unittest import mock

import pytest
from batch_case import ENGINE, plain, read_lines, tokens_by_id, write_lines
from engines import MODES, running
from scripted import Scripted
from watching import quiet

from twostroke import Engine, EngineDead, QueueFull, SamplingParams
from twostroke.errors import BatchStopped
from twostroke.jobs.batch_input import BatchInput
from twostroke.jobs.batch_job import BatchJob, Outcome
from twostroke.jobs.batch_output import BatchOutput
from twostroke.jobs.batch_progress import BatchProgress
from twostroke.jobs.batch_request import RequestReader
from twostroke.jobs.batch_run import AHEAD, SUBMITTED, BatchRun
from twostroke.request import mix_seed


def answer(engine, folder, lines, rows=8, seed=3):
    """Answer lines into `folder`/out; return the errors by line."""
    source = BatchInput(write_lines(folder / "in", lines))
    survey, output, errors = source.survey(), BatchOutput(folder / "out", None, {}), {}
    reader = RequestReader(engine.tokenizer, "tiny", engine.max_model_len, seed, survey.duplicates)
    try:
        BatchRun(engine, rows, source.lines(survey), reader, output, lambda: None, errors.__setitem__).run()
    finally:
        output.close()
    return errors


def params_of(line, number, seed=3):
    names = ("max_tokens", "ignore_eos", "temperature", "n")
    return SamplingParams(seed=mix_seed(seed, number), **{name: line[name] for name in names if name in line})


@pytest.mark.parametrize("options", [{"num_blocks": 200}, {"num_blocks": 9, "block_size": 4}], ids=["roomy", "tight"])
@pytest.mark.parametrize("mode", MODES)
def test_equal_to_generate(mode, options, tmp_path):
    """Whatever the order and the neighbours; where the cache is tight, with preemptions."""
    lines = plain(40, 10)
    lines[7]["n"] = 3
    with running(mode, **options) as engine:
        expected = engine.generate(
            [line["prompt"] for line in lines], [params_of(line, number) for number, line in enumerate(lines, 1)]
        )
        before = engine.stats().preemptions
        assert answer(engine, tmp_path, lines) == {}
        assert (engine.stats().preemptions > before) == ("block_size" in options)
        quiet(engine)
    got = tokens_by_id(tmp_path / "out")
    assert got == {
        f"line-{number}": [sample.token_ids for sample in output.outputs] for number, output in enumerate(expected, 1)
    }


def test_several_prompts_are_one_answer(tmp_path):
    with running("async", num_blocks=200) as engine:
        prompts = [[1, 2, 3], [4, 5], [6]]
        line = {"prompt": prompts, "max_tokens": 5, "n": 2, "return_token_ids": True, "ignore_eos": True}
        answer(engine, tmp_path, [line, line | {"seed": 1}])
        expected = engine.generate(prompts, SamplingParams(n=2, max_tokens=5, ignore_eos=True, seed=mix_seed(3, 1)))
    (one,) = [line for line in read_lines(tmp_path / "out") if line["custom_id"] == "line-1"]
    body = one["response"]["body"]
    assert one["response"]["status_code"] == 200
    assert one["error"] is None
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert [c["token_ids"] for c in body["choices"]] == [sample.token_ids for o in expected for sample in o.outputs]
    assert body["usage"]["completion_tokens"] == 30
    assert body["usage"]["prompt_tokens"] == 6


def test_a_bad_line_hurts_no_other(tmp_path):
    """Refused when read, refused at submit, and failed while it ran."""
    lines = [*plain(12), "junk", {"prompt": [99999999]}, {"prompt": [1] * 5000}, {"prompt": [7] * 9, "max_tokens": 3}]
    with running("async", num_blocks=200) as engine, Scripted(engine, 9, [11, 12, None]):
        # the script speaks by position: what is shorter than the bad prompt plus two tokens never gets there
        lines[:12] = [line | {"max_tokens": 2} for line in lines[:12]]
        errors = answer(engine, tmp_path, lines)
    assert sorted(errors) == [13, 14, 15, 16]
    told = {line["custom_id"]: line["error"] for line in read_lines(tmp_path / "out")}
    assert len(told) == 16
    assert all(told[f"line-{n}"] is None for n in range(1, 13))
    assert "prompt[0]=99999999" in told["line-14"]["message"]
    assert told["line-14"]["line"] == 14
    assert told["line-14"]["param"] == "prompt"
    assert told["line-16"]["status_code"] == 500


def test_a_full_queue_is_waited_for(tmp_path):
    with running("async", num_blocks=200, max_waiting=3) as engine:
        refused = []
        start = engine.start

        def watched(*arguments):
            try:
                return start(*arguments)
            except QueueFull as error:
                refused.append(error)
                raise

        with mock.patch.object(engine, "start", watched):
            errors = answer(engine, tmp_path, [*plain(60), {"prompt": [1], "n": 30}])
    assert refused
    assert list(errors) in ([], [61])  # more samples than the queue takes: told so, if it came alone
    assert len(read_lines(tmp_path / "out")) == 61


# Order and memory


class Watched:
    """An engine that notes what is asked of it, and how much of the input was read by then."""

    def __init__(self, engine):
        self.engine, self.order, self.running, self.most = engine, [], 0, 0

    def start(self, prompts, params):
        handles = self.engine.start(prompts, params)
        self.order.append(params[0].max_tokens)
        self.running += len(handles)
        self.most = max(self.most, self.running)
        for handle in handles:
            handle.on_end(self.ended)
        return handles

    def ended(self, handle):
        self.running -= 1


def test_the_longest_begin_first_and_the_window_is_bounded(tmp_path):
    rows, count = 2, 50
    lines = [{"prompt": [1, 2], "max_tokens": 1 + (5 * n) % 17, "ignore_eos": True} for n in range(count)]
    read = itertools.count(1)
    with running("sync", num_blocks=200, max_rows=rows) as engine:
        watched = Watched(engine)
        source = BatchInput(write_lines(tmp_path / "in", lines))
        survey, output = source.survey(), BatchOutput(tmp_path / "out", None, {})
        reader = RequestReader(None, "tiny", engine.max_model_len, None, {})
        ahead = []

        def counted():
            for line in source.lines(survey):
                ahead.append(next(read) - len(watched.order))
                yield line

        BatchRun(watched, rows, counted(), reader, output, lambda: None, print).run()
        output.close()
    assert watched.most <= SUBMITTED * rows
    assert max(ahead) <= AHEAD * rows
    lengths = [line["max_tokens"] for line in lines]
    assert sorted(watched.order) == sorted(lengths)
    tail = watched.order[-AHEAD * rows :]
    assert tail == sorted(tail, reverse=True), "at the end of the input the longest go first"
    assert sum(tail) / len(tail) < sum(lengths) / len(lengths) / 2, "what is short was kept for the end"


@pytest.mark.parametrize("bad", [[], [-1]], ids=["when read", "when submitted"])
def test_a_flood_of_bad_lines_keeps_no_answer_waiting(tmp_path, bad):
    """Nor those that follow: the engine gets them while some of the bad ones are not looked at yet."""
    good, bad = {"prompt": [1], "max_tokens": 20}, {"prompt": bad, "max_tokens": 1}
    with running("async", num_blocks=200) as engine:
        start = engine.start

        def answered(prompts, params):
            handles = start(prompts, params)
            for handle in handles:
                handle.wait()
            return handles

        with mock.patch.object(engine, "start", answered):
            errors = answer(engine, tmp_path, [good, *[bad] * 500, good, *[bad] * 500])
    assert len(errors) == 1000
    places = {line["custom_id"]: place for place, line in enumerate(read_lines(tmp_path / "out"))}
    assert len(places) == 1002
    assert places["line-1"] < 500
    assert places["line-502"] < 1000


# Ends


def test_a_dead_engine_stops_the_batch_and_another_goes_on(tmp_path):
    job = BatchJob(source=write_lines(tmp_path / "in", plain(30)), output=tmp_path / "out", engine=ENGINE)
    with mock.patch("twostroke.jobs.batch_job.Engine", Mortal), pytest.raises(BatchStopped, match="goes on") as caught:
        job.run(print)
    assert isinstance(caught.value.__cause__, EngineDead)
    done = len(read_lines(tmp_path / "out"))
    assert done < 30
    totals = job.run(print).totals
    assert (totals.requests, totals.failed) == (30, 0)
    assert len(tokens_by_id(tmp_path / "out")) == 30


class Mortal(Engine):
    """Dies once some requests were submitted."""

    started = 0

    def start(self, prompts, params):
        self.started += 1
        if self.started == 20:
            self._life.inbox.put(lambda scheduler: 1 / 0)
        return super().start(prompts, params)


@pytest.mark.parametrize("place", ["between two answers", "amid one"])
def test_an_interrupt_keeps_what_was_answered(tmp_path, place):
    """Wherever Ctrl-C comes, no line is told of as done without its answer."""
    job = BatchJob(source=write_lines(tmp_path / "in", plain(30)), output=tmp_path / "out", engine=ENGINE)
    show, add, moments = BatchProgress.show.__code__, BatchOutput.add.__code__, itertools.count()

    def interrupt(frame, event, function):
        """The line of an answer is added first, and then its text."""
        between = (frame.f_code, event) == (show, "call")
        amid = (frame.f_code, event) == (add, "c_return") and function.__name__ == "append"
        if (amid if place == "amid one" else between) and next(moments) == 8:
            signal.raise_signal(signal.SIGINT)

    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            job.run(print)
    finally:
        sys.setprofile(None)
    assert 0 < len(read_lines(tmp_path / "out")) < 30
    assert job.run(print).totals.requests == 30
    assert len(tokens_by_id(tmp_path / "out")) == 30


def test_an_interrupt_ends_a_flood_of_bad_lines(tmp_path):
    job = BatchJob(source=write_lines(tmp_path / "in", [{"prompt": []}] * 1000), output=tmp_path / "out", engine=ENGINE)
    with pytest.raises(KeyboardInterrupt):
        job.run(lambda line, error: signal.raise_signal(signal.SIGINT) if line == 10 else None)
    assert 10 <= len(read_lines(tmp_path / "out")) < 200
    assert job.run(lambda line, error: None).totals.failed == 1000


def test_a_complete_batch_needs_no_engine(tmp_path):
    job = BatchJob(source=write_lines(tmp_path / "in", plain(5)), output=tmp_path / "out", engine=ENGINE)
    first = job.run(print)
    assert first.answered == 5
    before = (tmp_path / "out").read_bytes()
    with mock.patch("twostroke.jobs.batch_job.Engine", None):
        assert job.run(print) == Outcome(first.totals, answered=0)
    assert (tmp_path / "out").read_bytes() == before


def test_the_bar_shows_pace_activity_and_the_cost_of_all_runs(tmp_path, monkeypatch, capsys):
    """After an interrupt it begins with what is there, in answers and in dollars."""
    monkeypatch.setenv("COLUMNS", "200")
    source = write_lines(tmp_path / "in", plain(30))
    job = BatchJob(source=source, output=tmp_path / "out", engine=ENGINE, price=3600e6)
    steps = itertools.count()
    show = BatchProgress.show

    def interrupt(self):
        show(self)
        if next(steps) == 9:
            raise KeyboardInterrupt

    with mock.patch("twostroke.jobs.batch_job.BatchProgress.show", interrupt), pytest.raises(KeyboardInterrupt):
        job.run(print, progress=True)
    first = bar_of(capsys)
    job.run(print, progress=True)
    second = bar_of(capsys)
    assert (first["done"], second["done"]) == ("10/30", "30/30")
    assert 0 < float(first["dollars"]) < float(second["dollars"])
    assert first["left"] != "-:--:--"
    for bar in (first, second):
        assert int(bar["pace"]) > 0
        assert 0 < float(bar["active"]) <= 100


def bar_of(capsys):
    """The parts of the last state of the bar."""
    counts, rates = r"(?P<done>\d+/30) (?P<left>[-:0-9]+) (?P<pace>\d+) tokens/s", r"device active (?P<active>[.0-9]+)%"
    pattern = rf"{counts}, {rates}, \$(?P<dollars>[.0-9]+)"
    return [*re.finditer(pattern, capsys.readouterr().err)][-1]
