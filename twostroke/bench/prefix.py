"""`prefix`: time to first token of a prompt that is new, in the prefix cache, or in its second tier on the host.

The engine does nothing else. Its cache holds two prompts, so each is evicted before its third time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from .. import Engine
from ..errors import TwostrokeError
from .load import ONE_TOKEN, EngineLoad, measure_load, random_prompt
from .offline import release_memory
from .options import BenchOptions
from .result import Result, Run, compared

BLOCK_SIZE = 16
WARM_UP = 4
"""Prompts that come first: graphs are captured, and times learned, meanwhile."""


@dataclass(frozen=True)
class Load(EngineLoad):
    """The workload.

    Attributes:
        prompts: how many. prompt: tokens of each.
        block_bytes: of one block of the model in that dtype.
    """

    prompts: int = 16
    prompt: int = 2000
    block_bytes: int = 2 << 20

    @property
    def blocks(self) -> int:
        """Blocks that a prompt fills."""
        return -(-self.prompt // BLOCK_SIZE)


def run(name: str, options: BenchOptions, say: Callable[[str], None]) -> Result:
    """Measure the three cases under each loop asked for.

    Raises:
        InvalidConfig: there is no CUDA device, or the host lacks the memory.
    """
    return measure_load(name, Load(), run_load, options, say)


def run_load(load: Load, loop: str, options: BenchOptions, say: Callable[[str], None]) -> list[Run]:
    """Measure all cases in one engine."""
    say(f"{load.prompts} prompts, {loop} loop")
    rng = random.Random(0)
    with Engine(
        **load.settings(loop, options),
        max_rows=8,
        max_model_len=load.prompt + 1,
        block_size=BLOCK_SIZE,
        num_blocks=1 + 2 * load.blocks,
        offload_bytes=(WARM_UP + (1 + options.repetitions) * load.prompts) * load.blocks * load.block_bytes,
    ) as engine:
        _time_cases(engine, _prompts(engine, load, WARM_UP, rng))
        times = [_time_cases(engine, _prompts(engine, load, load.prompts, rng)) for _ in range(options.repetitions)]
    del engine
    release_memory()
    return compared({case: [_run(loop, seconds[case]) for seconds in times] for case in times[0]})


def _run(loop: str, seconds: Sequence[float]) -> Run:
    figures = {"first_token_ms": 1e3 * median(seconds), "longest_ms": 1e3 * max(seconds)}
    return Run(engine="twostroke", loop=loop, seconds=median(seconds), tokens=1, extra=figures)


def _time_cases(engine: Engine, prompts: list[list[int]]) -> dict[str, list[float]]:
    """Seconds to the first token of each prompt, by case."""
    found = (len(prompts[0]) - 1) // BLOCK_SIZE * BLOCK_SIZE
    times: dict[str, list[float]] = {"miss": [], "hit": [], "host hit": []}
    for prompt in prompts:
        times["miss"].append(_first_token(engine, prompt, cached=0, returned=0))
        times["hit"].append(_first_token(engine, prompt, cached=found, returned=0))
    for prompt in prompts[:-2]:  # the last two are still on the device
        times["host hit"].append(_first_token(engine, prompt, cached=found, returned=found))
    return times


def _first_token(engine: Engine, prompt: list[int], *, cached: int, returned: int) -> float:
    """Seconds from submit to first token.

    Raises:
        TwostrokeError: the cache did not have so many tokens of it, or not where they were expected.
    """
    before = engine.stats().host_hit_tokens
    output = engine.generate([prompt], ONE_TOKEN, progress=False)[0]
    came_back = engine.stats().host_hit_tokens - before
    if (output.cached_tokens, came_back) != (cached, returned):
        raise TwostrokeError(
            f"{output.cached_tokens} tokens of a prompt were found and {came_back} came back from the host, instead of "
            f"{cached} and {returned}"
        )
    assert output.timings.first_token is not None
    return output.timings.first_token - output.timings.submitted


def _prompts(engine: Engine, load: Load, count: int, rng: random.Random) -> list[list[int]]:
    return [random_prompt(rng, engine.model, load.prompt) for _ in range(count)]
