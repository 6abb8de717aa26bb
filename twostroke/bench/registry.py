"""The benchmarks by name. A new one is a module with a `run` function and a line in `BENCHMARKS`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import InvalidConfig
from .options import BenchOptions
from .peers import check_peers
from .result import Result


@dataclass(frozen=True)
class Benchmark:
    """A benchmark and where to find it. Its module is imported when it runs, since most need torch.

    Attributes:
        name: as on the command line.
        summary: one line on what it measures.
        module: of this package, with `run(name: str, options: BenchOptions, say: Callable[[str], None]) -> Result`.
        repetitions: measured runs of each engine, if the user asks for no other number.
    """

    name: str
    summary: str
    module: str
    repetitions: int

    def run(self, options: BenchOptions, say: Callable[[str], None]) -> Result:
        """Run the benchmark; `say` is told what is being done.

        Raises:
            InvalidConfig: the benchmark needs what this machine does not have, or cannot be run by a peer asked for.
        """
        check_peers(self.name, options)
        if self.module not in _COMPARING and (options.impl == "both" or options.deterministic):
            asked = "impl='both'" if options.impl == "both" else "deterministic=True"
            raise InvalidConfig(f"benchmark {self.name!r} measures one engine, not {asked} beside it")
        module = importlib.import_module(f".{self.module}", __package__)
        result: Result = module.run(self.name, options, say)
        return result


_COMPARING = {"cpu_demo", "offline"}
"""The modules that measure all of `BenchOptions.cases`."""

BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("cpu-demo", "SmolLM2 on the CPU, 8 prompts x 64 tokens, beside transformers", "cpu_demo", 3),
        Benchmark("cpu-step", "the CPU's part of a steady decode step; the device's work is stubbed", "cpu_step", 3),
        Benchmark("admission", "100,000 requests through the queue; the device's work is stubbed", "admission", 3),
        Benchmark("article", "8B shape, 32 requests, prompt 128, 8,192 tokens each", "offline", 1),
        Benchmark("article-512", "8B shape, 32 requests, prompt 128, 512 tokens each", "offline", 3),
        Benchmark("rollouts-1024", "8B shape, 32 requests, prompt 256, 1,024 tokens each", "offline", 3),
        Benchmark("rollouts-2048", "8B shape, 32 requests, prompt 256, 2,048 tokens each", "offline", 3),
        Benchmark("rollouts-4096", "8B shape, 32 requests, prompt 256, 4,096 tokens each", "offline", 1),
        Benchmark("rollouts-16384", "8B shape, 32 requests, prompt 256, 16,384 tokens each", "offline", 1),
        Benchmark("small", "0.6B shape, 256 requests, 100 to 1,024 tokens in and out", "offline", 3),
        Benchmark("gsm8k", "8B shape, 1,319 short prompts, 256 tokens each", "offline", 3),
        Benchmark("sampling", "8B shape, 256 rows, sampling parameters against a bare argmax", "sampling", 3),
        Benchmark(
            "offload", "8B shape, 64 requests of 4,000 tokens preempted: offload against recomputation", "offload", 2
        ),
        Benchmark("prefix", "8B shape, 2,000 tokens of prompt: time to first token of a hit and a miss", "prefix", 3),
        Benchmark("mixed", "8B shape, 64 rows decode while prompts of 2,000 tokens arrive", "mixed", 3),
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
