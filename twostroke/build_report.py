"""The report of a build: what putting an engine together took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BuildReport:
    """What building the engine took.

    Attributes:
        num_blocks: blocks of the cache, the dummy block included. cache_bytes: their bytes.
        slot_host_bytes, slot_device_bytes: bytes of one slot's buffers.
        graphs: CUDA graphs captured.
        weights_device_bytes, ready_device_bytes: device memory in use with the weights loaded, and at the end, graphs
            included; 0 on the CPU.
        weights_seconds, ready_seconds: time to load the weights, and from then to the end.
    """

    num_blocks: int
    cache_bytes: int
    slot_host_bytes: int
    slot_device_bytes: int
    graphs: int
    weights_device_bytes: int
    ready_device_bytes: int
    weights_seconds: float
    ready_seconds: float
