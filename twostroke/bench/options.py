"""What a caller may choose about a benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What a benchmark has no use for must have its default, see `registry.Benchmark.takes`.

    Attributes:
        repetitions: measured runs of each engine.
        loops: loops of twostroke to measure, in this order.
        impl, slots: of the engine. With `impl="both"`, `cases` has two.
        deterministic: measure that mode too, beside the engine without it.
        max_step_tokens: of the engine; None is the benchmark's own.
        kernels: also profile a window of steady steps, kernel by kernel.
        update_every: replace the weights about every so many steps of a measured run; None is never.
        api_processes: serve by so many too, beside one.
        peers: names of other engines to measure on the same workload, see `peers.PEERS`.
        peer_dir: folder with the peers' scripts, their models' configurations and what they import.
    """

    repetitions: int
    loops: tuple[str, ...] = ("sync", "async")
    impl: str = "auto"
    slots: int = 2
    deterministic: bool = False
    max_step_tokens: int | None = None
    kernels: bool = False
    update_every: int | None = None
    api_processes: int = 1
    peers: tuple[str, ...] = ()
    peer_dir: Path | None = None

    def step_tokens(self, own: int) -> int:
        """The `max_step_tokens` to use, where the benchmark's own is `own`."""
        return own if self.max_step_tokens is None else self.max_step_tokens

    def facts(self, own_step_tokens: int) -> dict[str, Any]:
        """What a result says of the engine's options; see `step_tokens`."""
        return {"impl": self.impl, "slots": self.slots, "max_step_tokens": self.step_tokens(own_step_tokens)}

    def update_facts(self) -> dict[str, Any]:
        """What a result says of `update_every`: nothing if weights stay."""
        return {} if self.update_every is None else {"update_every": self.update_every}

    def cases(self) -> dict[str, dict[str, Any]]:
        """Arguments of the engine for each case to measure, by its name. All are measured against the first."""
        impls = ("native", "transformers") if self.impl == "both" else (self.impl,)
        cases: dict[str, dict[str, Any]] = {impl: {"impl": impl} for impl in impls}
        if self.deterministic:
            cases["deterministic"] = {"impl": impls[0], "deterministic": True}
        return cases
