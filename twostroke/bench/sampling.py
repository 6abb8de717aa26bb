"""`sampling`: what a step takes with different sampling parameters, against a step that ends with a bare argmax.

All cases run on one engine, which captures only the graphs of the steps that are timed, and captures them anew where
tokens are made in another way. The time of a step is the median time from its begin on the device to the begin of the
next one, over the steps in which all rows decode. Rows with a grammar may sit steps out; the others set the pace.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from .. import Engine
from ..build import Parts, build
from ..device.buckets import Buckets
from ..device.step_times import StepTimes
from ..errors import TwostrokeError
from ..sampling.sampler import sample
from ..sampling_params import SamplingParams
from ..structured import StructuredOutput
from .load import EngineLoad, measure_load
from .made_up_tokenizer import made_up_tokenizer
from .offline import release_memory
from .options import BenchOptions
from .result import Result, Run, compared

GRAMMAR_EVERY = 10
"""Every so many rows has a grammar in the case of that name."""

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Load(EngineLoad):
    """The workload.

    Attributes:
        rows: samples that decode together, after prompts of `prompt` tokens.
        tokens: of each, in a measured run.
    """

    rows: int = 256
    prompt: int = 32
    tokens: int = 80

    @property
    def timed_rows(self) -> int:
        """Rows without a grammar, where some have one: those that decode in every step."""
        return self.rows - -(-self.rows // GRAMMAR_EVERY)


def run(name: str, options: BenchOptions, say: Callable[[str], None]) -> Result:
    """Measure all cases under each loop asked for.

    Raises:
        InvalidConfig: there is no CUDA device.
    """
    return measure_load(name, Load(), run_load, options, say, grammar_every=GRAMMAR_EVERY)


def run_load(load: Load, loop: str, options: BenchOptions, say: Callable[[str], None]) -> list[Run]:
    """Measure the bare argmax, then all cases, on one engine; each is told of as it is done."""
    measured: dict[str, list[Run]] = {}
    engine = _TimedEngine(load, **_settings(load, loop, options))
    with engine:
        for draw, cases in ((bare_argmax, {"argmax": _greedy}), (sample, CASES)):
            engine.make_tokens_by(draw)
            for case, parameters in cases.items():
                time_step(engine, load, parameters, WARM_UP_TOKENS)
                measured[case] = [_measure(engine, load, parameters, loop) for _ in range(options.repetitions)]
                milliseconds = median(run.ms_per_step or 0.0 for run in measured[case])
                say(f"{case}, {loop} loop: {milliseconds:.2f} ms a step")
    del engine
    release_memory()
    return compared(measured)


def _settings(load: Load, loop: str, options: BenchOptions) -> dict[str, Any]:
    return load.settings(loop, options) | {
        "max_rows": load.rows,
        # Rows with a grammar are let go at the end, before they reach it.
        "max_model_len": 2 * (load.prompt + load.tokens),
        "max_ledgers": load.rows,
        "prefix_cache": False,  # the same prompts come in every repetition
        "graphs": False,  # those of the steps that are timed are captured later
    }


Draw = Callable[..., None]
"""Makes tokens of logits, see `sampling.sampler.sample`."""


class _TimedEngine(Engine):
    """An engine with a made-up tokenizer, which grammars need, and its own way of making tokens of logits."""

    def __init__(self, load: Load, **settings: Any) -> None:
        self._draw: Draw = sample
        buckets = Buckets.padded(load.rows)
        self._sizes = [size for size in buckets.sizes if size >= buckets.fit(load.timed_rows)]
        super().__init__(**settings)

    def _build(self) -> Parts:
        return build(self.config, draw=lambda *given: self._draw(*given), make_tokenizer=made_up_tokenizer)

    def make_tokens_by(self, draw: Draw) -> None:
        """Draw with `draw` from now on; nothing may be running."""
        self._draw = draw
        with self._parts.device.current(), torch.inference_mode():
            self._parts.capture(sizes=self._sizes)
            self._parts.device.synchronize()


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
    errors.fill_(0)  # by a kernel: the one behind it starts early


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


def time_step(engine: Engine, load: Load, parameters: Parameters, tokens: int) -> float:
    """Let all rows that are timed have so many tokens, and the others go then; return the seconds of a step.

    Raises:
        TwostrokeError: a row did not run throughout.
    """
    rng = random.Random(0)
    prompts = [[rng.randint(10, 250) for _ in range(load.prompt)] for _ in range(load.rows)]
    asked = [SamplingParams(max_tokens=None, ignore_eos=True, **parameters(row)) for row in range(load.rows)]
    asked = [params if params.structured else replace(params, max_tokens=tokens) for params in asked]
    window: deque[StepTimes] = deque(maxlen=2 * tokens + 2 * load.rows)
    engine._parts.runner.activity.window = window
    handles = [engine.submit(prompt, params) for prompt, params in zip(prompts, asked, strict=True)]
    endless = [handle for handle, params in zip(handles, asked, strict=True) if params.structured]
    outputs = [handle.result() for handle in handles if handle not in endless]
    complete = not any(handle.done for handle in endless) and not engine.stats().preemptions
    for handle in endless:
        handle.cancel()
        handle.result()
    if not complete or any(len(output.token_ids) < tokens for output in outputs):
        raise TwostrokeError(f"not all of {load.rows} rows ran throughout {tokens} tokens")
    return _median_period(window, load)


def _median_period(window: deque[StepTimes], load: Load) -> float:
    """Seconds from one step in which all timed rows decode to the next one."""
    steady = [times for times in list(window) if times.lanes >= load.timed_rows]
    periods = [b.compute[0] - a.compute[0] for a, b in pairwise(steady) if b.step == a.step + 1]
    if not periods:
        raise TwostrokeError(f"there were no two steps in a row in which {load.timed_rows} rows decode")
    return median(periods)


def _measure(engine: Engine, load: Load, parameters: Parameters, loop: str) -> Run:
    step = time_step(engine, load, parameters, load.tokens)
    tokens = load.tokens * load.rows
    return Run(engine="twostroke", loop=loop, seconds=load.tokens * step, tokens=tokens, ms_per_step=1e3 * step)
