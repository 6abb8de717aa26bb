"""`twostroke batch`: its flags, what it prints, exit codes; and its answers beside the server's."""

from __future__ import annotations

import gzip
import itertools
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
from batch_case import TINY, plain, read_lines, run, write_lines
from typer.testing import CliRunner

from twostroke.cli.main import app
from twostroke.jobs.journal import DurableFile


def test_answers_and_a_summary(tmp_path):
    result = run(write_lines(tmp_path / "in", plain(9)), "-o", tmp_path / "out", *TINY, "--price", "3600000")
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    assert "9 requests, 0 failed; 27 prompt and" in result.stderr
    assert ", $" in result.stderr
    assert len(read_lines(tmp_path / "out")) == 9
    again = run(tmp_path / "in", "-o", tmp_path / "out", *TINY)
    assert again.exit_code == 0
    assert "complete already" in again.stderr
    assert "complete already" not in result.stderr
    assert len(read_lines(tmp_path / "out")) == 9


def test_one_request_is_no_several(tmp_path):
    source = write_lines(tmp_path / "in", [{"prompt": [3], "max_tokens": 1}])
    found = run(source, "-o", tmp_path / "out", *TINY, "--dry-run")
    assert found.stdout.splitlines()[1] == "1 prompt token, at most 1 output token"
    assert run(source, "-o", tmp_path / "out", *TINY).stderr.startswith(
        "1 request, 0 failed; 1 prompt and 1 output token in "
    )


