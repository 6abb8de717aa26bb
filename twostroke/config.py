"""The engine's configuration."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from .errors import InvalidConfig, shown

MAX_SLOTS = 8
MAX_ROWS = 1 << 16
MAX_STEP_TOKENS = 1 << 20
MAX_BLOCK_SIZE = 1 << 16
MAX_PATIENCE = 1e6
MAX_PROMPT_MS = 1e6
"""Bounds far beyond what pays: what exceeds them is a mistake, better told of by name than by a lack of memory."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All settings of an engine; `Engine` documents them. Checked by `validate`."""

    model: str | os.PathLike[str]
    impl: str
    device: Any
    dtype: Any
    loop: str
    slots: int
    max_rows: int
    max_step_tokens: int
    max_chunk_tokens: int | None
    block_size: int
    num_blocks: int | None
    cache_bytes: int | None
    max_model_len: int | None
    attention: str
    graphs: bool
    compile: bool | str
    deterministic: bool
    prefix_cache: bool
    offload_bytes: int | None
    policy: str
    patience: float | None
    max_waiting: int | None
    max_prompt_ms: float | None
    max_ledgers: int | None
    seed: int | None

    def validate(self) -> None:
        """Raise `InvalidConfig` for the first setting that is out of its range; the message names it and its value."""
        if not isinstance(self.model, str | os.PathLike) or not os.fspath(self.model):
            raise InvalidConfig(f"model={shown(self.model)} must be a name or a path")
        self._one_of("impl", "auto", "native", "transformers")
        self._one_of("loop", "async", "sync")
        self._one_of("attention", "auto", "triton", "torch")
        self._one_of("policy", "fcfs", "priority", "shortest")
        self._number("patience", MAX_PATIENCE)
        self._number("max_prompt_ms", MAX_PROMPT_MS)
        for name, low, high in (
            ("slots", 1, MAX_SLOTS),
            ("max_rows", 1, MAX_ROWS),
            ("max_step_tokens", 1, MAX_STEP_TOKENS),
            ("max_chunk_tokens", 1, None),
            ("block_size", 1, MAX_BLOCK_SIZE),
            ("num_blocks", 2, None),
            ("cache_bytes", 1, None),
            ("max_model_len", 2, None),
            ("max_waiting", 1, None),
            ("max_ledgers", 0, None),
            ("offload_bytes", 0, None),
            ("seed", 0, 2**64 - 1),
        ):
            self._integer(name, low, high)
        for name in ("graphs", "deterministic", "prefix_cache"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidConfig(f"{name}={shown(getattr(self, name))} must be True or False")
        if not isinstance(self.compile, bool) and self.compile != "auto":
            raise InvalidConfig(f"compile={shown(self.compile)} must be True, False or auto")
        if self.num_blocks is not None and self.cache_bytes is not None:
            raise InvalidConfig(
                f"num_blocks={self.num_blocks} and cache_bytes={self.cache_bytes} both size the cache: give one"
            )
        if self.offload_bytes and not self.prefix_cache:
            raise InvalidConfig(
                f"offload_bytes={self.offload_bytes} needs prefix_cache=True, which knows what the blocks hold"
            )
        if self.patience is not None and self.policy == "fcfs":
            raise InvalidConfig(f"patience={self.patience} needs policy='priority' or 'shortest'")

    def _one_of(self, name: str, *choices: str) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise InvalidConfig(f"{name}={shown(value)} must be one of {', '.join(choices)}")

    def _integer(self, name: str, low: int, high: int | None) -> None:
        value = getattr(self, name)
        if value is None and name in _OPTIONAL:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidConfig(f"{name}={shown(value)} must be an integer")
        if value < low or (high is not None and value > high):
            raise InvalidConfig(f"{name}={shown(value)} must be {f'in [{low}, {high}]' if high else f'at least {low}'}")

    def _number(self, name: str, high: float) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidConfig(f"{name}={shown(value)} must be a number")
        if not 0 < value <= high:
            raise InvalidConfig(f"{name}={shown(value)} must be in (0, {high:g}]")


_OPTIONAL = {
    "max_chunk_tokens",
    "num_blocks",
    "cache_bytes",
    "max_model_len",
    "max_waiting",
    "max_ledgers",
    "offload_bytes",
    "seed",
}
