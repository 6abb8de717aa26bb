"""twostroke: an LLM inference engine in which the CPU and the GPU never wait for each other.

from twostroke import Engine, SamplingParams

with Engine() as engine:
    for output in engine.generate(["The capital of France is"], SamplingParams(temperature=0)):
        print(output.text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import (
    EngineAsleep,
    EngineClosed,
    EngineDead,
    InvalidConfig,
    InvalidRequest,
    InvalidWeights,
    NotEnoughMemory,
    QueueFull,
    TwostrokeError,
    UnsupportedModel,
)
from .request import FinishReason
from .sampling_params import SamplingParams
from .structured import StructuredOutput

if TYPE_CHECKING:
    from .engine import Engine
    from .rollout import Rollout, RolloutGroup, RolloutSample
    from .text.handle import Handle
    from .text.output import Delta, RequestOutput, SampleOutput, TokenLogprob

__version__ = "0.1.0"

__all__ = [
    "Delta",
    "Engine",
    "EngineAsleep",
    "EngineClosed",
    "EngineDead",
    "FinishReason",
    "Handle",
    "InvalidConfig",
    "InvalidRequest",
    "InvalidWeights",
    "NotEnoughMemory",
    "QueueFull",
    "RequestOutput",
    "Rollout",
    "RolloutGroup",
    "RolloutSample",
    "SampleOutput",
    "SamplingParams",
    "StructuredOutput",
    "TokenLogprob",
    "TwostrokeError",
    "UnsupportedModel",
]

_LAZY = {
    "Engine": "engine",
    "Handle": "text.handle",
    "Delta": "text.output",
    "RequestOutput": "text.output",
    "Rollout": "rollout",
    "RolloutGroup": "rollout",
    "RolloutSample": "rollout",
    "SampleOutput": "text.output",
    "TokenLogprob": "text.output",
}


def __getattr__(name: str) -> Any:
    """Import the engine, and torch with it, only when it is asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_LAZY[name]}", __name__), name)
