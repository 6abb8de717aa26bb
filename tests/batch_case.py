"""What the tests of batches share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from twostroke.cli.main import app
from twostroke.jobs import batch_output
from twostroke.jobs.batch_job import BatchJob

ENGINE = {"model": "tiny", "device": "cpu", "num_blocks": 200, "max_rows": 8, "seed": 3}


def write_lines(path: Path, lines: list[Any]) -> Path:
    """Write objects as JSON, and strings as they are."""
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    assert not data or data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def plain(count: int, tokens: int = 6) -> list[Any]:
    """Plain lines of different lengths, every third of which is sampled."""
    return [
        {"prompt": [1 + n % 97, 5, 2], "max_tokens": 1 + (7 * n) % (2 * tokens), "ignore_eos": True}
        | {"temperature": 1.0 if n % 3 else 0.0, "return_token_ids": True}
        for n in range(count)
    ]


def tokens_by_id(path: Path) -> dict[str, list[list[int]]]:
    """The tokens of every answer; each id may be there once."""
    answers = read_lines(path)
    found = {
        line["custom_id"]: [choice["token_ids"] for choice in line["response"]["body"]["choices"]] for line in answers
    }
    assert len(found) == len(answers), "a request is there twice"
    return found


def run_in_child(source: Path, output: Path, file_bytes: int | None) -> None:
    """Answer a batch in small groups; the body of a process of its own.

    Args:
        file_bytes: no file may become longer: the system refuses that as it does on a full disk.
    """
    if file_bytes is not None:
        import resource
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    torch.set_num_threads(1)
    batch_output.GROUP_LINES = 3
    BatchJob(source=source, output=output, engine=ENGINE).run(print)


TINY = ("--model", "tiny", "--device", "cpu", "--num-blocks", "64", "--max-rows", "8", "--engine-seed", "1")


def run(*arguments):
    """`twostroke batch` with these arguments."""
    return CliRunner().invoke(app, ["batch", *map(str, arguments)])
