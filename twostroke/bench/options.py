"""What a caller may choose about a benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Attributes:
    repetitions: measured runs of each engine.
    loops: loops of twostroke to measure, in this order.
    impl, slots, max_step_tokens: of the engine, where the benchmark does not fix them.
    peers: names of other engines to measure on the same workload, see `peers.PEERS`.
    peer_dir: folder with the peers' scripts, their models' configurations and what they import.
    """

    repetitions: int
    loops: tuple[str, ...] = ("sync", "async")
    impl: str = "auto"
    slots: int = 2
    max_step_tokens: int = 2048
    peers: tuple[str, ...] = ()
    peer_dir: Path | None = None
