"""What a caller may choose about a benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Attributes:
    repetitions: measured runs of each engine.
    loops: loops of twostroke to measure, in this order.
    impl, slots: of the engine, where the benchmark does not fix them.
    max_step_tokens: of the engine; None is the benchmark's own.
    peers: names of other engines to measure on the same workload, see `peers.PEERS`.
    peer_dir: folder with the peers' scripts, their models' configurations and what they import.
    """

    repetitions: int
    loops: tuple[str, ...] = ("sync", "async")
    impl: str = "auto"
    slots: int = 2
    max_step_tokens: int | None = None
    peers: tuple[str, ...] = ()
    peer_dir: Path | None = None

    def step_tokens(self, own: int) -> int:
        """The `max_step_tokens` to use, where the benchmark's own is `own`."""
        return own if self.max_step_tokens is None else self.max_step_tokens
