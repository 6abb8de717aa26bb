"""Host slots: which block lies in which of them, and which is written over next."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container, Sequence

from .prefix_cache import DIGEST_BYTES


class HostSlots:
    """The books of the host's memory: keys of blocks, see `PrefixCache`, and the slots that they lie in.

        free    holds nothing
        loose   written over where none is free, the one used last longest ago first
        kept    not written over: somebody who was preempted awaits it

    What is awaited becomes kept only when its turn to be written over comes, and loose again when nobody awaits it any
    more.

    Args:
        count: blocks that there is room for.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(range(count - 1, -1, -1))
        self._loose: OrderedDict[bytes, int] = OrderedDict()
        self._kept: dict[bytes, dict[bytes, int]] = {}  # of each digest the keys, one per cache group, and their slots
        self._chains: dict[object, list[bytes]] = {}
        self._awaited: Counter[bytes] = Counter()

    def __len__(self) -> int:
        """Slots that hold something."""
        return self._count - len(self._free)

    def __contains__(self, key: bytes) -> bool:
        return key in self._loose or key in self._kept.get(key[:DIGEST_BYTES], ())

    def __getitem__(self, key: bytes) -> int:
        """The slot of the block that is known by `key`."""
        slot = self._loose.get(key)
        return self._kept[key[:DIGEST_BYTES]][key] if slot is None else slot

    def all(self) -> tuple[list[int], list[int]]:
        """The used slots, and the free ones."""
        return [*self._loose.values(), *(slot for kept in self._kept.values() for slot in kept.values())], [*self._free]

    def touch(self, key: bytes) -> None:
        """Note that the block of `key`, which is here, was used."""
        if key in self._loose:
            self._loose.move_to_end(key)

    def add(self, key: bytes, fixed: Container[int]) -> int | None:
        """The slot that the block of `key` gets; None if there is none but those that are kept, or `fixed`."""
        if self._free:
            slot = self._free.pop()
        elif (found := self._overwritten(fixed)) is not None:
            slot = found
        else:
            return None
        self._loose[key] = slot
        return slot

    def _overwritten(self, fixed: Container[int]) -> int | None:
        """Take the slot that is written over next from what it holds."""
        while self._loose:
            oldest, slot = next(iter(self._loose.items()))
            if oldest[:DIGEST_BYTES] in self._awaited:
                self._kept.setdefault(oldest[:DIGEST_BYTES], {})[oldest] = self._loose.pop(oldest)
            elif slot in fixed:
                return None
            else:
                return self._loose.pop(oldest)
        return None

    def keep(self, owner: object, chain: Sequence[bytes]) -> None:
        """Keep the blocks of `chain`, digests, those that are here and those that will be, until `owner` lets go."""
        self._chains[owner] = list(chain)
        self._awaited.update(chain)

    def let_go(self, owner: object) -> None:
        """What `owner` alone had kept, if anything, is loose, as if it were used just now."""
        for digest in reversed(self._chains.pop(owner, [])):
            self._awaited[digest] -= 1
            if not self._awaited[digest]:
                del self._awaited[digest]
                self._loose.update(self._kept.pop(digest, {}))

    def clear(self) -> None:
        """Forget what all slots hold."""
        used, _ = self.all()
        self._free += used
        self._loose.clear()
        self._kept.clear()
