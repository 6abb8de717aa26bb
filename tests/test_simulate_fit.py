"""The step-time model's fit, the simulated benchmarks, and the command."""

import inspect
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from twostroke import Engine, InvalidConfig
from twostroke.bench.offline import cost_of
from twostroke.bench.result import Result, Run
from twostroke.cli.main import app
from twostroke.cli.simulate import SettingsFlags, TrafficFlags
from twostroke.simulate.benchmarks import KNOWN, simulate_benchmark
from twostroke.simulate.fit import fit_results, least_squares, loops_of, read_result, step_seconds, stretch
from twostroke.simulate.search import parse_variants
from twostroke.simulate.settings import Settings
from twostroke.simulate.shape import cost_of_preset
from twostroke.simulate.step_time import StepTime
from twostroke.simulate.traffic import Traffic

RESULTS = Path(__file__).parent.parent / "bench" / "results"


def newest(name: str) -> Path:
    return sorted(RESULTS.glob(f"{name}-nvidia-h200-*.json"))[-1]


ARTICLE, GSM8K, SMALL = newest("article-512"), newest("gsm8k"), newest("small")
MEMORY = 130e9
LLAMA = cost_of_preset("llama-3.1-8b")
TRUE = StepTime(LLAMA, 4.3e12, 7.4e14, read_factor=1.1, compute_factor=1.4, per_step=8e-4, host=6e-4)


def test_a_preset_costs_what_the_model_says() -> None:
    with Engine("tiny", device="cpu", num_blocks=16, max_rows=2) as engine:
        assert cost_of_preset("tiny", dtype_bytes=4) == cost_of(engine.model)


def test_qwen3_and_llama_have_the_sizes_that_results_state() -> None:
    for path, model in ((ARTICLE, "llama-3.1-8b"), (SMALL, "qwen3-0.6b")):
        facts = read_result(path).workload
        assert facts["model"] == model
        assert cost_of_preset(model).kv_bytes == facts["cache_bytes"] / facts["num_blocks"] / 16
    assert cost_of_preset("qwen3-0.6b").weight_bytes == 1_192_099_840


# The fit


def invented(benchmark: str, truth: StepTime = TRUE, gpu: str = "a GPU") -> Result:
    """The result of a machine that follows the model."""
    runs = []
    for loop in ("sync", "async"):
        one = simulate_benchmark(benchmark, truth, loop, {}, MEMORY)
        per_step = 1e3 * one.seconds / one.steps
        active = 1 - 1e3 * truth.host / per_step if loop == "sync" else 1.0
        figures = {"seconds": one.seconds, "tokens": one.tokens, "ms_per_step": per_step, "gpu_active": active}
        runs.append(Run(engine="twostroke", loop=loop, **figures))
    ceilings = {"read_bytes_per_s": truth.read_bytes_per_s, "flop_per_s": truth.flop_per_s}
    return Result(benchmark=benchmark, gpu=gpu, workload=ceilings, runs=tuple(runs))


@pytest.mark.parametrize(("third", "of_factors", "of_rest"), [("article", 0.001, 0.01), ("mixed", 0.1, 0.4)])
def test_three_results_of_a_machine_that_follows_the_model_give_it_back(
    third: str, of_factors: float, of_rest: float
) -> None:
    """Closely, unless there were times when the machine had nothing to do: they count as its steps'."""
    fit = fit_results([invented(name) for name in ("article-512", "gsm8k", third)], MEMORY)
    assert fit.error < 0.01
    for name, precision in (("read_factor", of_factors), ("compute_factor", of_factors), ("per_step", of_rest)):
        assert getattr(fit.step_time, name) == pytest.approx(getattr(TRUE, name), rel=precision)
    assert fit.step_time.host == pytest.approx(TRUE.host, rel=0.05)
    ahead = simulate_benchmark("rollouts-1024", fit.step_time, "async", {}, MEMORY)
    truth = simulate_benchmark("rollouts-1024", TRUE, "async", {}, MEMORY)
    assert ahead.tokens_per_s == pytest.approx(truth.tokens_per_s, rel=0.02)


