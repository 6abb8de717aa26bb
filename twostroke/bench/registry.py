"""The benchmarks by name. A new one is a module with a `run` function and a line in `BENCHMARKS`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import InvalidConfig
from .result import Result


@dataclass(frozen=True)
class Benchmark:
    """A benchmark and where to find it. Its module is imported when it runs, since most need torch.

    Attributes:
        name: as on the command line.
        summary: one line on what it measures.
        module: of this package, with `run(repetitions: int, say: Callable[[str], None]) -> Result`.
        repetitions: measured runs of each engine, if the user asks for no other number.
    """

    name: str
    summary: str
    module: str
    repetitions: int

    def run(self, repetitions: int | None, say: Callable[[str], None]) -> Result:
        """Run the benchmark; `say` is told what is being done.

        Raises:
            InvalidConfig: the benchmark needs what this machine does not have.
        """
        module = importlib.import_module(f".{self.module}", __package__)
        result: Result = module.run(self.repetitions if repetitions is None else repetitions, say)
        return result


BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("cpu-demo", "SmolLM2 on the CPU, 8 prompts x 64 tokens, beside transformers", "cpu_demo", 3),
    )
}


def find(name: str) -> Benchmark:
    """The benchmark of that name.

    Raises:
        InvalidConfig: there is none; the message lists those that there are.
    """
    if name not in BENCHMARKS:
        raise InvalidConfig(f"benchmark {name!r} is unknown; known are {', '.join(BENCHMARKS)}")
    return BENCHMARKS[name]
