"""The prefix cache: which block holds what."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b

import numpy as np

DIGEST_BYTES = 16


class PrefixCache:
    """Finds full blocks by their content, and remembers in which order those that nobody uses may go.

    A block's keys and values depend on its tokens and on all tokens before them, so a block is known by the digest of
    its own tokens and of the digest before it: a *chain*.

        tokens   t0 ... t15 | t16 ... t31 | t32 ... t40
        chain    d0 = H(t0 ... t15), d1 = H(d0, t16 ... t31); the last block is not full

    Of several blocks with one content only the first to be published is known here. A known block is in use, or idle: a
    chain that is let go of becomes idle from its end to its beginning, so a block is never evicted before those that
    follow it, and of two chains the one let go of first is evicted first. The oldest of the idle blocks may have been
    made *ready*: they are saved elsewhere, and go first.

    NOTE: tokens are not compared where a digest is found. H is BLAKE2b of 128 bits under a random salt that never
    leaves the process: among 2**40 blocks two share a digest by chance with probability 2**-49, and who wants to force
    it knows neither the salt nor any digest.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size * np.dtype(np.int32).itemsize
        self._hash = partial(blake2b, digest_size=DIGEST_BYTES, salt=secrets.token_bytes(blake2b.SALT_SIZE))
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

    def find(self, chain: list[bytes], tokens: np.ndarray) -> list[int]:
        """Return the known blocks that hold the beginning of `tokens`, int32 [N]; never the last token.

        `chain` is the tokens' chain as far as it was needed before, and is extended as far as it is needed now.
        """
        content = tokens.data.cast("B")
        found: list[int] = []
        for index in range(self._findable(content)):
            if index == len(chain):
                self._extend(chain, content)
            block = self._block_of.get(chain[index])
            if block is None:
                break
            found.append(block)
        return found

    def extend(self, chain: list[bytes], tokens: np.ndarray, index: int) -> bool:
        """Let `chain` reach as far as block `index` of `tokens`, int32 [N]; False if that has the last token, or more.

        `chain` reaches as far as the block before at least.
        """
        content = tokens.data.cast("B")
        if index >= self._findable(content):
            return False
        if index == len(chain):
            self._extend(chain, content)
        return True

    def _findable(self, content: memoryview) -> int:
        """How many blocks of `content`, the bytes of tokens, may be found."""
        return (content.nbytes - 1) // self._size

    def publish(self, chain: list[bytes], tokens: np.ndarray, blocks: Sequence[int]) -> None:
        """Make `blocks` known, full blocks that hold the beginning of `tokens`, but where another one is known already.

        `chain` as in `find`.
        """
        content = tokens.data.cast("B")
        for index, block in enumerate(blocks):
            if index == len(chain):
                self._extend(chain, content)
            self._block_of.setdefault(chain[index], block)

    def _extend(self, chain: list[bytes], content: memoryview) -> None:
        at = len(chain) * self._size
        chain.append(self._hash((chain[-1] if chain else b"") + content[at : at + self._size]).digest())

    def adopt(self, chain: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Make `blocks`, which are in use and about to hold `chain`, known, but where others are known already."""
        for digest, block in zip(chain, blocks, strict=True):
            self._block_of.setdefault(digest, block)

    def use(self, chain: Sequence[bytes]) -> list[bool]:
        """Take the known blocks of `chain` into use; returns of each whether it was idle."""
        return [
            self._idle.pop(digest, None) is not None or self._ready.pop(digest, None) is not None for digest in chain
        ]

    def count_idle(self, chain: Sequence[bytes]) -> int:
        """How many blocks of `chain` are known and idle."""
        return sum(digest in self._idle or digest in self._ready for digest in chain)

    def retire(self, chain: Sequence[bytes], blocks: Sequence[int], unused: Sequence[bool]) -> list[int]:
        """Let go of blocks that hold `chain`; those that nobody uses become idle, and are the last to be evicted.

        A block whose content another one is known for is of no use, but shows that the content still is: the other is
        as good as let go of just now. If the other was evicted in the meantime, this one takes its place.

        Returns:
            The blocks that hold nothing that anybody could find.
        """
        spare = []
        for digest, block, is_unused in zip(reversed(chain), reversed(blocks), reversed(unused), strict=True):
            known = self._block_of.setdefault(digest, block)
            if known != block:
                if is_unused:
                    spare.append(block)
                if digest in self._idle:
                    self._idle.move_to_end(digest)
                elif digest in self._ready:
                    self._idle[digest] = self._ready.pop(digest)
            elif is_unused:
                self._idle[digest] = block
        return spare

    def make_ready(self, count: int) -> list[tuple[bytes, int]]:
        """Let up to `count` idle blocks, the oldest first, be evicted before all others; return digests and blocks."""
        made = [self._idle.popitem(last=False) for _ in range(min(count, len(self._idle)))]
        self._ready.update(made)
        return made

    def evict(self, count: int) -> list[tuple[bytes, int]]:
        """Forget `count` idle blocks, the oldest first; return their digests and the blocks."""
        evicted = [(self._ready or self._idle).popitem(last=False) for _ in range(count)]
        for digest, _ in evicted:
            del self._block_of[digest]
        return evicted

    def clear(self) -> list[int]:
        """Forget everything; returns the blocks that were idle."""
        blocks = self.idle_blocks()
        self._block_of.clear()
        self._idle.clear()
        self._ready.clear()
        return blocks
