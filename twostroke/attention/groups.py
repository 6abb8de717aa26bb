"""Cache groups: which layers share a block table, and which share memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from .interface import LayerSpec

MAX_GROUPS = 8
"""Most groups that layers are dealt to for the sake of memory: each has a table, and a row a block in each."""


def in_groups(layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Deal layers to cache groups: the layers of a group have one window, and groups have about equally many.

    A block has room for the layers of the largest group, so those of a smaller one waste some of it:

        26 layers that slide, 5 that see all     groups of 5, 5, 5, 5, 5, 1 and 5

    The size is the one that wastes least in the window where it wastes most; of several such, the largest. Groups are
    numbered by first appearance.
    """
    counts = Counter(layer.window for layer in layers)

    def waste(size: int) -> tuple[float, int]:
        return max(-(-count // size) * size / count for count in counts.values()), -size

    sizes = range(1, max(counts.values()) + 1)
    few = [size for size in sizes if sum(-(-count // size) for count in counts.values()) <= MAX_GROUPS]
    size = min(few or sizes[-1:], key=waste)
    seen: Counter[int] = Counter()
    numbers: dict[tuple[int, int], int] = {}
    dealt = []
    for layer in layers:
        group = numbers.setdefault((layer.window, seen[layer.window] // size), len(numbers))
        seen[layer.window] += 1
        dealt.append(layer._replace(group=group))
    return dealt


def windows_of(layers: Sequence[LayerSpec]) -> tuple[int, ...]:
    """The window of each group of `in_groups`."""
    windows = {layer.group: layer.window for layer in layers}
    return tuple(windows[group] for group in range(len(windows)))


class Room(NamedTuple):
    """Memory that one layer of each group shares: a block is of one group at a time.

    Attributes:
        place: of the layer in its group.
        kv_heads, head_dim: layers of different shapes share nothing.
    """

    place: int
    kv_heads: int
    head_dim: int

    def shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """The shape of the keys, and of the values."""
        return num_blocks, self.kv_heads, block_size, self.head_dim


def rooms_of(layers: Sequence[LayerSpec]) -> list[Room]:
    """The room of each layer."""
    seen: Counter[int] = Counter()
    rooms = []
    for layer in layers:
        rooms.append(Room(seen[layer.group], layer.kv_heads, layer.head_dim))
        seen[layer.group] += 1
    return rooms


def block_bytes(layers: Sequence[LayerSpec], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block's K and V, in all rooms."""
    by_room = dict(zip(rooms_of(layers), layers, strict=True))
    return sum(layer.block_bytes(block_size, dtype) for layer in by_room.values())
