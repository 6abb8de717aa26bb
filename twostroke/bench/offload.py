"""`offload`: requests are preempted by others, and come back from host memory, or are computed again.

The requests that are preempted fill the cache; as many of a higher priority arrive at once, take all rows and blocks,
and end. The time is that from their arrival to the last token of the last request. Both cases have the same steps to
run, but for those that compute the preempted requests again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from .. import Engine
from ..errors import InvalidConfig, TwostrokeError
from ..sampling_params import SamplingParams
from ..text.output import RequestOutput
from .load import EngineLoad, block_figures, measure_load, random_prompt
from .measure import measured_between
from .offline import release_memory
from .offline_workloads import MAX_STEP_TOKENS
from .options import BenchOptions
from .result import Result, Run, compared

BLOCK_SIZE = 16
PATIENCE = 3600.0
"""Seconds that a level of priority is worth: more than a round takes on any device."""

SPARE_STEPS = 64
"""Steps that may pass between the first token of the last request and the arrival of the others."""


@dataclass(frozen=True)
class Load(EngineLoad):
    """The workload.

    Attributes:
        requests: that are preempted, and that preempt them. prompt: tokens of each.
        tokens: output tokens of each, see `check`.
        block_bytes: of one block of the model in that dtype.
    """

    requests: int = 64
    prompt: int = 4000
    tokens: int = 384
    block_bytes: int = 2 << 20

    @property
    def blocks(self) -> int:
        """Blocks that all the requests fill."""
        return self.requests * -(-(self.prompt + self.tokens) // BLOCK_SIZE)

    def check(self, step_tokens: int) -> None:
        """Raise `InvalidConfig` if requests end too soon where a step has so many tokens.

        The first of them decodes while the prompts of all of its kind, and then of all the others, are computed, until
        the last of these takes its row.
        """
        room = step_tokens - self.requests
        if room < 1 or self.tokens < 2 * -(-self.requests * self.prompt // room) + SPARE_STEPS:
            raise InvalidConfig(
                f"max_step_tokens={step_tokens}: the first of {self.requests} requests ends, after {self.tokens} "
                "tokens, before the last prompt is computed"
            )


def run(name: str, options: BenchOptions, say: Callable[[str], None]) -> Result:
    """Measure both cases under each loop asked for.

    Raises:
        InvalidConfig: there is no CUDA device, the host lacks the memory, or steps are too small.
    """
    return measure_load(name, Load(), run_load, options, say)


def run_load(load: Load, loop: str, options: BenchOptions, say: Callable[[str], None]) -> list[Run]:
    """Measure recomputation, then offload with room for all, each in an engine of its own."""
    load.check(options.step_tokens(MAX_STEP_TOKENS))
    measured: dict[str, list[Run]] = {}
    for case, offload_bytes in (("recompute", None), ("offload", load.blocks * load.block_bytes)):
        say(f"{case}, {loop} loop")
        with Engine(
            **load.settings(loop, options),
            max_rows=load.requests,
            max_model_len=load.prompt + load.tokens,
            block_size=BLOCK_SIZE,
            num_blocks=1 + load.blocks,
            offload_bytes=offload_bytes,
            policy="priority",
            patience=PATIENCE,
        ) as engine:
            rng = random.Random(0)
            _preempt_all(engine, load, loop, rng)  # graphs of prompt steps are captured meanwhile
            runs = [_preempt_all(engine, load, loop, rng) for _ in range(options.repetitions)]
        measured[case] = runs
        del engine
        release_memory()
    return compared(measured)


def _preempt_all(engine: Engine, load: Load, loop: str, rng: random.Random) -> Run:
    """Run one round, with prompts of its own.

    Raises:
        TwostrokeError: a request was not preempted, or did not get all its tokens.
    """
    low = [random_prompt(rng, engine.model, load.prompt) for _ in range(load.requests)]
    high = [random_prompt(rng, engine.model, load.prompt) for _ in range(load.requests)]
    handles = [engine.submit(prompt, _params(load.tokens, priority=0)) for prompt in low]
    while any(handle.sample.timings.first_token is None and not handle.done for handle in handles):
        time.sleep(0.001)
    before, start = engine.stats(), time.perf_counter()
    others = [engine.submit(prompt, _params(load.tokens, priority=1)) for prompt in high]
    answers = [handle.result() for handle in others]
    took_rows = max(map(_finished, answers)) - start
    outputs = [handle.result() for handle in handles]
    seconds, after = max(map(_finished, outputs)) - start, engine.stats()
    if any(not output.preemptions or len(output.token_ids) < load.tokens for output in outputs):
        raise TwostrokeError(f"not all of {load.requests} requests were preempted, and went on to their end")
    measured = measured_between(before, after, outputs + answers, seconds)
    return Run(
        engine="twostroke",
        loop=loop,
        seconds=seconds,
        tokens=measured.tokens,
        ms_per_step=1e3 * seconds / measured.steps,
        gpu_active=measured.active,
        extra={
            "preempting_s": took_rows,
            "rest_s": seconds - took_rows,
            "host_hit_tokens": after.host_hit_tokens - before.host_hit_tokens,
            "offloaded_blocks": after.offloaded_blocks - before.offloaded_blocks,
            "returned_blocks": after.returned_blocks - before.returned_blocks,
            **block_figures(after),
        },
    )


def _params(tokens: int, *, priority: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, priority=priority)


def _finished(output: RequestOutput) -> float:
    finished = output.timings.finished
    assert finished is not None
    return finished
