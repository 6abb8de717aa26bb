"""`tail`: how full the rows are over the life of a job, and how long its end drags on.

A job of requests whose lengths differ widely, known beforehand, runs in two ways:

    file order   all submitted at once; the engine takes them in the order of the file
    batch        as `twostroke batch` does, over a window, the longest of what was read ahead first

A row is in use from the admission of a sample to its end. The tail is the time after the last moment in which nine
tenths of the rows were in use.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import Engine
from ..jobs.batch_input import BatchInput
from ..jobs.batch_output import BatchOutput
from ..jobs.batch_request import RequestReader
from ..jobs.batch_run import BatchRun
from ..prompts import Prompt
from ..request import Timings
from ..sampling_params import SamplingParams
from ..text.handle import Handle
from .measure import measured_between
from .offline import release_memory
from .offline_workloads import MAX_STEP_TOKENS
from .options import BenchOptions
from .result import Result, Run, compared

FULL = 0.9
"""Share of the rows that is full enough not to be the tail."""

DRAWN = 60
"""Columns of the drawing."""

BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Job:
    """Requests of `prompt` tokens and of lengths from a log-normal distribution around `median`, at most `longest`."""

    model: str
    rows: int
    requests: int
    prompt: int = 32
    median: int = 128
    spread: float = 1.0
    longest: int = 2048

    def lengths(self) -> list[int]:
        """Output tokens of each request; always the same."""
        drawn = np.random.default_rng(0).lognormal(np.log(self.median), self.spread, self.requests)
        return np.clip(drawn.astype(int), 1, self.longest).tolist()


def run(name: str, options: BenchOptions, say: Callable[[str], None]) -> Result:
    """Measure both ways under each loop asked for."""
    on_cuda = torch.cuda.is_available()
    job = Job("qwen3-0.6b", 256, 2048) if on_cuda else Job("tiny", 32, 400, prompt=8, median=24, longest=256)
    runs: list[Run] = []
    for loop in options.loops:
        with Engine(
            job.model,
            impl=options.impl,
            loop=loop,
            slots=options.slots,
            max_rows=job.rows,
            max_model_len=job.prompt + job.longest,
            max_step_tokens=options.step_tokens(MAX_STEP_TOKENS),
            prefix_cache=False,  # the same prompts come in every repetition
            seed=0,
        ) as engine:
            in_file_order(engine, job, loop, job.lengths()[: job.rows])  # warm
            cases: dict[str, list[Run]] = {"file order": [], "batch": []}
            for repetition in range(options.repetitions):
                say(f"{loop} loop, {repetition + 1} of {options.repetitions}")
                cases["file order"].append(in_file_order(engine, job, loop, job.lengths()))
                cases["batch"].append(as_batch(engine, job, loop, job.lengths()))
        runs += compared(cases)
        del engine
        release_memory()
    gpu = torch.cuda.get_device_name() if on_cuda else None
    facts = asdict(job) | options.facts(MAX_STEP_TOKENS) | {"prefix_cache": False}
    return Result(benchmark=name, gpu=gpu, workload=facts, runs=tuple(runs))


def in_file_order(engine: Engine, job: Job, loop: str, lengths: Sequence[int]) -> Run:
    """Give the engine all requests at once."""
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
    before, began = engine.stats(), time.perf_counter()
    outputs = engine.generate([_prompt(job, place) for place in range(len(lengths))], params, progress=False)
    ended = time.perf_counter()
    timings = [output.timings for output in outputs]
    measured = measured_between(before, engine.stats(), outputs, ended - began)
    return measured.as_run(loop, extra=occupancy(timings, began, ended, job.rows))


def as_batch(engine: Engine, job: Job, loop: str, lengths: Sequence[int]) -> Run:
    """Give the engine what a batch gives it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "in.jsonl"
        lines = [
            {"prompt": _prompt(job, place), "max_tokens": length, "ignore_eos": True}
            for place, length in enumerate(lengths)
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        noted = _Noted(engine)
        before, began = engine.stats(), time.perf_counter()
        _run_batch(noted, job, BatchInput(path), Path(folder) / "out.jsonl")
        ended = time.perf_counter()
    outputs = [handle.result() for handle in noted.handles]
    timings = [output.timings for output in outputs]
    measured = measured_between(before, engine.stats(), outputs, ended - began)
    return measured.as_run(loop, extra=occupancy(timings, began, ended, job.rows))


def _run_batch(engine: _Noted, job: Job, source: BatchInput, path: Path) -> None:
    survey = source.survey()
    output = BatchOutput(path, None, {"input": survey.digest})
    try:
        reader = RequestReader(None, job.model, job.prompt + job.longest, None, survey.duplicates)
        BatchRun(engine, job.rows, source.lines(survey), reader, output, lambda: None, _refuse).run()
    finally:
        output.close()


def _refuse(line: int, error: Exception) -> None:
    raise error


class _Noted:
    """An engine of which every handle is kept."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.handles: list[Handle] = []

    def start(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Handle]:
        handles = self._engine.start(prompts, params)
        self.handles += handles
        return handles


def occupancy(timings: Sequence[Timings], began: float, ended: float, rows: int) -> dict[str, Any]:
    """How full the rows were from `began` to `ended`: on average in percent, the tail in seconds, and drawn."""
    starts = np.sort([one.admitted for one in timings if one.admitted is not None])
    ends = np.sort([one.finished for one in timings if one.finished is not None])
    moments = np.linspace(began, ended, 100 * DRAWN)
    in_use = np.searchsorted(starts, moments, "right") - np.searchsorted(ends, moments, "right")
    full = np.flatnonzero(in_use >= FULL * rows)
    tail = ended - moments[full[-1]] if len(full) else ended - began
    heights = np.ceil(in_use.reshape(DRAWN, -1).mean(1) / rows * (len(BARS) - 1)).astype(int)
    drawn = "".join(BARS[height] for height in heights.tolist())
    return {"occupancy_percent": 100 * float(in_use.mean()) / rows, "tail_seconds": float(tail), "rows_in_use": drawn}


def _prompt(job: Job, place: int) -> list[int]:
    return [1 + (place + token) % 100 for token in range(job.prompt)]
