"""Peers of the offline benchmarks, with fake scripts: what they are asked for, what is read, and how they fail."""

import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from twostroke.bench import offline, peers
from twostroke.bench.options import BenchOptions
from twostroke.bench.peers import PEERS, PeerFailed, measure_peers, run_peer
from twostroke.cli.main import app

VLLM = """
import json, os, sys, fake_vllm_package
assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "0" and os.environ["HF_HUB_OFFLINE"] == "1"
which, sizes = sys.argv[1], [int(x) for x in sys.argv[2].split(",")]
print("INFO some {log line}", file=sys.stderr)
print("ready 1.0 s")
if which == "small":
    print(json.dumps(dict(engine="vllm", bench="small", extra={}, seconds=5.9, tokens=133966, tok_s=1)))
if which == "more":
    print(json.dumps(dict(engine="vllm", bench="gsm8k", seconds=18.7, tokens=1319 * 256, tok_s=1)))
for n in sizes:
    bench = "article" if which == "article" else f"rollouts-{n}"
    print(json.dumps(dict(engine="vllm", bench=bench, seconds=n / 100, tokens=32 * n, tok_s=1, ms_step=10.0)))
"""

TRANSFORMERS = """
import argparse, flash_attn_interface
a = argparse.ArgumentParser()
a.add_argument("--attn"); a.add_argument("--n", type=int); a.add_argument("--prompt", type=int, default=128)
a.add_argument("--gsm", action="store_true")
for name in ("--async_", "--graphs", "--compile"): a.add_argument(name, type=int)
a = a.parse_args(); rows = 1319 if a.gsm else 32
assert (a.attn, a.async_, a.graphs) == ("fa3", 1, 1)
print(f"{vars(a)} tokens={rows * a.n} gen=3.79s wall(with warmup)=40.10s tok/s=4320.0 ms/step=7.41 peakGiB=90.0")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "vllm_bench.py").write_text(VLLM)
    (tmp_path / "ref_cb.py").write_text(TRANSFORMERS)
    (tmp_path / "flash_attn_interface.py").write_text("")
    package = tmp_path / "fake_vllm_package.py"
    package.write_text("")
    with tarfile.open(tmp_path / "vllm-0.26.0-sm90-site.tar.xz", "w:xz") as archive:
        archive.add(package, package.name)
    package.unlink()
    return tmp_path


def options(folder: Path, *names: str, repetitions: int = 2) -> BenchOptions:
    return BenchOptions(repetitions=repetitions, peers=names, peer_dir=folder)


@pytest.mark.parametrize(
    ("benchmark", "tokens", "seconds"),
    [
        ("article", 262144, [81.92] * 2),
        ("article-512", 16384, [5.12] * 2),
        ("rollouts-2048", 65536, [20.48] * 2),
        ("gsm8k", 337664, [18.7]),
        ("small", 133966, [5.9]),
    ],
)
def test_vllm_is_read(folder: Path, benchmark: str, tokens: int, seconds: list[float]) -> None:
    """One call prints several benchmarks: only the lines of the one asked for count."""
    runs = run_peer("vllm", benchmark, options(folder), tokens)
    assert [run.seconds for run in runs] == seconds
    assert {(run.engine, run.loop, run.tokens) for run in runs} == {("vllm 0.26.0", None, tokens)}


@pytest.mark.parametrize(
    ("benchmark", "tokens"),
    [("article", 262144), ("article-512", 16384), ("rollouts-16384", 524288), ("gsm8k", 337664)],
)
def test_transformers_is_read(folder: Path, benchmark: str, tokens: int) -> None:
    (run,) = run_peer("transformers", benchmark, options(folder), tokens)
    assert run.engine.startswith("transformers 5.")
    assert (run.loop, run.seconds, run.tokens, run.ms_per_step) == ("async", 3.79, tokens, 7.41)


def test_workloads_are_those_of_the_scripts(folder: Path) -> None:
    """The tokens that a peer must give are those of twostroke's own workload."""
    for name, make in offline.WORKLOADS.items():
        if PEERS["vllm"].arguments(name, 1) is not None:
            assert run_peer("vllm", name, options(folder, repetitions=1), sum(make().outputs))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("print('one'); raise SystemExit('out of memory')", "code 1:\none\nout of memory"),
        ("print('nothing to report')", "nothing to report"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "code -11"),
        (VLLM.replace("32 * n", "31 * n"), "gave no 16384 tokens"),
        ("import time; time.sleep(60)", "took more than 2 s"),
    ],
)
def test_a_failing_peer_says_why_and_the_others_still_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    if "sleep" in script:
        monkeypatch.setattr(peers, "TIMEOUT_SECONDS", 2)
    (folder / "vllm_bench.py").write_text(script)
    failures: dict[str, str] = {}
    asked = options(folder, "vllm", "transformers")
    runs = measure_peers("article-512", asked, 16384, failures, lambda line: None)
    assert [run.engine.split()[0] for run in runs] == ["transformers"]
    assert list(failures) == ["vllm"]
    assert message in failures["vllm"]


def test_a_missing_archive_is_a_failure_of_that_peer(folder: Path) -> None:
    (folder / "vllm-0.26.0-sm90-site.tar.xz").unlink()
    with pytest.raises(PeerFailed, match="site"):
        run_peer("vllm", "small", options(folder), 133966)


def test_nothing_that_a_peer_started_outlives_it(folder: Path) -> None:
    """A worker left behind would hold the GPU's memory and run beside what is measured next."""
    (folder / "vllm_bench.py").write_text(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "raise SystemExit(f'child {child.pid}')\n"
    )
    with pytest.raises(PeerFailed) as caught:
        run_peer("vllm", "small", options(folder), 133966)
    child = int(str(caught.value).split()[-1])
    deadline = time.monotonic() + 10
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)


def alive(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")


def test_the_environment_s_own_packages_stay_in_reach(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    (folder / "ref_cb.py").write_text("import sys; raise SystemExit(repr(sys.path[:3]))")
    with pytest.raises(PeerFailed) as caught:
        run_peer("transformers", "article-512", options(folder), 16384)
    assert "'/somewhere'" in str(caught.value)
    assert os.environ["PYTHONPATH"] == "/somewhere"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["article", "--peer", "vlm"], "peer='vlm'"),
        (["cpu-step", "--peer", "vllm"], "no benchmark 'cpu-step'"),
        (["rollouts-16384", "--peer", "vllm"], "no benchmark 'rollouts-16384'"),
        (["small", "--peer", "transformers"], "no benchmark 'small'"),
        (["article", "--peer", "vllm"], "peer_dir"),
        (["article", "--peer", "vllm", "--peer-dir", "/nowhere"], "/nowhere"),
    ],
)
def test_peers_that_cannot_run_are_refused_before_anything_is_measured(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert done.exit_code == 2
    assert message in done.stderr


def test_a_peer_runs_in_this_environment_s_python(folder: Path) -> None:
    (folder / "ref_cb.py").write_text("import sys; raise SystemExit(sys.executable)")
    with pytest.raises(PeerFailed, match=sys.executable):
        run_peer("transformers", "article-512", options(folder), 16384)
