"""How long a step takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from ..bench.floor import Cost
from ..plan import Plan
from ..scheduler.rows import RowTable


class Work(NamedTuple):
    """What a step has to do.

    Attributes:
        tokens: that the forward pass runs over.
        positions: of the cache that are read: of each row, all up to its last token.
        pairs: of a token and a position that it attends to.
    """

    tokens: int
    positions: int
    pairs: int


def decode_work(lanes: int, positions: int) -> Work:
    """That of a step of lanes alone, whose rows have so many positions together, the new ones included."""
    return Work(lanes, positions, positions)


def work_of(plan: Plan, rows: RowTable) -> Work:
    """That of the plan that was made last."""
    positions = int(rows.launched[plan.lane_rows].sum())
    if not len(plan.chunks):
        return decode_work(plan.num_lanes, positions)
    pairs = positions
    for _, start, count, _ in plan.chunks.tolist():
        positions += start + count
        pairs += count * start + count * (count + 1) // 2
    return Work(plan.num_tokens, positions, pairs)


class Flight(NamedTuple):
    """A step in flight, and the seconds that it takes the device."""

    plan: Plan
    seconds: float


class Roofline(NamedTuple):
    """A step at the machine's ceilings, seconds: the part that is due to reading, and that due to computing."""

    reading: float
    computing: float


@dataclass(frozen=True)
class StepTime:
    """A step's time on the device: that at the machine's ceilings, stretched, and what comes on top.

        seconds = read_factor * reading + compute_factor * computing + per_step
        reading + computing = hypot(weights / bandwidth, products / rate) + hypot(cache / bandwidth, attention / rate)

    Products and attention follow one upon the other. Each takes as long as the larger of its reading and its computing
    time where one is much larger, and longer than that where they are near each other, since neither hides the other
    wholly. Its time is due to the two in proportion to their squares.

    Attributes:
        cost: of the model.
        read_bytes_per_s, flop_per_s: the machine's ceilings.
        read_factor, compute_factor: see above.
        per_step: seconds, see above.
        host: seconds of the CPU before a step is launched.
    """

    cost: Cost
    read_bytes_per_s: float
    flop_per_s: float
    read_factor: float = 1.0
    compute_factor: float = 1.0
    per_step: float = 0.0
    host: float = 0.0

    def roofline(self, work: Work) -> Roofline:
        cost, reading, computing = self.cost, 0.0, 0.0
        products = cost.weight_bytes, cost.token_flop * work.tokens
        attention = cost.kv_bytes * work.positions, cost.attention_flop * work.pairs
        for read_bytes, flop in (products, attention):
            read, compute = read_bytes / self.read_bytes_per_s, flop / self.flop_per_s
            both = math.hypot(read, compute) or 1.0
            reading += read * read / both
            computing += compute * compute / both
        return Roofline(reading, computing)

    def seconds(self, work: Work) -> float:
        reading, computing = self.roofline(work)
        return self.read_factor * reading + self.compute_factor * computing + self.per_step
