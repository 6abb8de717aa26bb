"""The engine's settings that a simulation heeds."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ..bench.floor import Cost
from ..config import EngineConfig
from ..errors import InvalidConfig, counted
from ..limits import Limits
from ..scheduler.policy import make_policy
from ..scheduler.scheduler import Scheduler
from ..scheduler.step_costs import StepCosts

VOCAB_SIZE = (1 << 31) - 1
"""Prompts may hold any token ids."""

MAX_TOKEN_SLOTS = 1 << 31
"""Of the row table, rows times tokens: 8 GiB of address space, of which only what is used takes memory."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Arguments of `Engine`, with its names, meanings and defaults.

    Only `max_model_len` has a default of its own. Where neither `num_blocks` nor `cache_bytes` is given, the cache
    takes what weights leave of the memory, up to what `max_rows` samples of full length need.
    """

    loop: str = "async"
    slots: int = 2
    max_rows: int = 256
    max_step_tokens: int = 2048
    max_chunk_tokens: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    cache_bytes: int | None = None
    max_model_len: int = 8192
    prefix_cache: bool = True
    policy: str = "fcfs"
    patience: float | None = None
    max_waiting: int | None = None
    max_prompt_ms: float | None = None

    def validate(self) -> None:
        """Raise `InvalidConfig` for the first setting that is out of its range."""
        given: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        others: dict[str, Any] = dict.fromkeys(EngineConfig.__dataclass_fields__)
        EngineConfig(**(others | _NOT_SIMULATED | given)).validate()
        if self.max_rows * self.max_model_len > MAX_TOKEN_SLOTS:
            raise InvalidConfig(
                f"max_rows={self.max_rows} times max_model_len={self.max_model_len} is more than {MAX_TOKEN_SLOTS}"
            )

    @property
    def depth(self) -> int:
        """Steps that can be in flight."""
        return self.slots if self.loop == "async" else 1

    def blocks(self, cost: Cost, memory_bytes: float) -> int:
        """Blocks of the cache, the dummy block included, for a model of that cost.

        Raises:
            InvalidConfig: there is no room for two.
        """
        if self.num_blocks is not None:
            return self.num_blocks
        room = memory_bytes - cost.weight_bytes if self.cache_bytes is None else self.cache_bytes
        blocks = int(room // (self.block_size * cost.kv_bytes))
        if blocks < 2:
            raise InvalidConfig(
                f"{room:.0f} bytes for the cache hold {counted(max(blocks, 0), 'block')}; at least 2 are needed"
            )
        return min(blocks, 1 + self.max_rows * -(-self.max_model_len // self.block_size))

    def limits(self, num_blocks: int) -> Limits:
        """What requests are checked against."""
        return Limits(
            vocab_size=VOCAB_SIZE,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            usable_blocks=num_blocks - 1,
            priorities=self.policy == "priority",
            max_waiting=self.max_waiting,
        )

    def scheduler(self, num_blocks: int) -> Scheduler:
        """The scheduler that the engine would have."""
        return Scheduler(
            max_rows=self.max_rows,
            max_step_tokens=self.max_step_tokens,
            max_chunk_tokens=self.max_chunk_tokens,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            num_blocks=num_blocks,
            prefix_cache=self.prefix_cache,
            policy=make_policy(self.policy, self.patience),
            costs=None if self.max_prompt_ms is None else StepCosts(self.max_prompt_ms * 1e-3),
        )


_NOT_SIMULATED: dict[str, Any] = {
    **{"model": "simulated", "impl": "auto", "device": "auto", "dtype": "auto", "attention": "auto"},
    **{"graphs": True, "compile": "auto", "deterministic": False},
}
"""Settings of an engine that are not simulated, but for those that may be None."""
