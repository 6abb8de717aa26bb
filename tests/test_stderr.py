"""A command and an engine whose stderr is missing from the start, or gone while they work: the work goes on."""

import errno
import os
import subprocess
import sys

import pytest
from batch_case import ENGINE, TINY, plain, read_lines, write_lines
from engines import running

from twostroke import SamplingParams
from twostroke.cli import streams
from twostroke.jobs.batch_job import BatchJob


class Gone:
    """A terminal that was closed."""

    encoding = "utf-8"

    def isatty(self):
        return True

    def write(self, text=""):
        raise OSError(errno.EIO, "Input/output error")

    flush = fileno = write


@pytest.mark.parametrize("stderr", [Gone(), None], ids=["gone", "missing"])
def test_a_bar_that_nobody_sees_ends_nothing(tmp_path, monkeypatch, stderr):
    monkeypatch.setattr(sys, "stderr", stderr)
    job = BatchJob(source=write_lines(tmp_path / "in", plain(5)), output=tmp_path / "out", engine=ENGINE)
    for progress in (None, True):
        (tmp_path / "out").unlink(missing_ok=True)
        (tmp_path / "out.journal").unlink(missing_ok=True)
        assert job.run(print, progress=progress).answered == 5
    with running("async", num_blocks=50) as engine:
        for progress in (None, True):
            assert len(engine.generate([[1], [2]], SamplingParams(max_tokens=3), progress=progress)) == 2


@pytest.mark.parametrize("redirected", ["<&- >&- 2>&-", "2>/dev/full", "2>&1 | true"])
def test_a_batch_that_nobody_hears_comes_to_its_end(tmp_path, redirected):
    """Its bad lines, and their exit code, are those of any batch."""
    write_lines(tmp_path / "in", ["junk", *plain(4), "junk"])
    command = f"({sys.executable} -m twostroke batch in -o out {' '.join(TINY)}; echo $? > code) {redirected}"
    path = os.pathsep.join(sys.path)
    subprocess.run(command, shell=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, check=True, timeout=120)
    assert (tmp_path / "code").read_text() == "1\n"
    assert len(read_lines(tmp_path / "out")) == 6


def test_no_file_gets_what_libraries_print(tmp_path):
    """A number of a stream that is not there would be that of the next file."""
    code = (
        "from twostroke.cli.streams import open_missing; open_missing(); f = open('f', 'w'); f.write(str(f.fileno()))"
    )
    command = f'{sys.executable} -c "{code}" <&- >&- 2>&-'
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(command, shell=True, cwd=tmp_path, env=env, check=True, timeout=120)
    assert int((tmp_path / "f").read_text()) > 2


def test_who_is_gone_is_told_once(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Gone())
    streams.tell("nobody hears this")
    assert sys.stderr.name == os.devnull
    streams.tell("nor this")
