"""`prefix`: time to first token of a prompt that is new, in the prefix cache, or in its second tier on the host.

The engine does nothing else. Its cache holds two prompts, so each is evicted before its third time. Where the engine
finds that copies do not pay, it computes again what was evicted: `returned_tokens` says how many tokens of a prompt
came back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import NamedTuple

from .. import Engine
from ..errors import TwostrokeError
from .load import ONE_TOKEN, EngineLoad, block_figures, measure_load, random_prompt
from .offline import release_memory
from .options import BenchOptions
from .result import Result, Run, compared

BLOCK_SIZE = 16
WARM_UP = 4
"""Prompts that come first: graphs are captured, and times learned, meanwhile."""


class _Answer(NamedTuple):
    """What came of a prompt: seconds from submit to first token, tokens found, and those that the host had of them."""

    seconds: float
    cached: int
    returned: int


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
        runs = [
            _time_round(engine, loop, _prompts(engine, load, load.prompts, rng), say)
            for _ in range(options.repetitions)
        ]
    del engine
    release_memory()
    return compared({case: [cases[case] for cases in runs] for case in runs[0]})


def _time_round(engine: Engine, loop: str, prompts: list[list[int]], say: Callable[[str], None]) -> dict[str, Run]:
    """Measure each case with `prompts`."""
    answers, rates = _time_cases(engine, prompts), block_figures(engine.stats())
    whole = _found(prompts[0])
    if computed := sum(answer.cached < whole for answer in answers["host hit"]):
        by = ", ".join(f"{name} {value:.1f}" for name, value in rates.items())
        say(f"{computed} of {len(answers['host hit'])} host hits were computed again, by the engine's choice: {by}")
    return {case: _run(loop, every, rates) for case, every in answers.items()}


def _run(loop: str, answers: Sequence[_Answer], rates: dict[str, float]) -> Run:
    seconds = [answer.seconds for answer in answers]
    figures = {
        "first_token_ms": 1e3 * median(seconds),
        "longest_ms": 1e3 * max(seconds),
        "cached_tokens": mean(answer.cached for answer in answers),
        "returned_tokens": mean(answer.returned for answer in answers),
    }
    return Run(engine="twostroke", loop=loop, seconds=median(seconds), tokens=1, extra=figures | rates)


def _time_cases(engine: Engine, prompts: list[list[int]]) -> dict[str, list[_Answer]]:
    """What came of each prompt, by case.

    Raises:
        TwostrokeError: a prompt was found that is new, or not found right after it was computed.
    """
    answers: dict[str, list[_Answer]] = {"miss": [], "hit": [], "host hit": []}
    for prompt in prompts:
        for case, expected in (("miss", 0), ("hit", _found(prompt))):
            answer = _first_token(engine, prompt)
            if (answer.cached, answer.returned) != (expected, 0):
                raise TwostrokeError(
                    f"{answer.cached} tokens of a prompt were found and {answer.returned} of them came back from the "
                    f"host in a {case}, instead of {expected} and 0"
                )
            answers[case].append(answer)
    for prompt in prompts[:-2]:  # the last two are still on the device
        answers["host hit"].append(_first_token(engine, prompt))
    return answers


def _found(prompt: list[int]) -> int:
    """Tokens that can be found of a prompt which the cache has: full blocks, without the last token."""
    return (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


def _first_token(engine: Engine, prompt: list[int]) -> _Answer:
    before = engine.stats().host_hit_tokens
    output = engine.generate([prompt], ONE_TOKEN, progress=False)[0]
    assert output.timings.first_token is not None
    seconds = output.timings.first_token - output.timings.submitted
    return _Answer(seconds, output.cached_tokens, engine.stats().host_hit_tokens - before)


def _prompts(engine: Engine, load: Load, count: int, rng: random.Random) -> list[list[int]]:
    return [random_prompt(rng, engine.model, load.prompt) for _ in range(count)]
