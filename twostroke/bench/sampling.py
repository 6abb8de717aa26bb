"""`sampling`: what a step takes with different sampling parameters, against a step that ends with a bare argmax.

The time of a step is the difference between a long and a short run, over the steps that the long one has more: so it is
that of steps in which all rows decode. Rows with a grammar may sit steps out; the others set the pace, and are timed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from .. import Engine
from ..build import Parts, build
from ..errors import InvalidConfig, TwostrokeError
from ..sampling_params import SamplingParams
from ..structured import StructuredOutput
from .made_up_tokenizer import made_up_tokenizer
from .offline import release_memory
from .options import BenchOptions
from .result import Result, Run, compared

GRAMMAR_EVERY = 10
"""Every so many rows has a grammar in the case of that name."""


@dataclass(frozen=True)
class Load:
    """The workload.

    Attributes:
        model: a preset. device, dtype: of the engine.
        rows: samples that decode together, after prompts of `prompt` tokens.
        short, long: tokens of each in the two runs.
    """

    model: str = "llama-3.1-8b"
    device: str = "cuda"
    dtype: str = "bfloat16"
    rows: int = 256
    prompt: int = 32
    short: int = 32
    long: int = 288


def run(name: str, options: BenchOptions, say: Callable[[str], None]) -> Result:
    """Measure all cases under each loop asked for.

    Raises:
        InvalidConfig: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise InvalidConfig(f"benchmark {name!r} needs a CUDA device")
    load = Load()
    runs = [run for loop in options.loops for run in run_load(load, loop, options, say)]
    facts = asdict(load) | {"impl": options.impl, "slots": options.slots, "grammar_every": GRAMMAR_EVERY}
    return Result(benchmark=name, gpu=torch.cuda.get_device_name(), workload=facts, runs=tuple(runs))


def run_load(load: Load, loop: str, options: BenchOptions, say: Callable[[str], None]) -> list[Run]:
    """Measure the bare argmax, then all cases, each engine alone."""
    measured: dict[str, list[Run]] = {}
    for draw, cases in ((bare_argmax, {"argmax": _greedy}), (None, CASES)):
        with _TimedEngine(draw, **_settings(load, loop, options)) as engine:
            for case, parameters in cases.items():
                say(f"{case}, {loop} loop")
                time_rows(engine, load, parameters, load.short)
                measured[case] = [_measure(engine, load, parameters, loop) for _ in range(options.repetitions)]
        del engine
        release_memory()
    return compared(measured)


def _settings(load: Load, loop: str, options: BenchOptions) -> dict[str, Any]:
    return {
        "model": load.model,
        "impl": options.impl,
        "device": load.device,
        "dtype": load.dtype,
        "loop": loop,
        "slots": options.slots,
        "max_rows": load.rows,
        "max_step_tokens": options.step_tokens(2048),
        # Rows with a grammar are let go at the end, before they reach it.
        "max_model_len": 2 * (load.prompt + load.long),
        "max_ledgers": load.rows,
        "prefix_cache": False,  # the same prompts come in every repetition
        "seed": 0,
    }


class _TimedEngine(Engine):
    """An engine with a made-up tokenizer, which grammars need, and its own way of making tokens of logits."""

    def __init__(self, draw: Callable[..., None] | None, **settings: Any) -> None:
        self._draw = draw
        super().__init__(**settings)

    def _build(self) -> Parts:
        return build(self.config, draw=self._draw, make_tokenizer=made_up_tokenizer)


def bare_argmax(
    logits: torch.Tensor,
    rows: torch.Tensor,
    state: object,
    tokens: torch.Tensor,
    errors: torch.Tensor,
    typical: bool,
    chances: torch.Tensor | None,
) -> None:
    """Stand in for `sampling.sampler.sample`: the largest logit, whatever the rows ask for, and no errors."""
    tokens.copy_(logits.argmax(-1))
    errors.zero_()


Parameters = Callable[[int], dict[str, Any]]
"""Row -> its sampling parameters; a row with a grammar is not timed."""


def _greedy(row: int) -> dict[str, Any]:
    return {"temperature": 0.0}


def _top_p(row: int) -> dict[str, Any]:
    return {"temperature": 1.0, "top_p": 0.9, "seed": row}


def _penalties(row: int) -> dict[str, Any]:
    return {"temperature": 0.0, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}


def _grammar(row: int) -> dict[str, Any]:
    text = {"type": "object", "properties": {"text": {"type": "string", "minLength": 10_000}}, "required": ["text"]}
    return _greedy(row) | ({} if row % GRAMMAR_EVERY else {"structured": StructuredOutput(json_schema=text)})


CASES: dict[str, Parameters] = {"greedy": _greedy, "top_p": _top_p, "penalties": _penalties, "grammar": _grammar}


def time_rows(engine: Engine, load: Load, parameters: Parameters, tokens: int) -> float:
    """Return the seconds until all rows that are timed have so many tokens; the others are let go then.

    Raises:
        TwostrokeError: a row did not run throughout.
    """
    rng = random.Random(0)
    prompts = [[rng.randint(10, 250) for _ in range(load.prompt)] for _ in range(load.rows)]
    asked = [SamplingParams(max_tokens=None, ignore_eos=True, **parameters(row)) for row in range(load.rows)]
    asked = [params if params.structured else replace(params, max_tokens=tokens) for params in asked]
    started = time.perf_counter()
    handles = [engine.submit(prompt, params) for prompt, params in zip(prompts, asked, strict=True)]
    endless = [handle for handle, params in zip(handles, asked, strict=True) if params.structured]
    outputs = [handle.result() for handle in handles if handle not in endless]
    seconds = time.perf_counter() - started
    complete = not any(handle.done for handle in endless) and not engine.stats().preemptions
    for handle in endless:
        handle.cancel()
        handle.result()
    if not complete or any(len(output.token_ids) < tokens for output in outputs):
        raise TwostrokeError(f"not all of {load.rows} rows ran throughout {tokens} tokens")
    return seconds


def _measure(engine: Engine, load: Load, parameters: Parameters, loop: str) -> Run:
    steps = load.long - load.short
    seconds = time_rows(engine, load, parameters, load.long) - time_rows(engine, load, parameters, load.short)
    ms_per_step = 1e3 * seconds / steps
    return Run(engine="twostroke", loop=loop, seconds=seconds, tokens=steps * load.rows, ms_per_step=ms_per_step)
