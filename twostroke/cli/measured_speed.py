"""The speed of an engine, as a file says that a benchmark measured it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InvalidRequest, TwostrokeError, shown

if TYPE_CHECKING:
    from ..bench.result import Run

WHOLE = ("model", "prompt_tokens")
"""What a result must state: others run no requests from beginning to end, or not with a model."""


@dataclass(frozen=True)
class MeasuredSpeed:
    """Attributes:
    source: benchmark, model, and GPU.
    tokens_per_s: output tokens a second.
    prompt_share: prompt tokens that were computed meanwhile, for each output token.
    prompt_tokens_per_s: further prompt tokens a second.
    """

    source: str
    tokens_per_s: float
    prompt_share: float
    prompt_tokens_per_s: float

    def seconds(self, prompt_tokens: int, completion_tokens: int) -> float:
        """What so many tokens take one engine."""
        further = max(0.0, prompt_tokens - self.prompt_share * completion_tokens)
        return completion_tokens / self.tokens_per_s + further / self.prompt_tokens_per_s


def read_speed(file: Path) -> MeasuredSpeed:
    """The speed of the fastest run of twostroke in a benchmark's result.

    Raises:
        InvalidRequest: the file cannot be read, is no result, or tells no speed, or a figure of it cannot be.
    """
    from ..bench.result import Result

    try:
        result = Result.read(file)
    except OSError as error:
        raise InvalidRequest(f"bench={str(file)!r} cannot be read: {error.strerror}") from error
    except ZeroDivisionError as error:
        raise InvalidRequest(f"bench={str(file)!r}: seconds=0 must be a number > 0") from error
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise InvalidRequest(f"bench={str(file)!r} is not a result of twostroke bench, as --json writes it") from error
    runs, facts = [run for run in result.runs if run.engine == "twostroke"], result.workload
    if not runs or not isinstance(facts, Mapping) or any(name not in facts for name in WHOLE):
        raise InvalidRequest(f"bench={str(file)!r}: {result.benchmark!r} does not tell how fast requests are answered")
    run = max(runs, key=lambda run: run.tokens_per_s)
    source = ", ".join(str(part) for part in (result.benchmark, facts["model"], result.gpu) if part)
    try:
        prompt_tokens, tokens = _figure("prompt_tokens", facts["prompt_tokens"]), _figure("tokens", run.tokens)
        speed = tokens / _figure("seconds", run.seconds)
        return MeasuredSpeed(source, speed, prompt_tokens / tokens, _prompt_speed(run, facts))
    except TwostrokeError as error:
        raise InvalidRequest(f"bench={str(file)!r}: {error}") from error


def _prompt_speed(run: Run, facts: Mapping[str, Any]) -> float:
    """Prompt tokens a second: at the ceiling of products, as far as the run came near its floor.

    Where the file tells no floor, a prompt token takes as long as an output token, which is more than it will.
    """
    from ..simulate.shape import cost_of_preset

    if run.floor_seconds is None:
        return run.tokens_per_s
    share, flop_per_s = _figure("floor_seconds", run.floor_seconds) / run.seconds, facts.get("flop_per_s")
    return _figure("flop_per_s", flop_per_s) / cost_of_preset(str(facts["model"])).token_flop * share


def _figure(name: str, value: Any) -> float:
    """Return a figure.

    Raises:
        InvalidRequest: it is no number, or none above 0.
    """
    if isinstance(value, int | float) and 0 < value <= sys.float_info.max:
        return value
    raise InvalidRequest(f"{name}={shown(value)} must be a number > 0")