def test_errors_are_told_and_split_off(tmp_path):
    lines = ["junk", *plain(3), *[{"prompt": "x"}] * 30]
    result = run(write_lines(tmp_path / "in", lines), "-o", tmp_path / "out", "--errors", tmp_path / "bad", *TINY)
    assert result.exit_code == 1
    assert "line 1: the line is not JSON" in result.stderr
    assert "line 23: " in result.stderr
    assert "line 24: " not in result.stderr
    assert "further lines failed too" in result.stderr
    failed = [line["custom_id"] for line in read_lines(tmp_path / "bad")]
    assert failed == ["line-1", *(f"line-{number}" for number in range(5, 35))]
    assert all(line["response"] is None and line["error"]["message"] for line in read_lines(tmp_path / "bad"))
    assert sorted(line["custom_id"] for line in read_lines(tmp_path / "out")) == ["line-2", "line-3", "line-4"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--engine-seed", "2"), "twostroke: engine_seed=2, and was engine_seed=1 when"),
        (("--limit", "3"), "limit=3"),
        (("--shard", "1/2"), "shard='1/2'"),
        (("--served-model-name", "x"), "served_model_name='x'"),
        (("--max-model-len", "100"), "max_model_len=100"),
        (("--errors", "bad"), "/bad', and was errors=None"),
    ],
)
def test_other_arguments_are_refused(tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    source = write_lines(tmp_path / "in", [])
    assert run(source, "-o", tmp_path / "out", *TINY).exit_code == 0
    result = run(source, "-o", tmp_path / "out", *TINY, *flags)
    assert result.exit_code == 2
    assert message in result.stderr
    assert run(source, "-o", tmp_path / "out", *TINY, "--max-rows", "4").exit_code == 0


def test_shards_answer_what_one_command_answers(tmp_path):
    """Of the first 11 requests, each by one of three; a bad line and an empty one among them."""
    lines = [*plain(4), "junk", "", *plain(12)]
    source = write_lines(tmp_path / "in", lines)
    assert run(source, "-o", tmp_path / "whole", *TINY, "--limit", "11").exit_code == 1
    parts = []
    for index in (1, 2, 3):
        run(source, "-o", tmp_path / f"part-{index}", *TINY, "--limit", "11", "--shard", f"{index}/3")
        parts.append(read_lines(tmp_path / f"part-{index}"))
    assert [len(part) for part in parts] == [4, 4, 3]
    assert sorted(map(told, itertools.chain(*parts))) == sorted(map(told, read_lines(tmp_path / "whole")))
    assert {line["custom_id"] for part in parts for line in part} == {f"line-{n}" for n in range(1, 13) if n != 6}


def told(line):
    """What a line of the output says, without what differs from run to run."""
    choices = line["response"]["body"]["choices"] if line["response"] else None
    return line["custom_id"], str(choices), str(line["error"])


def test_another_input_is_refused(tmp_path):
    source = write_lines(tmp_path / "in", plain(2))
    assert run(source, "-o", tmp_path / "out", *TINY).exit_code == 0
    write_lines(source, plain(3))
    result = run(source, "-o", tmp_path / "out", *TINY)
    assert result.exit_code == 2
    assert "twostroke: the input differs from what it was when" in result.stderr


def test_the_same_batch_may_be_written_differently(tmp_path, saved, monkeypatch):
    """Defaults may be left out, and files named from another folder or by a link."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one").symlink_to(saved("llama")[0])
    source = write_lines(tmp_path / "in", [*plain(2), {"prompt": [3], "max_tokens": 2, "model": str(tmp_path / "one")}])
    same = ("-o", tmp_path / "out", "--device", "cpu", "--num-blocks", "64")
    assert run(source, *same, "--model", "one", "--errors", "bad").exit_code == 0
    flags = ("--impl", "auto", "--dtype", "auto", "--errors", "./bad")
    for model in ("./one", tmp_path / "one", saved("llama")[0]):
        result = run(source, *same, "--model", model, *flags)
        assert result.exit_code == 0, result.output
    result = run(source, *same, "--model", "tiny", *flags)
    assert result.exit_code == 2
    assert "model='tiny', and was model='/" in result.stderr


@pytest.mark.parametrize("flag", ["--output", "--errors"])
def test_a_missing_folder_is_refused_before_the_input_is_read(tmp_path, flag):
    """Nothing was done, so nothing is said of going on."""
    result = run("-", *TINY, "--output", tmp_path / "out", flag, tmp_path / "absent" / "file")
    assert result.exit_code == 2
    assert f"{flag[2:]}='{tmp_path}/absent/file': there is no folder '{tmp_path}/absent'" in result.stderr
    assert "goes on" not in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", [("--model", "nowhere"), ("--max-rows", "0"), ("--num-blocks", "1")], ids=str)
def test_an_engine_that_is_refused_leaves_nothing_that_bars_another(tmp_path, wrong):
    source = write_lines(tmp_path / "in", plain(2))
    files = ("-o", tmp_path / "out", "--errors", tmp_path / "bad")
    assert run(source, *files, *TINY, *wrong).exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert run(source, *files, *TINY).exit_code == 0
    assert run(source, *files, *TINY, *wrong).exit_code in (0, 2)
    assert len(read_lines(tmp_path / "out")) == 2


def test_who_interrupts_is_told_how_it_goes_on(tmp_path):
    arguments = (write_lines(tmp_path / "in", plain(4)), "-o", tmp_path / "out", *TINY)
    with mock.patch("twostroke.jobs.batch_job.BatchProgress.show", side_effect=KeyboardInterrupt):
        result = run(*arguments)
    assert result.exit_code == 130
    assert "interrupted; the same command goes on" in result.stderr
    assert run(*arguments).exit_code == 0
    assert len(read_lines(tmp_path / "out")) == 4


def test_who_interrupts_before_an_answer_is_not_told_of_one(tmp_path):
    arguments = (write_lines(tmp_path / "in", plain(4)), "-o", tmp_path / "out", *TINY)
    with mock.patch("twostroke.jobs.batch_job.Engine", side_effect=KeyboardInterrupt):
        result = run(*arguments)
    assert result.exit_code == 130
    assert "interrupted; nothing was written yet" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_what_stops_a_batch_before_an_answer_names_no_journal(tmp_path):
    arguments = (write_lines(tmp_path / "in", plain(4)), "-o", tmp_path / "out", *TINY)
    with mock.patch("twostroke.jobs.batch_job.Engine", side_effect=ConnectionError("no cluster is there.\n")):
        result = run(*arguments)
    assert result.exit_code == 1
    assert result.stderr == "twostroke: no cluster is there. Nothing was written yet\n"


@pytest.mark.parametrize("flag", ["--output", "--errors"])
@pytest.mark.parametrize("place", ["-", "./-", "/dev/stdout", "/dev/fd/1", "/dev/null", "."])
def test_answers_need_a_file(tmp_path, monkeypatch, place, flag):
    """What cannot be read again and cut is nothing to go on from; a shell may also have made a file of /dev/stdout."""
    monkeypatch.chdir(tmp_path)
    source = write_lines(tmp_path / "in", plain(2))
    for more in ((), ("--dry-run",)):
        result = run(source, "-o", "out", flag, place, *TINY, *more)
        assert result.exit_code == 2
        assert f"{flag[2:]}='{Path(place)}' is no regular file" in result.stderr
    assert "output=None: answers need a file" in run(source, *TINY).stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    ("source", "errors", "message"),
    [
        ("in", "out", "errors='.*out' is the output itself"),
        ("in", "out.journal", "errors='.*out.journal' is the journal itself"),
        ("in", "folder/../out.journal", "errors='.*out.journal' is the journal itself"),
        ("in", "link", "errors='.*link' is the journal itself"),
        ("in", "in", "errors='.*in' is the input itself"),
        ("in", "hard", "errors='.*hard' is the input itself"),
        ("-", "out.stdin", "errors='.*out.stdin' is the copy of stdin itself"),
    ],
)
def test_files_must_be_apart(tmp_path, source, errors, message):
    """By whatever path: what writes the one would destroy the other."""
    write_lines(tmp_path / "in", plain(1))
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("out.journal")
    (tmp_path / "hard").hardlink_to(tmp_path / "in")
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    given = tmp_path / source if source != "-" else "-"
    result = run(given, "-o", tmp_path / "out", "--errors", tmp_path / errors, *TINY)
    assert result.exit_code == 2
    assert re.search(message, result.stderr), result.stderr
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_stdin_may_be_gzipped(tmp_path):
    data = gzip.compress(write_lines(tmp_path / "in", plain(4)).read_bytes())
    for _ in range(2):  # the second time all is there
        arguments = ["batch", "-", "-o", str(tmp_path / "out"), *TINY]
        result = CliRunner().invoke(app, arguments, input=data)
        assert result.exit_code == 0, result.output
    assert len(read_lines(tmp_path / "out")) == 4
    assert not list(tmp_path.glob("*.stdin"))


def test_stdin_is_copied_for_one_command_at_a_time(tmp_path):
    """Another one of the same output would write over the lines that the first has not read yet."""
    copy = tmp_path / "out.stdin"
    first = DurableFile(copy, "copy")
    first.append(b'{"prompt": [3]}\n')
    for flags in ((), ("--dry-run",)):
        result = CliRunner().invoke(app, ["batch", "-", "-o", str(tmp_path / "out"), *TINY, *flags], input=b"{}")
        assert result.exit_code == 2
        assert f"input='-': its copy '{copy}' is in use by another process" in result.stderr
        assert copy.read_bytes() == b'{"prompt": [3]}\n'
    first.close()


def test_of_stdin_no_copy_is_left_by_a_command_that_was_refused(tmp_path):
    (tmp_path / "out").write_text("somebody's\n")
    result = CliRunner().invoke(app, ["batch", "-", "-o", str(tmp_path / "out"), *TINY], input=b'{"prompt": [3]}')
    assert "is there already, without a journal" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_engines_need_ray(tmp_path):
    result = run(write_lines(tmp_path / "in", plain(1)), "-o", tmp_path / "out", *TINY, "--engines", "2")
    assert result.exit_code == 2
    assert "engines=2 is for --ray alone" in result.stderr


def test_without_the_extra_it_is_named(tmp_path, monkeypatch):
    """Before anything is written: an output that was begun is what another command would be refused for."""
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "twostroke.jobs.ray_run", raising=False)
    write_lines(tmp_path / "in", plain(1))
    for source, given in ((tmp_path / "in", None), ("-", b"{}")):
        arguments = ["batch", str(source), "-o", str(tmp_path / "out"), *TINY, "--ray", "auto"]
        result = CliRunner().invoke(app, arguments, input=given)
        assert result.exit_code == 2
        assert "ray='auto' needs the package ray: pip install 'twostroke[ray]'" in result.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["in"]


BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 9, "logprobs": True},
    "/v1/completions": {"prompt": ["Once", "Twice"], "echo": True, "n": 2, "seed": 5, "return_token_ids": True},
    "/v1/responses": {"input": "Why?", "max_output_tokens": 7, "instructions": "Be brief."},
}
OWN = {"id", "created", "created_at"}
"""What differs between two answers that are the same."""


@pytest.mark.skipif(not find_spec("fastapi"), reason="needs the extra server")
def test_answers_are_those_of_the_server(server, small_dir, tmp_path):
    from serving import MODEL

    bodies = {url: body | {"temperature": 0, "model": MODEL} for url, body in BODIES.items()}
    lines = [{"custom_id": url, "method": "POST", "url": url, "body": body} for url, body in bodies.items()]
    flags = ("--model", small_dir, "--device", "cpu", "--num-blocks", "600", "--served-model-name", MODEL)
    result = run(write_lines(tmp_path / "in", lines), "-o", tmp_path / "out", *flags)
    assert result.exit_code == 0, result.output
    for line in read_lines(tmp_path / "out"):
        served = server.post(line["custom_id"], bodies[line["custom_id"]]).json
        assert comparable(line["response"]["body"]) == comparable(served)


def comparable(value):
    """An answer without what differs; log-probabilities rounded, since batches differ in their last bits."""
    if isinstance(value, dict):
        return {name: comparable(part) for name, part in value.items() if name not in OWN and name != "cached_tokens"}
    if isinstance(value, list):
        return [comparable(part) for part in value]
    return round(value, 3) if isinstance(value, float) else value
