"""`serving`: a load that is served to streaming clients over HTTP, against the same load offline, in the same call.

    this process                            API process               engine process
    clients, one per request  <==== HTTP ===>  text, JSON  <==========>  loop

All requests are sent at once, each on a connection of its own. Their seeds are fixed, so both ways give the same tokens
wherever the order of sums does not depend on the batch; how many differ is counted.

A token's time is that at which its event had come. Tokens that come in one event count as one gap and gaps of zero.
"""

from __future__ import annotations

import multiprocessing
import random
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from prometheus_client.parser import text_string_to_metric_families

from .. import Engine
from ..errors import TwostrokeError
from ..sampling_params import SamplingParams
from ..server.serve import serve
from ..server.settings import ServerSettings
from .http_streams import Streamed, stream_all
from .made_up_checkpoint import save_made_up_checkpoint
from .measure import Measured, measure
from .offline import WARM_UP_TOKENS, release_memory
from .offline_workloads import MAX_STEP_TOKENS, Workload, small
from .options import BenchOptions
from .result import Result, Run, compared

PATH = "/v1/completions"

END_SECONDS = 60.0
"""How long a server may take to end before it is killed."""


def tiny() -> Workload:
    """As many requests as `small` has, for the tiny model on a CPU."""
    rng = random.Random(0)
    prompts = [[rng.randint(3, 511) for _ in range(rng.randint(8, 64))] for _ in range(256)]
    outputs = [rng.randint(16, 96) for _ in range(256)]
    return Workload("tiny", prompts, outputs, 0.6, max_rows=256, max_model_len=256)


def run(name: str, options: BenchOptions, say: Callable[[str], None]) -> Result:
    """Measure `small` on a GPU, `tiny` without one, under each loop asked for."""
    on_cuda = torch.cuda.is_available()
    workload, device = (small(), "cuda") if on_cuda else (tiny(), "cpu")
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as folder:
        dtype = torch.bfloat16 if on_cuda else torch.float32
        save_made_up_checkpoint(workload.model, Path(folder), device, dtype)
        for loop in options.loops:
            runs += run_load(workload, Path(folder), device, loop, options, say)
    facts = {
        "model": workload.model,
        "dtype": str(dtype).removeprefix("torch."),
        "requests": len(workload.prompts),
        "prompt_tokens": sum(map(len, workload.prompts)),
        "new_tokens": sum(workload.outputs),
        "temperature": workload.temperature,
        "max_rows": workload.max_rows,
        "prefix_cache": False,
        **options.facts(MAX_STEP_TOKENS),
    }
    gpu = torch.cuda.get_device_name() if on_cuda else None
    return Result(benchmark=name, gpu=gpu, workload=facts, runs=tuple(runs))


def run_load(
    workload: Workload, model: Path, device: str, loop: str, options: BenchOptions, say: Callable[[str], None]
) -> list[Run]:
    """Measure the model in a folder offline, then served by each number of API processes, under one loop."""
    arguments: dict[str, Any] = {
        "model": str(model),
        "impl": options.impl,
        "device": device,
        "loop": loop,
        "slots": options.slots,
        "max_rows": workload.max_rows,
        "max_step_tokens": options.step_tokens(MAX_STEP_TOKENS),
        "max_model_len": workload.max_model_len,
        "prefix_cache": False,  # the same prompts come in the warm-up and in every repetition
        "seed": 0,
    }
    say(f"offline, {loop} loop")
    offline = _offline(workload, arguments, options.repetitions)
    release_memory()
    expected = [output.token_ids for output in offline[0].outputs]
    cases = {"offline": [measured.as_run(loop) for measured in offline]}
    speed = median(run.tokens_per_s for run in cases["offline"])
    for processes in sorted({1, options.api_processes}):
        case = "served" if processes == 1 else f"served by {processes} processes"
        say(f"{case}, {loop} loop")
        with _served(arguments, processes) as url:
            stream_all(url, PATH, _bodies(workload, WARM_UP_TOKENS))
            served = [_measure_served(url, workload, expected, loop) for _ in range(options.repetitions)]
        cases[case] = [
            replace(run, extra={"percent_of_offline": 100 * run.tokens_per_s / speed, **run.extra}) for run in served
        ]
    runs = compared(cases)
    return runs if device == "cuda" else [replace(run, gpu_active=None) for run in runs]


