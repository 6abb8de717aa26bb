"""Benchmarks: the result file, the table, and the peers of `cpu-demo`."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from twostroke import Engine, InvalidConfig, SamplingParams, TwostrokeError
from twostroke.bench import admission, cpu_demo, registry
from twostroke.bench.measure import measure
from twostroke.bench.options import BenchOptions
from twostroke.bench.result import Result, Run, compared, current_commit
from twostroke.cli.main import app


def result(*runs: Run, gpu: str | None = None) -> Result:
    return Result(benchmark="stub", gpu=gpu, workload={"requests": 2}, runs=runs)


def stub_run(seconds: float, engine: str = "twostroke", loop: str | None = "async", **figures: object) -> Run:
    return Run(engine=engine, loop=loop, seconds=seconds, tokens=100, **figures)


def test_the_file_has_the_promised_keys(tmp_path: Path) -> None:
    path = result(stub_run(4.0, floor_seconds=3.0, cpu_us={"plan": 9.0})).write(tmp_path / "new" / "x.json")
    read = json.loads(path.read_text())
    assert set(read) == {"benchmark", "date", "commit", "gpu", "machine", "versions", "workload", "runs", "failures"}
    assert read["gpu"] is None
    assert read["machine"]["cpu"]
    assert (
        read["versions"]["torch"] == torch.__version__.split("+")[0] or read["versions"]["torch"] == torch.__version__
    )
    (run,) = read["runs"]
    assert run == {
        "engine": "twostroke",
        "loop": "async",
        "seconds": 4.0,
        "tokens": 100,
        "tokens_per_s": 25.0,
        "ms_per_step": None,
        "gpu_active": None,
        "kernel_active": None,
        "kernel_us": None,
        "kernel_runs": None,
        "bytes_per_s": None,
        "floor_seconds": 3.0,
        "floor_share": 0.75,
        "cpu_us": {"plan": 9.0},
        "case": None,
        "relative": None,
        "rows": None,
        "waiting": None,
        "extra": {},
    }


def test_a_folder_gets_a_file_named_after_benchmark_machine_and_date(tmp_path: Path) -> None:
    path = result(stub_run(1.0), gpu="NVIDIA H200 (SXM)").write(tmp_path / "results")
    assert path.parent == tmp_path / "results"
    assert re.fullmatch(r"stub-nvidia-h200-sxm-\d{4}-\d\d-\d\d\.json", path.name)


def test_a_package_that_a_benchmark_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "twostroke.bench.serving", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client.parser", None)
    with pytest.raises(InvalidConfig, match=r"'serving' needs the package prometheus_client\.parser"):
        registry.find("serving").run(BenchOptions(repetitions=1), print)


class StubModule:
    """A benchmark whose middle repetition took 2 s under one loop; its peer ran once."""

    @staticmethod
    def run(name: str, options: BenchOptions, say) -> Result:
        say(f"measuring {name}")
        times = [3.0, 1.0, 2.0][: options.repetitions]
        return result(*(stub_run(t, gpu_active=0.5) for t in times), stub_run(1.6, engine="peer 1.0", loop=None))


@pytest.fixture
def stub_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.BENCHMARKS, "stub", registry.Benchmark("stub", "a stub", "stub", 3))
    monkeypatch.setitem(sys.modules, "twostroke.bench.stub", StubModule)


@pytest.mark.usefixtures("stub_benchmark")
def test_the_table_shows_medians_and_the_file_every_repetition(tmp_path: Path) -> None:
    path = tmp_path / "stub.json"
    done = CliRunner().invoke(app, ["bench", "stub", "--json", str(path)])
    assert done.exit_code == 0
    assert re.search(r"twostroke +async +2\.00 +100 +50\.0 +50\.0% +0\.80\n", done.stdout)
    assert re.search(r"peer 1\.0 +- +1\.60 +100 +62\.5 +- +1\.00\n", done.stdout)
    assert [run["seconds"] for run in json.loads(path.read_text())["runs"]] == [3.0, 1.0, 2.0, 1.6]


@pytest.mark.usefixtures("stub_benchmark")
def test_the_commit_can_be_named_where_there_is_no_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "stub.json"
    for found, expected in ((None, "abc123"), ("def456", "def456")):
        monkeypatch.setattr("twostroke.bench.result.current_commit", lambda found=found: found)
        CliRunner().invoke(app, ["bench", "stub", "--json", str(path), "--commit", "abc123"])
        assert json.loads(path.read_text())["commit"] == expected


@pytest.mark.parametrize("copied", ["tracked", "ignored", "beside"])
def test_a_checkout_that_only_holds_the_package_does_not_name_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: str
) -> None:
    package = tmp_path / "copy" / "twostroke" / "bench"
    package.mkdir(parents=True)
    (package / "result.py").touch()
    (tmp_path / ".gitignore").write_text("copy\n" if copied == "ignored" else "\n")
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    added = ".gitignore" if copied == "beside" else "."
    for command in (["init", "-q"], ["add", added], [*who, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr("twostroke.bench.result.__file__", str(package / "result.py"))
    commit = current_commit()
    assert re.fullmatch(r"[0-9a-f]{40}", commit or "") if copied == "tracked" else commit is None


@pytest.mark.usefixtures("stub_benchmark")
def test_repetitions_are_passed_on(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "stub", "--repetitions", "1"])
    assert done.exit_code == 0
    assert "3.00" in done.stdout
    assert not list(tmp_path.iterdir())


def test_an_unknown_benchmark_is_refused_with_the_known_ones() -> None:
    done = CliRunner().invoke(app, ["bench", "cpu-dem"])
    assert done.exit_code == 2
    assert "'cpu-dem'" in done.stderr
    assert "cpu-demo" in done.stderr
    with pytest.raises(InvalidConfig):
        registry.find("")


@pytest.mark.usefixtures("stub_benchmark")
@pytest.mark.parametrize(("given", "loops"), [("both", ("sync", "async")), ("sync", ("sync",)), ("async", ("async",))])
def test_the_loops_to_measure(monkeypatch: pytest.MonkeyPatch, given: str, loops: tuple[str, ...]) -> None:
    asked = []
    monkeypatch.setattr(StubModule, "run", lambda name, options, say: asked.append(options) or result(stub_run(1.0)))
    assert CliRunner().invoke(app, ["bench", "stub", "--loop", given]).exit_code == 0
    assert asked[0].loops == loops


def test_an_unknown_loop_is_refused_by_name() -> None:
    done = CliRunner().invoke(app, ["bench", "cpu-demo", "--loop", "fast"])
    assert done.exit_code == 2
    assert "loop='fast'" in done.stderr


def test_every_benchmark_can_be_run() -> None:
    """A module name that does not exist, or has no `run`, shows only when someone asks for the benchmark."""
    for benchmark in registry.BENCHMARKS.values():
        module = importlib.import_module(f"twostroke.bench.{benchmark.module}")
        assert callable(module.run)


def test_measuring_leaves_out_what_was_before() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with Engine("tiny", device="cpu", num_blocks=32, max_rows=4, seed=0) as engine:
        engine.generate([[1, 2, 3]] * 3, params, progress=False)
        measured = measure(engine, [[1, 2, 3], [4, 5]], params)
    assert measured.tokens == 12
    assert 6 <= measured.steps <= 8
    assert 0 < measured.active <= 1
    assert min(measured.idle.values()) >= 0
    assert set(measured.cpu_us) == {"plan", "fill", "queue", "commit"}
    assert all(0 < us < 1e6 * measured.seconds / measured.steps for us in measured.cpu_us.values())


@pytest.fixture(scope="module")
def peer():
    """A tiny Llama of transformers, random weights, its end token switched off as `cpu-demo` does."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = -1
    return model


