"""The output of a batch and its journal: what a death between any two calls, or amid one, leaves."""

from __future__ import annotations

import itertools
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from watching import PATIENCE

from twostroke import InvalidRequest
from twostroke.jobs import journal as journal_module
from twostroke.jobs.batch_output import BatchOutput, journal_of
from twostroke.jobs.identity import identity
from twostroke.jobs.journal import DurableFile, Journal, ranges
from twostroke.model.load import DEFAULT_MODEL
from twostroke.openai.errors import ApiError

LINES = [1, 2, 3, 5, 8, 9, 10, 11]
GROUPS = [[2, 1], [8, 3, 5], [9], [11, 10]]


class Death(BaseException):
    """The process is gone."""


class DyingSystem(SimpleNamespace):
    """The calls of `os` that change files; call number `last` does not come about, or only half of it does."""

    def __init__(self, last: int, half: bool) -> None:
        super().__init__(**{name: getattr(os, name) for name in dir(os) if not name.startswith("__")})
        self.left, self.half = last, half
        for name in ("write", "fsync", "ftruncate", "unlink"):
            setattr(self, name, self.mortal(name))

    def mortal(self, name):
        def call(file, *arguments):
            self.left -= 1
            if self.left < 0:
                if self.half and name == "write":
                    os.write(file, arguments[0][: len(arguments[0]) // 2])
                raise Death
            return getattr(os, name)(file, *arguments)

        return call


def open_output(folder, **identity):
    return BatchOutput(folder / "out", folder / "errors", {"input": "x", **identity})


def answer_rest(folder):
    """A run of a batch: answers what is not there, every fifth line with an error."""
    output = open_output(folder)
    try:
        for group in GROUPS:
            for line in group:
                if not output.state.has(line):
                    add(output, line)
            output.flush()
    finally:
        output.close()


def add(output, line):
    if line % 5 == 0:
        output.add_error(line, f"line-{line}", ApiError(400, "bad"))
    else:
        output.add_answer(line, f"line-{line}", {"text": "ü" * line}, 2, line)


def answer_a_group(folder):
    """The begin of a run that is left by whatever exception comes."""
    with open_output(folder) as output:
        add(output, 1)
        add(output, 5)
        output.flush()


def numbers(path):
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("half", [False, True])
def test_death_at_every_call(tmp_path, monkeypatch, half):
    """Killed at call k, and twice more in the runs after that; then every line is there once."""
    for first in range(100):
        folder = tmp_path / str(first)
        folder.mkdir()
        died = [dies(folder, last, monkeypatch, half) for last in (first, first // 2, 3)]
        answer_rest(folder)
        assert sorted(numbers(folder / "out")) == sorted(f"line-{line}" for line in LINES if line % 5)
        assert sorted(numbers(folder / "errors")) == sorted(f"line-{line}" for line in LINES if not line % 5)
        if not died[0]:
            return
    pytest.fail("it never lived to the end")


def dies(folder, last, monkeypatch, half):
    """Run with so many calls to live; True if it needs more."""
    with monkeypatch.context() as patch:
        patch.setattr(journal_module, "os", DyingSystem(last, half))
        try:
            answer_rest(folder)
        except Death:
            return True
    return False


def test_the_totals_are_those_of_what_is_there(tmp_path):
    answer_rest(tmp_path)
    output = open_output(tmp_path)
    totals = output.totals
    assert (totals.requests, totals.failed) == (8, 2)
    assert totals.completion_tokens == sum(line for line in LINES if line % 5)
    assert totals.prompt_tokens == 12
    assert all(output.state.has(line) == (line in LINES) for line in range(20))
    output.close()


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_half_written_record_is_cut(tmp_path, cut):
    answer_rest(tmp_path)
    path = journal_of(tmp_path / "out")
    path.write_bytes(path.read_bytes()[:-cut])
    output = open_output(tmp_path)
    assert [line for line in LINES if not output.state.has(line)] == [10, 11]
    output.close()
    answer_rest(tmp_path)
    assert len(numbers(tmp_path / "out")) + len(numbers(tmp_path / "errors")) == len(LINES)


def test_damage_before_the_end_is_refused(tmp_path):
    """Cutting there would drop what was safe."""
    answer_rest(tmp_path)
    path = journal_of(tmp_path / "out")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"\0" * 20 + b"\n", *lines[2:]]))
    with pytest.raises(InvalidRequest, match=r"journal=.*is damaged at byte"):
        open_output(tmp_path)


def test_another_batch_is_refused_by_the_name_of_what_differs(tmp_path):
    answer_rest(tmp_path)
    before = (tmp_path / "out").read_bytes()
    with pytest.raises(InvalidRequest, match=r"^engine_seed=3, and was engine_seed=None when '.*' was begun"):
        open_output(tmp_path, seed=3)
    assert (tmp_path / "out").read_bytes() == before


OLD = {"model": None, "impl": None, "dtype": None, "max_model_len": None, "deterministic": None, "seed": None}
REST = {"errors": None, "model_name": DEFAULT_MODEL, "limit": None, "shard": "1/1", "input": "x"}


def test_a_journal_that_names_no_default_goes_on(tmp_path):
    """Of an earlier version, which wrote down what was given."""
    BatchOutput(tmp_path / "out", None, OLD | REST).close()
    given = {"model": DEFAULT_MODEL, "dtype": "auto", "deterministic": False}
    for engine in ({}, given):
        BatchOutput(tmp_path / "out", None, identity(engine, None, DEFAULT_MODEL, None, "1/1", "x")).close()
    with pytest.raises(InvalidRequest, match=r"^dtype='float32', and was dtype='auto' when"):
        BatchOutput(tmp_path / "out", None, identity({"dtype": "float32"}, None, DEFAULT_MODEL, None, "1/1", "x"))


def test_a_file_that_is_no_output_is_left_alone(tmp_path):
    (tmp_path / "out").write_text("precious\n")
    with pytest.raises(InvalidRequest, match=r"^output='.*' is there already"):
        open_output(tmp_path)
    assert (tmp_path / "out").read_text() == "precious\n"
    assert not journal_of(tmp_path / "out").exists()


def test_an_output_that_was_shortened_is_refused(tmp_path):
    answer_rest(tmp_path)
    with (tmp_path / "errors").open("rb+") as file:
        file.truncate(10)
    with pytest.raises(InvalidRequest, match=r"^errors='.*' has 10 bytes, but .* knows of \d+: it was changed"):
        open_output(tmp_path)


def test_two_processes_cannot_write_one_output(tmp_path):
    output = open_output(tmp_path)
    with pytest.raises(InvalidRequest, match="in use by another process"):
        open_output(tmp_path)
    output.close()
    open_output(tmp_path).close()


def test_who_is_refused_amid_the_begin_of_another_leaves_its_journal(tmp_path, monkeypatch):
    """The first has its lock, and has written nothing yet."""
    resume, refused = Journal._resume, []

    def resume_meanwhile(journal):
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "_resume", resume)
            with pytest.raises(InvalidRequest, match=r"^journal='.*' is in use by another process"):
                open_output(tmp_path)
            refused.append(True)
        return resume(journal)

    monkeypatch.setattr(Journal, "_resume", resume_meanwhile)
    answer_rest(tmp_path)
    assert refused
    monkeypatch.undo()
    output = open_output(tmp_path)
    assert output.totals.requests == len(LINES)
    output.close()


