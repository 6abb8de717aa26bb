"""Limits: what a request is checked against."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .cache_groups import CacheGroups


@dataclass(frozen=True)
class Limits:
    """What a request is checked against: facts of the model and of the cache."""

    vocab_size: int
    max_model_len: int
    """Prompt + output tokens of one sample may not exceed this."""
    block_size: int
    usable_blocks: int
    """Blocks of the cache that requests can have (the dummy block is not among them)."""
    windows: tuple[int, ...] = (0,)
    """Of the cache groups, see `CacheGroups`."""
    max_chunk_tokens: int = 1
    """Most tokens of a prompt chunk, which a cache group with a window has room for."""
    eos_ids: tuple[int, ...] = ()
    priorities: bool = False
    """The scheduler's policy heeds them."""
    max_waiting: int | None = None
    """Most samples that may wait before they begin to run; None is any number."""
    max_ledgers: int = 1
    """Samples that can have a ledger at once."""

    @cached_property
    def groups(self) -> CacheGroups:
        return CacheGroups(self.windows, self.block_size, self.max_chunk_tokens)

    @cached_property
    def cache_positions(self) -> int:
        """KV positions that one sample can have at most."""
        return self.groups.positions(self.usable_blocks)
