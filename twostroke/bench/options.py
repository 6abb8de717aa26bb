"""What a caller may choose about a benchmark."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Attributes:
    repetitions: measured runs of each engine.
    loops: loops of twostroke to measure, in this order.
    impl, slots, max_step_tokens: of the engine, where the benchmark does not fix them.
    """

    repetitions: int
    loops: tuple[str, ...] = ("sync", "async")
    impl: str = "auto"
    slots: int = 2
    max_step_tokens: int = 2048
