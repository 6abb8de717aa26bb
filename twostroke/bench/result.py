"""The result of a benchmark, and the JSON file that keeps it."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

PACKAGES = ("twostroke", "torch", "triton", "transformers", "tokenizers", "numpy")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One repetition of a benchmark by one engine. What was not measured is None.

    Attributes:
        engine: `twostroke`, or the peer's name and version.
        loop: `sync` or `async`; None for a peer that has no such choice.
        seconds: wall time from the first submit to the last output.
        tokens: output tokens of all requests.
        tokens_per_s: `tokens / seconds`.
        ms_per_step: wall time of a step, in milliseconds.
        gpu_active: share of the wall time in which the device (on a CPU: the compute worker) ran a step, 0 to 1.
        kernel_active: share of the time of steady steps in which a kernel ran, from a profiler, 0 to 1.
        kernel_us, kernel_runs: microseconds and runs of each kernel in a steady step, from the same profiler.
        bytes_per_s: weights and KV cache that the steps had to read, over `seconds`.
        floor_seconds: the time that the ceilings of the machine allow.
        floor_share: `floor_seconds / seconds`.
        cpu_us: mean time of the loop's own work per step, in microseconds, by phase (`plan`, `fill`,
            `commit`, and `queue`, handing the work to the streams, where it was measured).
        case: what the engine was asked for, where the benchmark compares several; the first one is the measure.
        relative: `seconds` over the median of the first case under the same loop.
        rows, waiting: samples that decode, and in the queue, where the benchmark fixes them.
        extra: further figures of the benchmark, by name.
    """

    engine: str
    loop: str | None
    seconds: float
    tokens: int
    tokens_per_s: float = field(init=False)
    ms_per_step: float | None = None
    gpu_active: float | None = None
    kernel_active: float | None = None
    kernel_us: Mapping[str, float] | None = None
    kernel_runs: Mapping[str, float] | None = None
    bytes_per_s: float | None = None
    floor_seconds: float | None = None
    floor_share: float | None = field(init=False)
    cpu_us: Mapping[str, float] | None = None
    case: str | None = None
    relative: float | None = None
    rows: int | None = None
    waiting: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens_per_s", self.tokens / self.seconds)
        share = None if self.floor_seconds is None else self.floor_seconds / self.seconds
        object.__setattr__(self, "floor_share", share)


def compared(cases: Mapping[str, Sequence[Run]]) -> list[Run]:
    """The runs of all cases, named, and set against the first case if there are several."""
    if len(cases) == 1:
        return [run for runs in cases.values() for run in runs]
    measure = median(run.seconds for run in next(iter(cases.values())))
    return [replace(run, case=name, relative=run.seconds / measure) for name, runs in cases.items() for run in runs]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a benchmark read, and where and with what it was read.

    Attributes:
        benchmark: the name of the benchmark.
        date: when, ISO 8601 with the offset from UTC.
        commit: of the checkout that ran, with `+changes` if files differed from it; None outside a checkout.
        gpu: the name of the GPU, None where none was used.
        machine: the CPU's name and the cores that this process may use.
        versions: of Python and of the packages that matter, None where one is not installed.
        workload: what was run: model, dtype, prompts, tokens, threads, ...
        runs: one entry per engine, loop and repetition, in the order in which they ran.
        failures: what went wrong with a peer, by its name.
    """

    benchmark: str
    date: str = field(default_factory=lambda: current_date())
    commit: str | None = field(default_factory=lambda: current_commit())
    gpu: str | None
    machine: Mapping[str, Any] = field(default_factory=lambda: {"cpu": cpu_name(), "cores": usable_cores()})
    versions: Mapping[str, str | None] = field(default_factory=lambda: installed_versions())
    workload: Mapping[str, Any]
    runs: tuple[Run, ...]
    failures: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Result:
        """The result that `write` wrote to `path`."""
        values = json.loads(path.read_text())
        computed = {f.name for f in fields(Run) if not f.init}
        runs = [Run(**{name: value for name, value in run.items() if name not in computed}) for run in values["runs"]]
        return cls(**values | {"runs": tuple(runs)})

    def write(self, path: Path) -> Path:
        """Write the result as one JSON object and return the file's path.

        A folder gets a file of the name BENCHMARK-MACHINE-DATE.json. Missing folders are made.
        """
        if path.is_dir() or path.suffix != ".json":
            path = path / self.file_name()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")
        return path

    @property
    def title(self) -> str:
        """The benchmark, and what makes another one of it."""
        every = self.workload.get("update_every")
        both = ["both implementations"] if self.workload.get("impl") == "both" else []
        mode = ["deterministic mode"] if any(run.case == "deterministic" for run in self.runs) else []
        updates = [] if every is None else [f"new weights every {every} steps"]
        return ", ".join([self.benchmark, *both, *mode, *updates])

    def file_name(self) -> str:
        name, machine = (
            re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
            for text in (self.title, self.gpu or self.machine["cpu"])
        )
        return f"{name}-{machine}-{self.date[:10]}.json"


def cpu_name() -> str:
    """The processor's own name where the system tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def installed_versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def current_date() -> str:
    """ISO 8601 with the offset from UTC."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def current_commit() -> str | None:
    """The commit of the checkout that twostroke runs from; None where one only holds it, and does not track it."""
    commit = _git("rev-parse", "HEAD")
    if commit is None or _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    return f"{commit}+changes" if _git("status", "--porcelain", "--untracked-files=no") else commit


def _git(*arguments: str) -> str | None:
    folder = Path(__file__).parent
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