def test_of_two_that_begin_together_one_is_refused(tmp_path):
    start = threading.Barrier(2)

    def begin(folder):
        start.wait(PATIENCE)
        try:
            return open_output(folder)
        except InvalidRequest as error:
            return str(error)

    with ThreadPoolExecutor(2) as threads:
        for turn in range(50):
            folder = tmp_path / str(turn)
            folder.mkdir()
            output, refusal = sorted(threads.map(begin, [folder] * 2), key=lambda one: isinstance(one, str))
            assert "is in use by another process" in refusal
            assert sorted(path.name for path in folder.iterdir()) == ["errors", "out", "out.journal"]
            output.close()


def unusable(folder, kind):
    """A path to errors that cannot be written, and what is said of it."""
    if kind == "device":
        return Path("/dev/null"), r"^errors='/dev/null' is no regular file"
    path = folder / "errors"
    if kind == "folder":
        path.mkdir()
        return path, "^errors='.*' is no regular file"
    if kind == "loop":
        path.symlink_to("errors")
        return path, "^errors='.*' cannot be opened: Too many levels"
    path.write_text("somebody's\n")
    return path, "^errors='.*' is there already, without a journal"


@pytest.mark.parametrize("kind", ["device", "folder", "loop", "file"])
def test_errors_that_cannot_be_written_leave_nothing(tmp_path, kind):
    """Else the journal would refuse the corrected command."""
    errors, message = unusable(tmp_path, kind)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InvalidRequest, match=message):
        BatchOutput(tmp_path / "out", errors, {"errors": str(errors)})
    assert sorted(tmp_path.iterdir()) == before
    BatchOutput(tmp_path / "out", None, {"errors": None}).close()