def test_both_peers_do_the_same_work(peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong padding, a wrong end token or outputs in another order would make the comparison unfair."""
    monkeypatch.setattr(cpu_demo, "NEW_TOKENS", 6)
    prompts = [[5, 6, 7, 8, 9], [11], [3, 1, 4]]
    padded = cpu_demo._padded(peer, prompts)
    alone = [cpu_demo._padded(peer, [prompt])[0] for prompt in prompts]
    continuous = cpu_demo._continuous(peer, prompts)
    cpu_demo._check_complete("peer", padded, 3)
    assert padded == alone == continuous


def test_a_peer_that_stops_early_is_not_reported() -> None:
    with pytest.raises(TwostrokeError, match=r"\[64, 3\]"):
        cpu_demo._check_complete("peer", [[0] * 64, [0] * 3], 2)


def test_cases_are_set_against_the_first() -> None:
    runs = compared({"a": [stub_run(1.0), stub_run(4.0), stub_run(2.0)], "b": [stub_run(3.0)]})
    assert [(run.case, run.relative) for run in runs] == [("a", 0.5), ("a", 2.0), ("a", 1.0), ("b", 1.5)]
    assert compared({"a": [stub_run(1.0)]}) == [stub_run(1.0)]


def test_what_the_cases_ask_of_the_engine() -> None:
    assert BenchOptions(repetitions=1).cases() == {"auto": {"impl": "auto"}}
    both = BenchOptions(repetitions=1, impl="both", deterministic=True).cases()
    assert both == {
        "native": {"impl": "native"},
        "transformers": {"impl": "transformers"},
        "deterministic": {"impl": "native", "deterministic": True},
    }


def test_a_benchmark_of_one_engine_refuses_to_compare() -> None:
    for options in (BenchOptions(repetitions=1, impl="both"), BenchOptions(repetitions=1, deterministic=True)):
        with pytest.raises(InvalidConfig, match="benchmark 'cpu-step' measures one engine"):
            registry.find("cpu-step").run(options, print)


@pytest.mark.parametrize(
    ("name", "arguments", "named"),
    [
        ("admission", ["--loop", "sync"], "loops=('sync',)"),
        ("admission", ["--slots", "3"], "slots=3"),
        ("admission", ["--impl", "native"], "impl='native'"),
        ("admission", ["--max-step-tokens", "512"], "max_step_tokens=512"),
        ("cpu-step", ["--impl", "transformers"], "impl='transformers'"),
        ("cpu-step", ["--max-step-tokens", "512"], "max_step_tokens=512"),
        *((name, ["--kernels"], "kernels=True") for name in ("admission", "cpu-step", "cpu-demo", "mixed", "offload")),
        ("prefix", ["--kernels"], "kernels=True"),
        ("small", ["--api-processes", "2"], "api_processes=2"),
        ("sampling", ["--kernels"], "kernels=True"),
        ("tail", ["--update-every", "8"], "update_every=8"),
        ("mixed", ["--deterministic"], "deterministic=True"),
        ("offload", ["--impl", "both"], "impl='both'"),
        ("article", ["--peer-dir", "peers"], "peer_dir='peers'"),
        ("article", ["--loop", "async", "--price", "4"], "price=4"),
    ],
)
def test_what_a_benchmark_has_no_use_for_is_refused_by_name(name: str, arguments: list[str], named: str) -> None:
    done = CliRunner().invoke(app, ["bench", name, *arguments])
    assert done.exit_code == 2
    assert named in done.stderr


@pytest.mark.parametrize("name", registry.BENCHMARKS)
def test_options_that_a_benchmark_takes_reach_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name == "serving":
        pytest.importorskip("fastapi")
    benchmark, asked = registry.find(name), []
    module = importlib.import_module(f"twostroke.bench.{benchmark.module}")
    monkeypatch.setattr(module, "run", lambda name, options, say: asked.append(options) or result(stub_run(1.0)))
    values = {
        "loops": ("sync",),
        "impl": "native",
        "slots": 3,
        "deterministic": True,
        "max_step_tokens": 512,
        "kernels": True,
        "api_processes": 2,
        "update_every": 8,
    }
    given = BenchOptions(repetitions=1, **{option: values[option] for option in benchmark.takes})
    benchmark.run(given, print)
    assert asked == [given]


def test_the_demo_measures_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def twostroke(loop, options, settings):
        asked.append((loop, settings))
        with Engine("tiny", device="cpu", loop=loop, max_rows=2, num_blocks=8, **settings) as engine:
            return [measure(engine, [[1, 2]], SamplingParams(max_tokens=2))]

    monkeypatch.setattr(cpu_demo, "_twostroke", twostroke)
    monkeypatch.setattr(cpu_demo, "_transformers", lambda prompts, repetitions: iter([]))
    found = cpu_demo.run("cpu-demo", BenchOptions(repetitions=1, loops=("async",), deterministic=True), print)
    assert asked == [("async", {"impl": "auto"}), ("async", {"impl": "auto", "deterministic": True})]
    assert [run.case for run in found.runs] == ["auto", "deterministic"]
    assert found.runs[0].relative == 1.0


def test_admission_takes_every_request_through_the_queue(monkeypatch) -> None:
    monkeypatch.setattr(admission, "REQUESTS", 5_000)
    result = admission.run("admission", BenchOptions(repetitions=1), lambda line: None)
    (run,) = result.runs
    assert (run.tokens, run.waiting, run.loop) == (5_000, 5_000, None)
    assert 500 < run.extra["bytes_per_request"] < 2_000
    assert all(run.extra[f"{act}_{unit}"] > 0 for act in ("start", "submit", "admit") for unit in ("per_s", "us"))
