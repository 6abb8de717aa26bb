"""The tables of results: medians, the comparison of the loops, and the documentation's page."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from twostroke import TwostrokeError
from twostroke.bench import registry, report
from twostroke.bench.report import BEGIN, END, newest, read_results, updated
from twostroke.bench.result import Result, Run
from twostroke.bench.summary import compare, medians, table_of
from twostroke.cli.main import app

ROOT = Path(__file__).parent.parent


def run(seconds: float, loop: str | None = "async", engine: str = "twostroke", **figures: object) -> Run:
    return Run(engine=engine, loop=loop, seconds=seconds, tokens=100, **figures)


def result(
    *runs: Run, benchmark: str = "article", gpu: str | None = "GPU X", date: str = "2026-01-02", **facts: object
) -> Result:
    return Result(benchmark=benchmark, gpu=gpu, workload=facts, runs=runs, date=date)


PUBLISHED = (run(300.6, "sync", gpu_active=0.76), run(234.5, "async", gpu_active=0.994))


def test_the_published_comparison() -> None:
    """24.0% idle under the synchronous loop, and 22% less time under the other: as in the publication."""
    comparison = compare(result(*PUBLISHED), price=5.0)
    assert comparison.saved == pytest.approx(0.22, abs=0.001)
    assert comparison.idle_cost(comparison.sync) == pytest.approx(28.8)
    table = comparison.table()
    assert table.rows == [
        ["sync", "300.60", "-", "76.0%", "$28.80"],
        ["async", "234.50", "22.0%", "99.4%", "$0.72"],
    ]
    assert table.columns[-1] == "idle cost per day at $5 per hour"


@pytest.mark.parametrize(
    "runs",
    [
        (run(1.0, "sync"),),
        (run(1.0, "async"), run(2.0, "async")),
        (run(1.0, "sync"), run(1.0, "async", engine="transformers 5")),
        tuple(run(1.0, loop, rows=rows) for loop in ("sync", "async") for rows in (32, 256)),
    ],
)
def test_there_is_no_comparison_without_both_loops_of_one_case(runs: tuple[Run, ...]) -> None:
    assert compare(result(*runs), 5.0) is None


def test_there_is_no_comparison_without_a_gpu() -> None:
    """On a CPU the loops share the cores, so the saving and the cost of an idle device would mean nothing."""
    assert compare(result(*PUBLISHED, gpu=None), 5.0) is None


def test_medians_keep_cases_apart() -> None:
    """32 and 256 rows, and streamed or not, are different questions, not repetitions."""
    runs = [
        run(seconds, rows=rows, waiting=waiting, extra={"streamed": streamed})
        for rows in (32, 256)
        for waiting in (0, 9)
        for streamed in (False, True)
        for seconds in (3.0, 1.0, 2.0)
    ]
    assert [(r.rows, r.waiting, r.extra["streamed"], r.seconds) for r in medians(runs)] == [
        (rows, waiting, streamed, 2.0) for rows in (32, 256) for waiting in (0, 9) for streamed in (False, True)
    ]


def test_only_columns_with_figures_are_shown() -> None:
    table = table_of(result(run(2.0, cpu_us={"plan": 9.04}, extra={"first_token_p99_ms": 123.45}), run(4.0, "sync")))
    assert table.columns == [
        "engine",
        "loop",
        "seconds",
        "tokens",
        "tokens/s",
        "plan us",
        "first token p99 ms",
        "speed",
    ]
    assert table.rows == [
        ["twostroke", "async", "2.00", "100", "50.0", "9.0", "123.5", "1.00"],
        ["twostroke", "sync", "4.00", "100", "25.0", "-", "-", "0.50"],
    ]


@pytest.mark.parametrize(("arguments", "cost"), [([], "$28.80"), (["--price", "10"], "$57.60")])
def test_the_command_prints_the_comparison(monkeypatch: pytest.MonkeyPatch, arguments: list[str], cost: str) -> None:
    monkeypatch.setattr(registry.Benchmark, "run", lambda self, options, say: result(*PUBLISHED))
    done = CliRunner().invoke(app, ["bench", "article", *arguments])
    assert done.exit_code == 0
    assert cost in done.stdout
    assert "22.0%" in done.stdout


def test_a_failed_peer_is_told_beside_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Result(benchmark="article", gpu=None, workload={}, runs=PUBLISHED, failures={"vllm": "out of memory"})
    monkeypatch.setattr(registry.Benchmark, "run", lambda self, options, say: failed)
    done = CliRunner().invoke(app, ["bench", "article"])
    assert done.exit_code == 0
    assert "234.50" in done.stdout
    assert "vllm failed: out of memory" in done.stdout


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = result(*PUBLISHED, run(1.0, rows=3, waiting=4, floor_seconds=0.5, extra={"streamed": True}))
    assert Result.read(written.write(tmp_path / "x.json")) == written


def test_the_newest_result_of_each_benchmark_and_machine_counts() -> None:
    results = [
        result(*PUBLISHED, benchmark="gsm8k"),
        result(*PUBLISHED, date="2026-01-03"),
        result(*PUBLISHED),
        result(*PUBLISHED, gpu="GPU Y"),
    ]
    kept = [(r.benchmark, r.gpu, r.date) for r in newest(results)]
    assert kept == [
        ("article", "GPU X", "2026-01-03"),
        ("article", "GPU Y", "2026-01-02"),
        ("gsm8k", "GPU X", "2026-01-02"),
    ]


def test_a_run_with_new_weights_is_another_benchmark(tmp_path: Path) -> None:
    """Its file and its table stand beside those of the run without."""
    plain, updated = result(*PUBLISHED), result(*PUBLISHED, date="2026-01-03", update_every=512)
    assert newest([updated, plain]) == [plain, updated]
    assert report.section(updated).startswith("### article, new weights every 512 steps, GPU X")
    assert plain.write(tmp_path).name == "article-gpu-x-2026-01-02.json"
    assert updated.write(tmp_path).name == "article-new-weights-every-512-steps-gpu-x-2026-01-03.json"


def test_a_run_of_both_implementations_is_another_benchmark(tmp_path: Path) -> None:
    plain, both = result(*PUBLISHED, impl="auto"), result(*PUBLISHED, date="2026-01-03", impl="both")
    assert newest([both, plain]) == [plain, both]
    assert both.write(tmp_path).name == "article-both-implementations-gpu-x-2026-01-03.json"


def test_a_run_of_the_deterministic_mode_is_another_benchmark(tmp_path: Path) -> None:
    plain = result(run(2.5, "async", case="auto"))
    mode = result(run(2.5, "async", case="auto"), run(3.0, "async", case="deterministic"), date="2026-01-03")
    assert newest([mode, plain]) == [plain, mode]
    assert mode.write(tmp_path).name == "article-deterministic-mode-gpu-x-2026-01-03.json"


def test_the_page_changes_between_its_marks_only(tmp_path: Path) -> None:
    result(*PUBLISHED).write(tmp_path / "article.json")
    (tmp_path / "other.json").write_text(json.dumps({"benchmark": "something else"}))
    page = tmp_path / "page.md"
    page.write_text(f"above\n{BEGIN}\nstale\n{END}\nbelow\n")
    report.main(tmp_path, page)
    text = page.read_text()
    assert text.startswith(f"above\n{BEGIN}\n")
    assert text.endswith(f"{END}\nbelow\n")
    assert "stale" not in text
    assert "| twostroke | async | 234.50 |" in text
    assert "| async | 234.50 | 22.0% | 99.4% | $0.72 |" in text
    report.main(tmp_path, page)
    assert page.read_text() == text


@pytest.mark.parametrize("page", ["", BEGIN, END, f"{END}\n{BEGIN}"])
def test_a_page_without_marks_is_refused(page: str) -> None:
    with pytest.raises(TwostrokeError, match="end of tables"):
        updated(page, [])


def test_the_documentation_is_up_to_date_with_the_results() -> None:
    """If this fails: make tables."""
    page = (ROOT / "docs" / "performance.md").read_text()
    assert updated(page, read_results(ROOT / "bench" / "results")) == page


SIMULATED = ROOT / "bench" / "results" / "simulated"
ROUTINGS = {"least-loaded": "least loaded", "prefix-aware": "by beginnings"}


def row_of(simulated: dict) -> str:
    """The row of a simulation of conversations in the table of `docs/scale.md`."""
    (one,) = simulated["candidates"]
    times = ("first_token_p50", "first_token_p99", "inter_token_p99")
    cells = [
        one["replicas"],
        f"{simulated['traffic']['rate']:g}",
        ROUTINGS[simulated["routing"]],
        f"{one['cached_share']:.1%}",
        *(f"{1e3 * one[name]:.0f} ms" for name in times),
        f"{one['busy_share']:.1%}",
    ]
    return f"  | {' | '.join(map(str, cells))} |"


def test_the_table_of_simulated_routings_is_that_of_its_files() -> None:
    rows = [row_of(json.loads(file.read_text())) for file in SIMULATED.glob("turns-*.json")]
    lines = (ROOT / "docs" / "scale.md").read_text().splitlines()
    assert sorted(line for line in lines if any(f"| {name} |" in line for name in ROUTINGS.values())) == sorted(rows)


def test_the_figures_of_the_simulator_are_those_of_its_files() -> None:
    page = " ".join((ROOT / "docs" / "simulate.md").read_text().split())
    (million,) = json.loads((SIMULATED / "million-4-least-loaded.json").read_text())["candidates"]
    took = million["simulated_in"]
    assert (
        f"{million['output_tokens'] / 1e6:.0f} million tokens, {million['steps'] / 1e6:.1f} million steps) took "
        f"{took['cpu_seconds']:.0f} seconds of one core."
    ) in page
    assert f"by the clock it was {took['wall_seconds'] / 60:.0f} minutes" in page
    for benchmark in ("gsm8k", "mixed"):
        (file,) = SIMULATED.parent.glob(f"simulate-{benchmark}-*.json")
        (one,) = json.loads(file.read_text())["runs"]
        way = "fast" if one["error"] > 0 else "slow"
        assert f"`{benchmark}` " in page
        assert f"{abs(one['error']):.1%} too {way}, {one['tokens_per_s']:,.0f}" in page
        assert f"tokens/s for {one['measured_tokens_per_s']:,.0f}" in page
    same = [*SIMULATED.parent.glob("simulate-rollouts-*.json"), *SIMULATED.parent.glob("simulate-article-*.json")]
    errors = [json.loads(file.read_text())["runs"][0]["error"] for file in same]
    assert len(errors) == 4
    assert min(errors) < 0 < max(errors)
    assert f"from {-min(errors):.1%} too slow to {max(errors):.1%} too fast" in page
