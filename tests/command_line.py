"""The command line, for its tests."""

import json
from pathlib import Path

from typer.testing import CliRunner

from twostroke.cli.main import app


def run(*arguments: str):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def lines_file(tmp_path: Path, *lines: object, name: str = "prompts.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path
