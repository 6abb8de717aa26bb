"""What an engine's memory is given to: ledgers, the largest steps, and the cache, which gets the rest."""

from __future__ import annotations

from itertools import product

import torch

from .cache_groups import CacheGroups
from .config import EngineConfig
from .device.dummies import dummy_plan
from .device.memory import available_bytes, free_bytes
from .device.slot import Slot
from .errors import InvalidConfig, counted
from .plan import NO_FEATURES, Feature
from .runner import MAX_PROMPT_GRAPHS, MAX_SAMPLING_GRAPHS, Runner

GRAPH_BYTES = 4 << 20
"""Device memory that a captured graph takes beside the pool, at most: its nodes with their parameters."""

LEDGER_SHARE = 1 / 16
"""Share of the memory that the cache may take which ledgers may take of it."""


class BuildMemory:
    """Shares out the memory of `device`, as far as the configuration leaves it open.

    Args:
        max_lanes: most decode lanes of a step. longest: most tokens of a sample.
    """

    def __init__(self, config: EngineConfig, device: torch.device, *, max_lanes: int, longest: int) -> None:
        self._config = config
        self._device = device
        self._max_lanes = max_lanes
        self._longest = longest

    def ledgers(self, ledger_bytes: int) -> int:
        """How many ledgers there are: one a row, if a small share of the memory has room for them."""
        wanted = self._config.max_ledgers
        if wanted is not None:
            return min(wanted, self._max_lanes)
        affordable = LEDGER_SHARE * available_bytes(self._device) // ledger_bytes
        return max(1, min(int(affordable), self._max_lanes))

    def profile(self, runner: Runner, slot: Slot) -> int:
        """Run the largest steps eagerly on the dummy row, which also compiles what graphs do not hold.

        Returns:
            The bytes to keep free for steps and graphs.
        """
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        config = self._config
        most = min(config.max_step_tokens, config.max_rows * self._longest)
        for lanes, features in product((0, self._max_lanes), (NO_FEATURES, ~Feature.HELD)):
            plan = dummy_plan(config.max_rows, lanes, most - lanes, self._longest, features)
            runner.launch(plan, slot)
            runner.wait(plan, slot)
        runner.forget_activity()
        peak = torch.cuda.max_memory_allocated(self._device) - before
        # NOTE: an eager prompt step and the graphs' pool exist side by side, hence twice.
        return 2 * peak + ((MAX_PROMPT_GRAPHS + MAX_SAMPLING_GRAPHS) * GRAPH_BYTES if config.graphs else 0)

    def blocks(self, groups: CacheGroups, block_bytes: int, reserve: int) -> int:
        """How many blocks the cache has: those asked for, or as many as fit, but no more than rows can use.

        Args:
            reserve: bytes that must stay free beside the cache, if it has what is left.

        Raises:
            InvalidConfig: too few are affordable, or those that were asked for are not.
        """
        count = self._config.num_blocks or self._affordable_blocks(groups, block_bytes, reserve)
        self._check_fits(count * block_bytes)
        return count

    def _affordable_blocks(self, groups: CacheGroups, block_bytes: int, reserve: int) -> int:
        budget = self._config.cache_bytes
        if budget is None:
            budget = available_bytes(self._device) - reserve
        blocks = budget // block_bytes
        if blocks < 2:
            raise InvalidConfig(
                f"cache_bytes={budget} holds {counted(max(blocks, 0), 'block')} of {block_bytes} bytes; at least 2 "
                "(the dummy block and one more) are needed"
            )
        return int(min(blocks, 1 + self._config.max_rows * groups.blocks(self._longest)))

    def _check_fits(self, size: int) -> None:
        config, room = self._config, free_bytes(self._device)
        if size > room:
            asked = (
                f"cache_bytes={config.cache_bytes}" if config.num_blocks is None else f"num_blocks={config.num_blocks}"
            )
            raise InvalidConfig(f"{asked}: the cache would take {size} bytes, {room} are free")