def _offline(workload: Workload, arguments: dict[str, Any], repetitions: int) -> list[Measured]:
    common: dict[str, Any] = {"temperature": workload.temperature, "ignore_eos": True}
    params = [SamplingParams(seed=seed, max_tokens=n, **common) for seed, n in enumerate(workload.outputs)]
    with Engine(**arguments) as engine:
        engine.generate(workload.prompts, SamplingParams(max_tokens=WARM_UP_TOKENS, **common), progress=False)
        return [measure(engine, workload.prompts, params) for _ in range(repetitions)]


def _bodies(workload: Workload, most: int | None = None) -> list[dict[str, Any]]:
    common = {"temperature": workload.temperature, "ignore_eos": True, "stream": True, "return_token_ids": True}
    return [
        {"prompt": prompt, "max_tokens": min(n, most or n), "seed": seed} | common
        for seed, (prompt, n) in enumerate(zip(workload.prompts, workload.outputs, strict=True))
    ]


def _measure_served(url: str, workload: Workload, expected: Sequence[list[int]], loop: str) -> Run:
    before = _counters(url)
    streams = stream_all(url, PATH, _bodies(workload))
    counted = {name: value - before.get(name, 0.0) for name, value in _counters(url).items()}
    seconds = max(stream.times[-1] for stream in streams) - min(stream.sent for stream in streams)
    steps = counted["twostroke:engine_steps_total", ""]
    busy = counted["twostroke:gpu_busy_seconds_total", ""]
    gaps = sum(
        value
        for (name, cause), value in counted.items()
        if name == "twostroke:gpu_idle_seconds_total" and cause != "nothing"
    )
    cpu = {phase: value for (name, phase), value in counted.items() if name == "twostroke:cpu_seconds_total"}
    return Run(
        engine="twostroke",
        loop=loop,
        seconds=seconds,
        tokens=sum(len(stream.tokens) for stream in streams),
        ms_per_step=1e3 * seconds / steps,
        gpu_active=busy / (busy + gaps),
        cpu_us={phase: 1e6 * value / steps for phase, value in cpu.items() if phase != "wait"},
        extra={"requests_per_s": len(streams) / seconds}
        | waits(streams)
        | {"differing_tokens": differing(expected, [stream.tokens for stream in streams])},
    )


def waits(streams: Sequence[Streamed]) -> dict[str, float]:
    """How long the clients waited for first tokens, and from token to token, in milliseconds."""
    firsts = [stream.times[0] - stream.sent for stream in streams]
    gaps = np.concatenate([np.diff(stream.times) for stream in streams])
    return {
        f"{name}_p{share}_ms": 1e3 * float(np.percentile(seconds, share))
        for name, seconds in (("first_token", firsts), ("inter_token", gaps))
        for share in (50, 99)
    }


def differing(expected: Sequence[Sequence[int]], got: Sequence[Sequence[int]]) -> int:
    """Tokens that are not those expected in their places, lost and doubled ones among them."""
    return sum(
        sum(here != there for here, there in zip(own, other, strict=False)) + abs(len(own) - len(other))
        for own, other in zip(expected, got, strict=True)
    )


def _counters(url: str) -> dict[tuple[str, str], float]:
    """The server's counters by name and label, besides the model's."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        (sample.name, sample.labels.get("cause") or sample.labels.get("phase") or ""): sample.value
        for family in families
        if family.type == "counter"
        for sample in family.samples
    }


@contextmanager
def _served(arguments: dict[str, Any], api_processes: int) -> Iterator[str]:
    """Run a server in a process of its own; yields its URL.

    Raises:
        TwostrokeError: it did not start.
    """
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_serve, args=(arguments, api_processes, theirs), name="server")
    process.start()
    theirs.close()  # the server has the only other end now, and the connection ends when it dies
    try:
        yield _url(ours)
    finally:
        process.terminate()
        process.join(END_SECONDS)
        process.kill()
        process.join()


def _url(connection: Connection) -> str:
    try:
        url: str = connection.recv()
    except EOFError as error:
        raise TwostrokeError("the server did not start; its process has said why") from error
    return url


def _serve(arguments: dict[str, Any], api_processes: int, connection: Connection) -> None:
    serve(ServerSettings(port=0, shutdown_timeout=0.0, api_processes=api_processes), arguments, connection.send)