def test_one_result_decides_on_one_factor() -> None:
    fit = fit_results([read_result(ARTICLE)], MEMORY)
    assert fit.step_time.per_step == 0.0
    assert 1.0 < fit.step_time.read_factor == fit.step_time.compute_factor < 2.0
    assert (fit.numbers, fit.error) == (1, pytest.approx(0, abs=1e-9))


def test_so_do_many_whose_steps_are_alike() -> None:
    """Else what decode steps compute, next to nothing, would tell how long prompts take."""
    fit = fit_results([read_result(newest(name)) for name in ("article-512", "rollouts-2048", "article")], MEMORY)
    assert fit.step_time.per_step == 0.0
    assert 1.0 < fit.step_time.read_factor == fit.step_time.compute_factor < 2.0
    assert (fit.numbers, len(fit.points)) == (1, 3)
    assert 0.01 < fit.error < 0.1


def test_two_results_decide_on_what_computes_and_on_the_step() -> None:
    fit = fit_results([read_result(ARTICLE), read_result(GSM8K)], MEMORY)
    assert fit.step_time.read_factor == 1.0
    assert fit.step_time.compute_factor > 1.1
    assert fit.step_time.per_step > 1e-4
    assert (fit.numbers, fit.error) == (2, pytest.approx(0, abs=1e-9))


def test_no_factor_beats_a_ceiling() -> None:
    reading, computing, floor = np.array([4.0, 3.0, 5.0]), np.array([0.0, 4.0, 2.0]), np.array([4.0, 7.0, 7.0])
    for count in (1, 2, 3):
        assert stretch(reading[:count], computing[:count], 0.9 * floor[:count]) == (1.0, 1.0, 0.0, count)
    assert stretch(reading, computing, floor + 0.5) == pytest.approx((1.0, 1.0, 0.5, 3))


def test_least_squares_never_gives_a_negative_weight() -> None:
    rng = np.random.default_rng(0)
    for count in (1, 2, 3):
        for _ in range(200):
            terms = rng.uniform(0, 1, (int(rng.integers(1, 6)), count))
            sums = rng.uniform(-0.5, 1, len(terms))
            weights = least_squares(terms, sums)
            assert (weights >= 0).all()
            error = ((terms @ weights - sums) ** 2).sum()
            for other in rng.uniform(0, 3, (50, count)):
                assert error <= ((terms @ other - sums) ** 2).sum() + 1e-9


def test_host_time_is_what_the_synchronous_loop_does_not_hide() -> None:
    def seconds(*runs: tuple[str, float, float | None], benchmark: str = "small") -> tuple[float, float | None]:
        made = [
            Run(engine="twostroke", loop=loop, seconds=1.0, tokens=1, ms_per_step=ms, gpu_active=active)
            for loop, ms, active in runs
        ]
        return step_seconds(Result(benchmark=benchmark, gpu="x", workload={}, runs=tuple(made)))

    both = ("sync", 6.0, 0.8), ("async", 5.0, 1.0)
    assert seconds(*both) == pytest.approx((5e-3, 1e-3))
    assert seconds(*both, benchmark="mixed") == pytest.approx((5e-3, 1.2e-3)), "whose steps are not alike"
    assert seconds(("async", 5.0, 1.0)) == (pytest.approx(5e-3), None)
    assert seconds(("sync", 6.0, 0.8)) == pytest.approx((4.8e-3, 1.2e-3))


def test_results_of_two_models_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="one model and one GPU"):
        fit_results([read_result(ARTICLE), read_result(SMALL)], MEMORY)


# The benchmarks


