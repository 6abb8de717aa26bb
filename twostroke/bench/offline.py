"""Offline workloads on a GPU: requests that are all submitted at once, random weights, end of sequence ignored."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from .. import Engine
from ..model.interface import Model
from ..sampling_params import SamplingParams
from .ceilings import Ceilings, measure_ceilings
from .floor import Cost, floor_of
from .kernels import watch_kernels
from .load import need_cuda
from .measure import Measured, measure
from .offline_workloads import WORKLOADS, Workload
from .options import BenchOptions
from .peers import measure_peers
from .result import Result, Run, compared
from .updates import measure_updates

WARM_UP_TOKENS = 8
BLOCK_SIZE = 16
STEADY_AFTER = 128
"""Steps after which every workload here decodes with all its rows."""


def run(name: str, options: BenchOptions, say: Callable[[str], None]) -> Result:
    """Measure the ceilings, then twostroke under each loop asked for.

    Raises:
        InvalidConfig: there is no CUDA device.
    """
    need_cuda(name)
    workload = WORKLOADS[name]()
    say("ceilings")
    ceilings = measure_ceilings()
    release_memory()
    runs: list[Run] = []
    built: dict[str, object] = {}
    for loop in options.loops:
        measured: dict[str, list[Run]] = {}
        for case, settings in options.cases().items():
            say(f"twostroke, {case}, {loop} loop")
            measured[case] = _twostroke(workload, loop, options, settings, ceilings, built)
            release_memory()
        runs += compared(measured)
    failures: dict[str, str] = {}
    runs += measure_peers(name, options, sum(workload.outputs), failures, say)
    facts = {
        "model": workload.model,
        "dtype": "bfloat16",
        "impl": options.impl,
        "requests": len(workload.prompts),
        "prompt_tokens": sum(map(len, workload.prompts)),
        "new_tokens": sum(workload.outputs),
        "temperature": workload.temperature,
        "max_rows": workload.max_rows,
        "max_step_tokens": options.step_tokens(workload.max_step_tokens),
        "prefix_cache": False,
        "read_bytes_per_s": ceilings.read_bytes_per_s,
        "flop_per_s": ceilings.flop_per_s,
        **options.update_facts(),
        **built,
    }
    return Result(benchmark=name, gpu=torch.cuda.get_device_name(), workload=facts, runs=tuple(runs), failures=failures)


def _twostroke(
    workload: Workload,
    loop: str,
    options: BenchOptions,
    settings: dict[str, Any],
    ceilings: Ceilings,
    built: dict[str, object],
) -> list[Run]:
    params = [SamplingParams(temperature=workload.temperature, max_tokens=n, ignore_eos=True) for n in workload.outputs]
    warm_up = SamplingParams(temperature=workload.temperature, max_tokens=WARM_UP_TOKENS, ignore_eos=True)
    if options.update_every is not None:  # new weights need room beside the cache
        settings = settings | {"block_size": BLOCK_SIZE, "num_blocks": workload.blocks(BLOCK_SIZE)}
    with Engine(
        workload.model,
        **settings,
        dtype="bfloat16",
        loop=loop,
        slots=options.slots,
        max_rows=workload.max_rows,
        max_step_tokens=options.step_tokens(workload.max_step_tokens),
        max_model_len=workload.max_model_len,
        prefix_cache=False,  # the same prompts come in the warm-up and in every repetition
        seed=0,
    ) as engine:
        built |= {"slots": options.slots, **asdict(engine.report)}
        floor = floor_of(
            cost_of(engine.model),
            np.array([len(prompt) for prompt in workload.prompts]),
            np.array(workload.outputs),
            ceilings.read_bytes_per_s,
            ceilings.flop_per_s,
        )
        engine.generate(workload.prompts, warm_up, progress=False)
        measured = _repeat(engine, workload.prompts, params, options)
        kernels = watch_kernels(engine, workload.prompts, params, STEADY_AFTER) if options.kernels else None
        return [
            one.as_run(
                loop,
                extra=extra,
                bytes_per_s=floor.read_bytes / one.seconds,
                floor_seconds=floor.seconds,
                kernel_active=kernels and kernels.active,
                kernel_us=kernels and kernels.us,
                kernel_runs=kernels and kernels.runs,
            )
            for one, extra in measured
        ]


def _repeat(
    engine: Engine, prompts: list[list[int]], params: list[SamplingParams], options: BenchOptions
) -> list[tuple[Measured, dict[str, Any]]]:
    """The measured runs, with their further figures."""
    repetitions = range(options.repetitions)
    if options.update_every is None:
        return [(measure(engine, prompts, params), {}) for _ in repetitions]
    weights = engine.model.copy_weights()
    return [measure_updates(engine, prompts, params, weights, options.update_every) for _ in repetitions]


def release_memory() -> None:
    """Give back the device memory of an engine that was closed: what runs next sizes itself by what is free."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def cost_of(model: Model) -> Cost:
    """What the model must read and compute; its products are two operations per weight read."""
    elements = model.weight_bytes // model.dtype.itemsize
    layers = model.layers
    return Cost(
        weight_bytes=model.weight_bytes,
        kv_bytes=sum(layer.block_bytes(1, model.dtype) for layer in layers),
        token_flop=2.0 * elements,
        attention_flop=4.0 * sum(layer.heads * layer.head_dim for layer in layers),
    )
