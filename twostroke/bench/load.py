"""What the benchmarks have in common that measure one load on a GPU, in engines that they make for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..errors import InvalidConfig
from ..model.interface import Model
from ..sampling_params import SamplingParams
from .offline_workloads import MAX_STEP_TOKENS
from .options import BenchOptions
from .result import Result, Run

if TYPE_CHECKING:
    from ..engine import EngineStats

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


@dataclass(frozen=True)
class EngineLoad:
    """The part of a workload that all have.

    Attributes:
        model: a preset. device, dtype: of the engine.
    """

    model: str = "llama-3.1-8b"
    device: str = "cuda"
    dtype: str = "bfloat16"

    def settings(self, loop: str, options: BenchOptions) -> dict[str, Any]:
        """Arguments of the engine that do not depend on the benchmark."""
        return {
            "model": self.model,
            "impl": options.impl,
            "device": self.device,
            "dtype": self.dtype,
            "loop": loop,
            "slots": options.slots,
            "max_step_tokens": options.step_tokens(MAX_STEP_TOKENS),
            "seed": 0,
        }


AnyLoad = TypeVar("AnyLoad", bound=EngineLoad)


def measure_load(
    name: str,
    load: AnyLoad,
    run_load: Callable[[AnyLoad, str, BenchOptions, Callable[[str], None]], list[Run]],
    options: BenchOptions,
    say: Callable[[str], None],
    **facts: object,
) -> Result:
    """Let `run_load` measure under each loop asked for; `facts` are further ones of the workload.

    Raises:
        InvalidConfig: there is no CUDA device.
    """
    need_cuda(name)
    runs = [run for loop in options.loops for run in run_load(load, loop, options, say)]
    workload = asdict(load) | options.facts(MAX_STEP_TOKENS) | facts
    return Result(benchmark=name, gpu=torch.cuda.get_device_name(), workload=workload, runs=tuple(runs))


def need_cuda(name: str) -> None:
    """Raise `InvalidConfig` if there is no device for the benchmark of that name."""
    if not torch.cuda.is_available():
        raise InvalidConfig(f"benchmark {name!r} needs a CUDA device")


def block_figures(stats: EngineStats) -> dict[str, float]:
    """What the engine chose by, between copies and computing again: microseconds of a block."""
    return {
        "block_save_us": 1e6 * stats.block_save_seconds,
        "block_load_us": 1e6 * stats.block_load_seconds,
        "block_compute_us": 1e6 * stats.block_compute_seconds,
    }


def random_prompt(rng: random.Random, model: Model, length: int) -> list[int]:
    """So many tokens out of the first 10,000."""
    top = min(10_000, model.vocab_size) - 1
    return [rng.randint(10, top) for _ in range(length)]