@pytest.mark.parametrize("path", [ARTICLE, SMALL], ids=["article-512", "small"])
def test_a_benchmark_takes_the_steps_that_the_engine_took(path: Path) -> None:
    result = read_result(path)
    fit = fit_results([result], MEMORY)
    for loop, run in loops_of(result).items():
        one = simulate_benchmark(result.benchmark, fit.step_time, loop, result.workload, MEMORY)
        assert one.steps == round(1e3 * run.seconds / run.ms_per_step)
        assert one.tokens == run.tokens
        assert one.tokens_per_s == pytest.approx(run.tokens_per_s, rel=0.01)


def foretold(benchmark: str, *fitted_to: Path) -> None:
    """As a user would have it: by the results of other benchmarks."""
    result = read_result(newest(benchmark))
    fit = fit_results([read_result(path) for path in fitted_to], MEMORY)
    for loop, measured in loops_of(result).items():
        one = simulate_benchmark(benchmark, fit.step_time, loop, result.workload, MEMORY)
        assert one.tokens_per_s == pytest.approx(measured.tokens_per_s, rel=0.1)
        for name in one.extra:
            assert one.extra[name] == pytest.approx(measured.extra[name], rel=0.1)
        if benchmark != "mixed":
            assert one.steps == round(1e3 * measured.seconds / measured.ms_per_step)


def test_one_result_foretells_another_benchmark_within_a_tenth() -> None:
    foretold("gsm8k", ARTICLE)


@pytest.mark.parametrize("benchmark", ["mixed", "rollouts-1024", "rollouts-2048", "rollouts-4096", "article"])
def test_two_results_foretell_others_within_a_tenth(benchmark: str) -> None:
    foretold(benchmark, ARTICLE, GSM8K)


def test_mixed_arrivals_keep_their_pace() -> None:
    one = simulate_benchmark("mixed", TRUE, "async", {}, MEMORY)
    assert 9.9 < one.seconds < 10.3, "100 arrivals, a tenth of a second apart"
    assert one.tokens > 100 + 64 * 100
    assert one.extra["inter_token_p50_ms"] < one.extra["inter_token_p99_ms"] < one.extra["first_token_p50_ms"]
    smaller = simulate_benchmark("mixed", TRUE, "async", {"max_step_tokens": 320}, MEMORY)
    assert smaller.extra["inter_token_p99_ms"] < one.extra["inter_token_p99_ms"]
    assert smaller.extra["first_token_p50_ms"] > one.extra["first_token_p50_ms"]


def test_what_cannot_be_simulated_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="'cpu-step' cannot be simulated"):
        simulate_benchmark("cpu-step", TRUE, "async", {}, MEMORY)
    assert "mixed" in KNOWN


# The command


def run(*arguments: object):
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


FIT = ("--fit", ARTICLE)
FEW = ("--requests", 60, "--rate", 20, "--prompt-tokens", "50-400", "--output-tokens", "20-60")


def test_flags_have_the_names_and_defaults_of_what_they_set() -> None:
    of_engine = {name: p.default for name, p in inspect.signature(Engine).parameters.items()}
    for f in fields(Settings):
        assert f.name == "max_model_len" or f.default == of_engine[f.name], f.name
    assert SettingsFlags() == SettingsFlags(**{f.name: f.default for f in fields(Settings)})
    assert {f.name for f in fields(TrafficFlags)} == {f.name for f in fields(Traffic)}
    assert TrafficFlags().traffic() == Traffic(requests=TrafficFlags().requests)


