"""Which replica has which beginnings of prompts in its prefix cache, as far as one router has seen."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import msgspec

BLOCK_BYTES = 256
"""Beginnings are told apart in steps of so many bytes of JSON."""

MAX_BLOCKS = 256
"""What is behind so many blocks of a prompt does not count."""


class _Prompt(msgspec.Struct):
    instructions: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")


def prefix_blocks(body: bytes) -> list[int]:
    """Return a number for each beginning of a request's prompt that is a multiple of `BLOCK_BYTES` long.

    Two prompts have as many first numbers in common as they have first blocks. A body that is no request has none.
    The prompt is taken as the bytes that say it: a chat and its next turn are equal up to the end of the former.
    """
    try:
        prompt = msgspec.json.decode(body, type=_Prompt)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return []
    text = b"".join(map(bytes, (prompt.instructions, prompt.messages, prompt.prompt, prompt.input)))
    digest = hashlib.blake2b(digest_size=8)
    blocks = []
    for end in range(BLOCK_BYTES, min(len(text), MAX_BLOCKS * BLOCK_BYTES) + 1, BLOCK_BYTES):
        digest.update(text[end - BLOCK_BYTES : end])
        blocks.append(int.from_bytes(digest.digest(), "little"))
    return blocks


class PrefixMap:
    """Ranks replicas for a prompt: the one that had its longest known beginning goes first, unless it is overloaded.

    A prompt whose beginning nobody is known to have goes where the hash of its first block says (rendezvous hashing),
    so routers that have seen different requests mostly agree. A replica is overloaded if its load is above `slack`
    times the mean and `lead` (consistent hashing with bounded loads, Mirrokni et al. 2016); so a beginning that all
    requests share is spread over as many replicas as its load needs.

    Args:
        capacity: beginnings that are remembered, those used last.
        slack, lead: see above.
    """

    def __init__(self, capacity: int = 1 << 17, slack: float = 1.25, lead: int = 4) -> None:
        self._capacity = capacity
        self._slack = slack
        self._lead = lead
        self._owners: OrderedDict[int, str] = OrderedDict()

    def rank(self, blocks: Sequence[int], loads: Mapping[str, int]) -> list[str]:
        """Return the replicas, best first.

        Args:
            blocks: see `prefix_blocks`; without any the least loaded goes first.
            loads: requests that each replica has; at least one replica.
        """
        bound = self._slack * (sum(loads.values()) + 1) / len(loads) + self._lead
        owner = self._owner(blocks, loads)

        def cost(replica: str) -> tuple[bool, bool, int]:
            if loads[replica] > bound:
                return True, False, loads[replica]
            return False, replica != owner, _weight(blocks[0], replica) if blocks else loads[replica]

        return sorted(loads, key=cost)

    def note(self, blocks: Sequence[int], replica: str) -> None:
        """Remember that `replica` was sent a prompt."""
        for block in blocks:
            self._owners[block] = replica
            self._owners.move_to_end(block)
        while len(self._owners) > self._capacity:
            self._owners.popitem(last=False)

    def _owner(self, blocks: Sequence[int], loads: Mapping[str, int]) -> str | None:
        owners = (self._owners.get(block) for block in reversed(blocks))
        return next((owner for owner in owners if owner in loads), None)


def _weight(block: int, replica: str) -> int:
    data = block.to_bytes(8, "little") + replica.encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