def test_one_file_of_errors_is_not_for_two_batches(tmp_path):
    first = BatchOutput(tmp_path / "a", tmp_path / "errors", {})
    with pytest.raises(InvalidRequest, match=r"^errors='.*' is in use by another process"):
        BatchOutput(tmp_path / "b", tmp_path / "errors", {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.journal", "errors"]
    add(first, 5)
    first.flush()
    first.close()
    assert numbers(tmp_path / "errors") == ["line-5"]
    with pytest.raises(InvalidRequest, match=r"^errors='.*' is there already"):
        BatchOutput(tmp_path / "b", tmp_path / "errors", {})
    assert numbers(tmp_path / "errors") == ["line-5"]


def test_an_output_by_two_names_is_not_for_two_batches(tmp_path):
    (tmp_path / "link").symlink_to("out")
    first = BatchOutput(tmp_path / "out", None, {})
    with pytest.raises(InvalidRequest, match=r"^output='.*link' is in use by another process"):
        BatchOutput(tmp_path / "link", None, {})
    first.close()


def test_what_was_there_before_stays(tmp_path, monkeypatch):
    """Empty files, and links, of a run that ends before anything is safe; also amid a group."""
    (tmp_path / "mine").touch()
    (tmp_path / "out").symlink_to("mine")
    (tmp_path / "errors").symlink_to("nowhere")
    before = sorted(path.name for path in tmp_path.iterdir())
    monkeypatch.setattr(Journal, "append", mock.Mock(side_effect=OSError("full")))
    with pytest.raises(OSError, match="full"):
        answer_a_group(tmp_path)
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert (tmp_path / "mine").read_bytes() == b""
    assert not (tmp_path / "nowhere").exists()
    open_output(tmp_path, input="another").close()


def test_of_a_run_that_was_killed_before_its_first_group_nothing_bars_another(tmp_path):
    open_output(tmp_path).close()
    with pytest.raises(RuntimeError), open_output(tmp_path):
        raise RuntimeError
    open_output(tmp_path, input="another").close()


def test_a_refused_run_leaves_the_journal_of_one_that_was_killed(tmp_path):
    """Amid its first group: without the journal, its lines would bar the very command that wrote them."""
    open_output(tmp_path).close()
    (tmp_path / "out").write_text("half a li")
    (tmp_path / "out").rename(tmp_path / "kept")
    (tmp_path / "out").mkdir()
    with pytest.raises(InvalidRequest, match=r"^output='.*' is no regular file"):
        open_output(tmp_path)
    (tmp_path / "out").rmdir()
    (tmp_path / "kept").rename(tmp_path / "out")
    answer_rest(tmp_path)


def test_a_record_that_is_on_the_disk_counts(tmp_path, monkeypatch):
    """Ctrl-C while it is synced: the answers are there, though nothing in memory says so yet."""
    sync, calls = DurableFile.sync, itertools.count()

    def interrupted(file):
        sync(file)
        if next(calls) == 3:  # the journal begins; then output, errors, and the record
            raise KeyboardInterrupt

    monkeypatch.setattr(DurableFile, "sync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        answer_a_group(tmp_path)
    monkeypatch.undo()
    assert numbers(tmp_path / "out") == ["line-1"]
    output = open_output(tmp_path)
    assert output.totals.requests == 2
    output.close()


def test_ranges():
    assert ranges([]) == []
    assert ranges([5, 1, 2, 9, 3]) == [[1, 3], [5, 5], [9, 9]]