def test_it_prints_a_row_per_number_of_replicas_and_writes_both_files(tmp_path: Path) -> None:
    result = run(
        *FIT, *FEW, "--replicas", "1..2", "--price", 36, "--json", tmp_path / "x.json", "--png", tmp_path / "x.png"
    )
    assert result.exit_code == 0, result.output
    assert "fit: article-512 measured " in result.stdout
    written = json.loads((tmp_path / "x.json").read_text())
    assert [one["replicas"] for one in written["candidates"]] == [1, 2]
    assert (written["routing"], written["traffic"]["requests"]) == ("least-loaded", 60)
    assert set(written["simulate"]) >= {"date", "commit", "machine", "gpu"}
    for one in written["candidates"]:
        assert (one["requests"], one["refused"]) == (60, 0)
        assert one["cost"] == pytest.approx(36 * one["replicas"] * one["seconds"] / 3600)
        assert f"{one['tokens_per_s']:.1f}" in result.stdout
        assert f"replicas={one['replicas']}: 60 requests, " in result.stderr
        assert f"simulated in {one['simulated_in']['wall_seconds']:.1f} s" in result.stderr
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--bench", "gsm8k", "--requests", 10), "requests=10 has no use with --bench"),
        (("--bench", "gsm8k", "--max-rows", 8), "max_rows=8 has no use with --bench"),
        (("--bench", "gsm8k", "--sweep", "max_rows=2,4"), "sweep=['max_rows=2,4'] has no use with --bench"),
        (("--bench", "gsm8k", "--png", "x.png"), "png='x.png' has no use with --bench"),
        (("--against", ARTICLE, "--model", "qwen3-0.6b"), "model='qwen3-0.6b' has no use with --bench or --against"),
        (("--trace", "x.jsonl", "--rate", 3), "rate=3.0 has no use with --trace"),
        (("--hash-tokens", 4), "hash_tokens=4 has no use without --trace"),
        (("--burst", 3), "burst=3 has no use with --pattern poisson"),
    ],
)
def test_a_flag_that_would_change_nothing_is_refused(flags: tuple[object, ...], said: str) -> None:
    result = run(*FIT, *flags)
    assert result.exit_code != 0
    assert said in result.output + str(result.exception)


def test_targets_end_the_search_and_name_the_answer() -> None:
    result = run(*FIT, *FEW, "--replicas", "1..9", "--rate", 200, "--max-rows", 8, "--target-ttft-ms", 400)
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines() if line[:1].isdigit() and ":" not in line]
    met = [float(row[5]) <= 400 for row in rows]
    assert met == [False] * (len(met) - 1) + [True]
    assert 1 < len(met) < 9
    assert f"replicas={len(met)}: the fewest that meet the targets" in result.stdout
    assert "none meets the targets" in run(*FIT, *FEW, "--target-ttft-ms", 0.1).stdout


def test_a_sweep_changes_the_settings_that_it_names() -> None:
    assert parse_variants(["max-rows=4,8", "policy=fcfs", "prefix_cache=false", "max_prompt_ms=none,2.5"]) == [
        {"max_rows": rows, "policy": "fcfs", "prefix_cache": False, "max_prompt_ms": ms}
        for rows in (4, 8)
        for ms in (None, 2.5)
    ]
    result = run(*FIT, *FEW, "--sweep", "max_rows=2,16")
    assert result.exit_code == 0, result.output
    slow, fast = (line.split() for line in result.stdout.splitlines() if line.startswith("1 "))
    assert (slow[1], fast[1]) == ("2", "16")
    assert float(slow[5]) > float(fast[5])


def test_it_sets_a_benchmark_beside_its_result(tmp_path: Path) -> None:
    result = run(*FIT, "--bench", "article-512", "--against", ARTICLE, "--json", tmp_path / "x.json")
    assert result.exit_code == 0, result.output
    runs = json.loads((tmp_path / "x.json").read_text())["runs"]
    assert [one["loop"] for one in runs] == ["sync", "async"]
    assert all(abs(one["error"]) < 0.01 for one in runs)
    alone = run(*FIT, "--bench", "rollouts-1024")
    assert alone.exit_code == 0
    assert "rollouts" not in alone.stdout.splitlines()[0]


def test_a_trace_is_simulated_too(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"arrival": 0, "prompt_tokens": 9, "output_tokens": 4}\n' * 5)
    result = run(*FIT, "--trace", tmp_path / "t.jsonl", "--model", "qwen3-0.6b")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].split()[:3] == ["1", "5", "0"]
    assert "refused" not in result.stderr


