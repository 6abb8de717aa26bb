"""The benchmarks by name. A new one is a module with a `run` function and a line in `BENCHMARKS`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields

from ..errors import InvalidConfig
from .options import BenchOptions
from .peers import check_peers
from .result import Result

ENGINE = frozenset({"loops", "impl", "slots", "max_step_tokens"})
"""Options of every benchmark that makes engines."""

CASES = ENGINE | {"deterministic"}
"""Of those that measure all of `BenchOptions.cases`."""

OFFLINE = CASES | {"kernels", "update_every"}
PEER = {"peers", "peer_dir"}


@dataclass(frozen=True)
class Benchmark:
    """A benchmark and where to find it. Its module is imported when it runs, since most need torch.

    Attributes:
        name: as on the command line.
        summary: one line on what it measures.
        module: of this package, with `run(name: str, options: BenchOptions, say: Callable[[str], None]) -> Result`.
        repetitions: measured runs of each engine, if the user asks for no other number.
        takes: the other options that it looks at; those of peers are for `peers.check_peers`.
    """

    name: str
    summary: str
    module: str
    repetitions: int
    takes: frozenset[str] = ENGINE

    def run(self, options: BenchOptions, say: Callable[[str], None]) -> Result:
        """Run the benchmark; `say` is told what is being done.

        Raises:
            InvalidConfig: the benchmark needs what this machine does not have, has no use for an option, or cannot be
                run by a peer asked for.
        """
        check_peers(self.name, options)
        self._check(options)
        try:
            module = importlib.import_module(f".{self.module}", __package__)
        except ModuleNotFoundError as error:
            raise InvalidConfig(f"benchmark {self.name!r} needs the package {error.name}, which is not here") from error
        result: Result = module.run(self.name, options, say)
        return result

    def _check(self, options: BenchOptions) -> None:
        """Refuse options that would change nothing."""
        if "deterministic" not in self.takes and (options.impl == "both" or options.deterministic):
            asked = "impl='both'" if options.impl == "both" else "deterministic=True"
            raise InvalidConfig(f"benchmark {self.name!r} measures one engine, not {asked} beside it")
        for option in fields(options):
            value = getattr(options, option.name)
            if option.default not in (MISSING, value) and option.name not in self.takes | PEER:
                raise InvalidConfig(f"benchmark {self.name!r} has no use for {option.name}={value!r}")


BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("cpu-demo", "SmolLM2 on the CPU, 8 prompts x 64 tokens, beside transformers", "cpu_demo", 3, CASES),
        Benchmark(
            "cpu-step",
            "the CPU's part of a steady decode step; the device's work is stubbed",
            "cpu_step",
            3,
            frozenset({"loops", "slots"}),
        ),
        Benchmark(
            "admission", "100,000 requests through the queue; the device's work is stubbed", "admission", 3, frozenset()
        ),
        Benchmark("article", "8B shape, 32 requests, prompt 128, 8,192 tokens each", "offline", 1, OFFLINE),
        Benchmark("article-512", "8B shape, 32 requests, prompt 128, 512 tokens each", "offline", 3, OFFLINE),
        Benchmark("rollouts-1024", "8B shape, 32 requests, prompt 256, 1,024 tokens each", "offline", 3, OFFLINE),
        Benchmark("rollouts-2048", "8B shape, 32 requests, prompt 256, 2,048 tokens each", "offline", 3, OFFLINE),
        Benchmark("rollouts-4096", "8B shape, 32 requests, prompt 256, 4,096 tokens each", "offline", 1, OFFLINE),
        Benchmark("rollouts-16384", "8B shape, 32 requests, prompt 256, 16,384 tokens each", "offline", 1, OFFLINE),
        Benchmark("small", "0.6B shape, 256 requests, 100 to 1,024 tokens in and out", "offline", 3, OFFLINE),
        Benchmark("gsm8k", "8B shape, 1,319 short prompts, 256 tokens each", "offline", 3, OFFLINE),
        Benchmark("sampling", "8B shape, 256 rows, sampling parameters against a bare argmax", "sampling", 3),
        Benchmark(
            "offload", "8B shape, 64 requests of 4,000 tokens preempted: offload against recomputation", "offload", 2
        ),
        Benchmark("prefix", "8B shape, 2,000 tokens of prompt: time to first token of a hit and a miss", "prefix", 3),
        Benchmark("tail", "rows in use over the life of a job whose requests differ in length", "tail", 1),
        Benchmark(
            "serving",
            "256 streaming clients over HTTP against the same load offline",
            "serving",
            2,
            ENGINE | {"api_processes"},
        ),
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
