"""Putting the host tier together: its memory, its copies, its books."""

from __future__ import annotations

from functools import partial

import torch

from .attention.interface import Attention
from .cache.copy_costs import FIRST_COPIES, CopyCosts
from .cache.host_tier import HostTier
from .cache.offload import HostBlocks
from .config import EngineConfig
from .device.memory import host_free_bytes
from .device.streams import Device
from .device.transfers import Transfers
from .errors import InvalidConfig

_TRIALS = 3
"""Times that copies are measured at start; the fastest counts."""


def make_host_tier(
    config: EngineConfig, device: Device, attention: Attention, num_blocks: int, max_lanes: int
) -> tuple[HostTier, Transfers]:
    """Make the host tier of a cache of `num_blocks` blocks, and what makes its copies.

    Raises:
        InvalidConfig: `offload_bytes` holds no block, or is more than the host has.
    """
    assert config.offload_bytes is not None
    num_slots, room = config.offload_bytes // attention.block_bytes, host_free_bytes()
    if num_slots < 1:
        raise InvalidConfig(
            f"offload_bytes={config.offload_bytes} holds no block, which has {attention.block_bytes} bytes"
        )
    if config.offload_bytes > room:
        raise InvalidConfig(f"offload_bytes={config.offload_bytes}: the host has {room} bytes to spare")
    try:
        blocks = HostBlocks(attention, num_slots, attention.block_bytes, device.host_buffer, device.torch_device)
    except RuntimeError as error:  # torch's, where memory does not reach, or cannot be pinned
        raise InvalidConfig(
            f"offload_bytes={config.offload_bytes}: no memory for the host's blocks: {error}"
        ) from error
    costs = CopyCosts(config.block_size)
    _warm_up(blocks, min(num_slots, FIRST_COPIES), device, costs)
    transfers = Transfers(device, blocks, num_blocks)
    # What the largest step may take: a block for each lane, and those that its prompt tokens fill.
    ahead = max_lanes + config.max_step_tokens // config.block_size + 1
    return HostTier(num_slots, num_blocks, ahead, costs, transfers), transfers


def _warm_up(blocks: HostBlocks, count: int, device: Device, costs: CopyCosts) -> None:
    """Copy the dummy block there and back, which compiles what copies need; then learn what `count` copies take.

    NOTE: they all go to the dummy block, but all are of it, too.
    """
    index = torch.zeros(count, dtype=torch.int32, device=device.torch_device)
    device.synchronize()
    device.offload.run(partial(blocks.save, index[:1], [0]))
    device.offload.run(partial(blocks.load, [0], index[:1]))
    for copy in [partial(blocks.save, index, range(count)), partial(blocks.load, range(count), index)] * _TRIALS:
        device.offload.run(device.offload_meter.begin)
        device.offload.run(copy)
        device.offload.run(device.offload_meter.end)
    done = device.event()
    device.offload.record(done)
    done.synchronize()
    for observe in [costs.observe_saves, costs.observe_loads] * _TRIALS:
        began, ended = device.offload_meter.read()
        observe(count, ended - began)
