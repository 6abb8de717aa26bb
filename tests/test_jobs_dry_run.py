"""`twostroke batch --dry-run`: what it counts, and what it makes of a benchmark's result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from batch_case import TINY, plain, run, write_lines
from typer.testing import CliRunner

from twostroke import InvalidRequest
from twostroke.bench.result import Result, Run
from twostroke.cli.main import app
from twostroke.cli.measured_speed import read_speed
from twostroke.simulate.shape import cost_of_preset


def test_a_dry_run_of_stdin_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["batch", "-", *TINY, "--dry-run"], input=b'{"prompt": [3, 4]}')
    assert result.exit_code == 0, result.output
    assert "1 request, 0 of which cannot be answered\n2 prompt tokens" in result.stdout
    assert not list(tmp_path.iterdir())


def test_a_dry_run_counts_and_estimates(tmp_path):
    """The benchmark computed 1 prompt token for 5 output tokens; what goes beyond that takes its time, too."""
    lines = [{"prompt": [1, 2, 3], "max_tokens": 10, "n": 2}, {"prompt": [1] * 12, "max_tokens": 5}, "junk"]
    measured = Run(engine="twostroke", loop="async", seconds=2, tokens=10)
    bench = Result(benchmark="small", gpu="X", workload={"model": "tiny", "prompt_tokens": 2}, runs=(measured,))
    flags = (*TINY, "--dry-run", "--bench", bench.write(tmp_path / "bench.json"), "--price", 7200)
    source = write_lines(tmp_path / "in", lines)
    result = run(source, *flags)
    assert result.exit_code == 1, result.output
    assert result.stdout.splitlines() == [
        "3 requests, 1 of which cannot be answered",
        "15 prompt tokens, at most 25 output tokens",
        "about 7 s, $14.00 if no text ends early: 1 engine at 5 output tokens/s (small, tiny, X)",
    ]
    assert "line 3: the line is not JSON" in result.stderr
    assert not (tmp_path / "out").exists()
    many = run(source, "-o", tmp_path / "out", *flags, "--ray", "auto", "--engines", "7").stdout
    assert "about 1 s, $2.00 if no text ends early: 7 engines at" in many
    assert "give --bench FILE" in run(source, "-o", tmp_path / "out", *TINY, "--dry-run").stdout


def test_where_ceilings_are_known_prompts_are_computed_as_far_from_them_as_the_run_was(tmp_path):
    """Here half as fast as they allow, which is 2000 tokens a second."""
    run = Run(engine="twostroke", loop="async", seconds=2, tokens=10, floor_seconds=1)
    facts = {"model": "tiny", "prompt_tokens": 20, "flop_per_s": 2000 * cost_of_preset("tiny").token_flop}
    bench = Result(benchmark="small", gpu="X", workload=facts, runs=(run,))
    speed = read_speed(bench.write(tmp_path / "bench.json"))
    assert speed.seconds(100, 50) == pytest.approx(10)
    assert speed.seconds(100 + 7000, 50) == pytest.approx(10 + 7)


@pytest.mark.parametrize(
    ("facts", "figures", "message"),
    [
        ({"flop_per_s": None}, {}, "flop_per_s=None must be a number > 0"),
        ({"flop_per_s": 0}, {}, "flop_per_s=0 must be"),
        ({"prompt_tokens": "12"}, {}, "prompt_tokens='12' must be"),
        ({"prompt_tokens": 10**400}, {}, "prompt_tokens=1000.* must be"),
        ({"model": "a-folder"}, {}, "model='a-folder' must be one of the presets"),
        ({"model": ["tiny"]}, {}, "model=.* must be one of the presets"),
        ({}, {"tokens": 0}, "tokens=0 must be"),
        ({}, {"seconds": 0}, "seconds=0 must be"),
        ({}, {"seconds": float("nan")}, "seconds=nan must be"),
        ({}, {"seconds": -2}, "seconds=-2 must be"),
        ({}, {"seconds": "2"}, "is not a result"),
        ({}, {"floor_seconds": 0}, "floor_seconds=0 must be"),
    ],
)
def test_a_figure_that_cannot_be_is_named(tmp_path, facts, figures, message):
    run = Run(engine="twostroke", loop="async", seconds=2, tokens=10, floor_seconds=1)
    known = {"model": "tiny", "prompt_tokens": 20, "flop_per_s": 1e9}
    file = Result(benchmark="small", gpu="X", workload=known, runs=(run,)).write(tmp_path / "bench.json")
    values = json.loads(file.read_text())
    values["workload"] |= facts
    values["runs"][0] |= figures
    file.write_text(json.dumps(values))
    with pytest.raises(InvalidRequest, match=rf"^bench='.*bench\.json'.*{message}"):
        read_speed(file)


@pytest.mark.parametrize("name", ["cpu-step", "admission", "grammar-masks"])
def test_a_result_that_answers_no_requests_tells_no_speed(name):
    (file,) = (Path(__file__).parent.parent / "bench" / "results").glob(f"{name}-*.json")
    with pytest.raises(InvalidRequest, match=f"'{name}' does not tell how fast"):
        read_speed(file)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_dry_run_knows_how_long_a_text_can_get(saved, tmp_path, family):
    """Whichever kind of model will run, and whatever its configuration calls the number of its positions."""
    lines = write_lines(tmp_path / "in", [{"prompt": [1, 2, 3], "max_tokens": 1000}, {"prompt": [[1], [1] * 256]}])
    result = run(lines, "--model", saved(family)[0], "--dry-run")
    assert result.exit_code == 1, result.output
    assert "2 requests, 1 of which cannot be answered" in result.stdout
    assert "3 prompt tokens, at most 253 output tokens" in result.stdout
    assert "line 2: prompt of 256 tokens leaves no room for output: max_model_len=256" in result.stderr


def test_bench_needs_a_result_and_a_dry_run(tmp_path):
    source = write_lines(tmp_path / "in", plain(1))
    assert "for --dry-run alone" in run(source, "-o", tmp_path / "o", "--bench", source).stderr
    result = run(source, "-o", tmp_path / "o", "--model", "tiny", "--dry-run", "--bench", source)
    assert result.exit_code == 2
    assert "is not a result of twostroke bench" in result.stderr


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"{}",
        b"[]",
        b"3",
        b"5",
        b"[[]]",
        b'{"runs": 5}',
        b'{"runs": [3]}',
        b'{"runs": [5]}',
        b'{"runs": {}}',
        b"junk",
        b"\xff",
        b"\xed\xa0\x80",
    ],
)
def test_a_file_that_is_no_result_is_called_that(tmp_path, content):
    (tmp_path / "city.json").write_bytes(content)
    with pytest.raises(InvalidRequest, match=r"^bench='.*city\.json' is not a result of twostroke bench, as --json"):
        read_speed(tmp_path / "city.json")


def test_a_result_that_is_missing_is_called_that(tmp_path):
    with pytest.raises(InvalidRequest, match=r"^bench='.*absent\.json' cannot be read: No such file or directory$"):
        read_speed(tmp_path / "absent.json")
