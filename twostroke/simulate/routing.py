"""Routing rules: which replica a request goes to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Protocol

from .arrivals import Arrival


class Rule(Protocol):
    """Chooses a replica for one arrival after the other; `loads` are the requests that each replica has."""

    def choose(self, arrival: Arrival, loads: Sequence[int]) -> int: ...


class RoundRobin:
    """One after the other."""

    def __init__(self, block_size: int, blocks: int) -> None:
        self._last = -1

    def choose(self, arrival: Arrival, loads: Sequence[int]) -> int:
        self._last = (self._last + 1) % len(loads)
        return self._last


class LeastLoaded:
    """Whoever has the fewest requests; of several the first."""

    def __init__(self, block_size: int, blocks: int) -> None: ...

    def choose(self, arrival: Arrival, loads: Sequence[int]) -> int:
        return min(range(len(loads)), key=loads.__getitem__)


class PrefixAware:
    """Whoever was sent the longest beginning of the prompt last, unless it has much more to do than others.

    The router knows what it sent, not what the caches kept: it remembers as many blocks as all of them have, and
    forgets those that came least recently. Where nothing is known, or the one that is known has more than `SLACK`
    requests and a quarter more than the least loaded, the least loaded is chosen.

    Args:
        block_size: tokens of a block. blocks: of all replicas together.
    """

    SLACK = 8

    def __init__(self, block_size: int, blocks: int) -> None:
        self._bytes, self._most = 4 * block_size, blocks
        self._sent: OrderedDict[bytes, int] = OrderedDict()

    def choose(self, arrival: Arrival, loads: Sequence[int]) -> int:
        chain = self._chain(arrival)
        known = next((self._sent[digest] for digest in reversed(chain) if digest in self._sent), None)
        least = min(range(len(loads)), key=loads.__getitem__)
        chosen = least if known is None or loads[known] > 1.25 * loads[least] + self.SLACK else known
        for digest in chain:
            self._sent[digest] = chosen
            self._sent.move_to_end(digest)
        while len(self._sent) > self._most:
            self._sent.popitem(last=False)
        return chosen

    def _chain(self, arrival: Arrival) -> list[bytes]:
        """A digest of every beginning of the prompt that is whole blocks."""
        content, before, chain = arrival.prompt.data.cast("B"), b"", []
        for at in range(0, content.nbytes - self._bytes + 1, self._bytes):
            before = blake2b(before + content[at : at + self._bytes], digest_size=16).digest()
            chain.append(before)
        return chain


RULES: dict[str, Callable[[int, int], Rule]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-aware": PrefixAware,
}
"""By name; each is made with the positions of a block, and the blocks of all replicas together."""
