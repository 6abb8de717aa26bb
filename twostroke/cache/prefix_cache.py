"""The prefix cache: which block holds what."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b

import numpy as np

from ..plan import DUMMY_BLOCK

DIGEST_BYTES = 16


def key_of(digest: bytes, group: int) -> bytes:
    """What a block of a cache group is known by."""
    return digest + group.to_bytes(2, "little") if group else digest


def keys_of(chain: Sequence[bytes], group: int) -> list[bytes]:
    """What the blocks of a cache group that hold `chain` are known by."""
    return [key_of(digest, group) for digest in chain] if group else list(chain)


Elsewhere = Callable[[bytes], bool]
"""Whether a key is known in another place."""


def nowhere(key: bytes) -> bool:
    return False


class PrefixCache:
    """Finds full blocks by their content, and remembers in which order those that nobody uses may go.

    A block's keys and values depend on its tokens and on all tokens before them, so a block is known by the digest of
    its own tokens and of the digest before it: a *chain*.

        tokens   t0 ... t15 | t16 ... t31 | t32 ... t40
        chain    d0 = H(t0 ... t15), d1 = H(d0, t16 ... t31); the last block is not full

    In a *namespace* other than b"" the first digest is also of the namespace's: chains of two of them have nothing in
    common.

    Each cache group has blocks of its own for the same tokens: a block's *key* is its digest and its group.

    Of several blocks with one content only the first to be published is known here. A known block is in use, or idle: a
    chain that is let go of becomes idle from its end to its beginning, so a block is never evicted before those that
    follow it, and of two chains the one let go of first is evicted first. The oldest of the idle blocks may have been
    made *ready*: they are saved elsewhere, and go first.

    NOTE: tokens are not compared where a digest is found. H is BLAKE2b of 128 bits under a random salt that never
    leaves the process: among 2**40 blocks two share a digest by chance with probability 2**-49, and who wants to force
    it knows neither the salt nor any digest.
    """

    def __init__(self, block_size: int, reaches: Sequence[int | None] = (None,)) -> None:
        """`reaches` of the cache groups, see `CacheGroups.reaches`."""
        self._size = block_size * np.dtype(np.int32).itemsize
        self._hash = partial(blake2b, digest_size=DIGEST_BYTES, salt=secrets.token_bytes(blake2b.SALT_SIZE))
        self._full = [group for group, reach in enumerate(reaches) if reach is None]
        self._sliding = [(group, reach) for group, reach in enumerate(reaches) if reach is not None]
        self._block_of: dict[bytes, int] = {}
        self._idle: OrderedDict[bytes, int] = OrderedDict()
        self._ready: OrderedDict[bytes, int] = OrderedDict()

    @property
    def idle(self) -> int:
        """Known blocks that nobody uses."""
        return len(self._idle) + len(self._ready)

    @property
    def ready(self) -> int:
        """Those of the idle blocks that were made ready to be evicted."""
        return len(self._ready)

    def idle_blocks(self) -> list[int]:
        """Known blocks that nobody uses, the next to be evicted first."""
        return [*self._ready.values(), *self._idle.values()]

    def known_blocks(self) -> list[int]:
        """All known blocks."""
        return list(self._block_of.values())

    def find(
        self,
        chain: list[bytes],
        tokens: np.ndarray,
        most: int,
        elsewhere: Elsewhere = nowhere,
        *,
        namespace: bytes = b"",
    ) -> int:
        """Return how many blocks, `most` or fewer, at the beginning of `tokens`, int32 [N], need not be computed.

        All of them are known, here or `elsewhere`, in the groups that see everything. In a group with a window those
        are that the next position sees; what lies before them may be gone.

        `chain` is the tokens' chain as far as it was needed before, and is extended as far as it is needed now.
        """

        def knows(index: int, group: int) -> bool:
            key = key_of(chain[index], group)
            return key in self._block_of or elsewhere(key)

        content = tokens.data.cast("B")
        count = 0
        while count < most:
            if count == len(chain):
                self._extend(chain, content, namespace)
            if not all(knows(count, group) for group in self._full):
                break
            count += 1
        while count and (missing := self._last_missing(count, knows)) is not None:
            count = missing
        return count

    def _last_missing(self, count: int, knows: Callable[[int, int], bool]) -> int | None:
        """The last block that a sliding group does not know, of those that a hit of `count` blocks needs."""
        missing = -1
        for group, reach in self._sliding:
            least = max(count - reach, missing + 1, 0)
            unknown = (index for index in range(count - 1, least - 1, -1) if not knows(index, group))
            missing = max(missing, next(unknown, -1))
        return missing if missing >= 0 else None

    def blocks(self, keys: Sequence[bytes]) -> np.ndarray:
        """The blocks that `keys` stand for, int32 [n]; the dummy block for those that are not known here."""
        return np.array([self._block_of.get(key, DUMMY_BLOCK) for key in keys], np.int32)

    def extend(self, chain: list[bytes], tokens: np.ndarray, count: int, *, namespace: bytes = b"") -> None:
        """Extend `chain`, as in `find`, to the first `count` blocks of `tokens`."""
        content = tokens.data.cast("B")
        while len(chain) < count:
            self._extend(chain, content, namespace)

    def publish(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Make `blocks` known, full blocks that hold what `keys` stand for, but where another one is known already."""
        for key, block in zip(keys, blocks, strict=True):
            self._block_of.setdefault(key, block)

    def _extend(self, chain: list[bytes], content: memoryview, namespace: bytes) -> None:
        at = len(chain) * self._size
        before = chain[-1] if chain else self._root(namespace)
        chain.append(self._hash(before + content[at : at + self._size]).digest())

    def _root(self, namespace: bytes) -> bytes:
        """What stands before the first block. No tokens have this digest: BLAKE2b is told what it is for."""
        return self._hash(namespace, person=b"namespace").digest() if namespace else b""

    def use(self, keys: Sequence[bytes]) -> list[bool]:
        """Take the known blocks of `keys` into use; returns of each whether it was idle."""
        return [self._idle.pop(key, None) is not None or self._ready.pop(key, None) is not None for key in keys]

    def count_idle(self, keys: Sequence[bytes]) -> int:
        """How many blocks of `keys` are known and idle."""
        return sum(key in self._idle or key in self._ready for key in keys)

    def retire(self, keys: Sequence[bytes], blocks: Sequence[int], unused: Sequence[bool]) -> list[int]:
        """Let go of blocks that hold what `keys` stand for.

        Those that nobody uses become idle, and are the last to be evicted.

        A block whose content another one is known for is of no use, but shows that the content still is: the other is
        as good as let go of just now. If the other was evicted in the meantime, this one takes its place.

        Returns:
            The blocks that hold nothing that anybody could find.
        """
        spare = []
        for key, block, is_unused in zip(reversed(keys), reversed(blocks), reversed(unused), strict=True):
            known = self._block_of.setdefault(key, block)
            if known != block:
                if is_unused:
                    spare.append(block)
                if key in self._idle:
                    self._idle.move_to_end(key)
                elif key in self._ready:
                    self._idle[key] = self._ready.pop(key)
            elif is_unused:
                self._idle[key] = block
        return spare

    def make_ready(self, count: int) -> list[tuple[bytes, int]]:
        """Let up to `count` idle blocks, the oldest first, be evicted before all others; return keys and blocks."""
        made = [self._idle.popitem(last=False) for _ in range(min(count, len(self._idle)))]
        self._ready.update(made)
        return made

    def evict(self, count: int) -> list[tuple[bytes, int]]:
        """Forget `count` idle blocks, the oldest first; return their keys and the blocks."""
        evicted = [(self._ready or self._idle).popitem(last=False) for _ in range(count)]
        for key, _ in evicted:
            del self._block_of[key]
        return evicted

    def clear(self) -> list[int]:
        """Forget everything; returns the blocks that were idle."""
        blocks = self.idle_blocks()
        self._block_of.clear()
        self._idle.clear()
        self._ready.clear()
        return blocks