def test_it_says_why_requests_are_refused(tmp_path: Path) -> None:
    lines = ['{"arrival": 0, "prompt_tokens": 9, "output_tokens": 4}']
    lines += ['{"arrival": 1, "prompt_tokens": 9, "output_tokens": 4, "priority": 1}'] * 2
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    result = run(*FIT, "--trace", tmp_path / "t.jsonl")
    assert result.stdout.splitlines()[-1].split()[:3] == ["1", "1", "2"]
    assert "2 refused, the first because priority=1 " in result.stderr
    assert "refused" not in run(*FIT, "--trace", tmp_path / "t.jsonl", "--policy", "priority").stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--replicas", "8..1"), "replicas='8..1'"),
        (("--routing", "random"), "routing='random'"),
        (("--rate", "0"), "rate=0"),
        (("--prompt-tokens", "many"), "prompt_tokens='many'"),
        (("--max-rows", "0"), "max_rows=0"),
        (("--sweep", "colour=red"), "'colour' is none of"),
        (("--sweep", "slots=two"), "'two' is no value of slots"),
        (("--bench", "cpu-step"), "cannot be simulated"),
        (("--bench", "small"), "runs qwen3-0.6b"),
        (("--bench", "gsm8k", "--against", str(ARTICLE)), "is a result of 'article-512'"),
        (("--model", "gpt"), "model='gpt'"),
        (("--memory-bytes", "1e9"), "bytes for the cache"),
        (("--fit", str(min(RESULTS.glob("cpu-demo-*.json")))), "is none of"),
        (("--fit", "missing.json"), "missing.json cannot be read: No such file"),
        (("--fit", __file__), "is not a result of twostroke bench"),
        (("--trace", "missing.jsonl"), "missing.jsonl cannot be read: No such file"),
        (("--memory-bytes", "inf"), "--memory-bytes"),
        (("--hash-tokens", "1000000000000"), "--hash-tokens"),
    ],
)
def test_bad_input_is_refused_by_name(arguments: tuple[str, ...], message: str) -> None:
    result = run(*FIT, *arguments)
    assert result.exit_code in (1, 2)
    assert message in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"workload": []}, "read_bytes_per_s=None"),
        ({"workload": {"read_bytes_per_s": 0, "flop_per_s": 1}}, "read_bytes_per_s=0"),
        ({"ms_per_step": float("nan")}, "ms_per_step=nan"),
        ({"ms_per_step": "5"}, "ms_per_step='5'"),
        ({"max_rows": 0}, "max_rows=0"),
        ({"runs": 3}, "is not a result"),
        ({"runs": [3]}, "is not a result"),
    ],
)
def test_a_result_that_tells_nothing_is_refused_by_name(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    values, path = json.loads(ARTICLE.read_text()), tmp_path / "changed.json"
    values |= {name: value for name, value in changed.items() if name in values}
    if "ms_per_step" in changed:
        values["runs"] = [run | changed for run in values["runs"]]
    if "max_rows" in changed:
        values["workload"] |= changed
    path.write_text(json.dumps(values))
    result = run("--fit", path)
    assert message in result.output
    assert "Traceback" not in result.output


@pytest.mark.filterwarnings("error")
def test_nothing_is_drawn_and_told_of_an_empty_trace(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    result = run(*FIT, "--trace", tmp_path / "empty.jsonl", "--json", tmp_path / "e.json", "--png", tmp_path / "e.png")
    assert result.exit_code == 0

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    (figures,) = json.loads((tmp_path / "e.json").read_text(), parse_constant=refuse)["candidates"]
    assert (figures["requests"], figures["first_token_p99"], figures["tokens_per_s"]) == (0, None, 0.0)
    assert (tmp_path / "e.png").stat().st_size


def test_a_result_of_another_gpu_is_not_mixed_in() -> None:
    ours = read_result(ARTICLE)
    with pytest.raises(InvalidConfig, match="one GPU"):
        fit_results([ours, replace(ours, gpu="another")], MEMORY)
