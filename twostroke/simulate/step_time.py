"""How long a step takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..bench.floor import Cost
from ..plan import Plan
from ..scheduler.rows import RowTable


class Work(NamedTuple):
    """What a step has to do.

    Attributes:
        tokens: that the forward pass runs over. rows: that have a part in it.
        positions: of the cache that are read: of each row, all up to its last token.
        pairs: of a token and a position that it attends to.
    """

    tokens: int
    rows: int
    positions: int
    pairs: int


def decode_work(lanes: int, positions: int) -> Work:
    """That of a step of lanes alone, whose rows have so many positions together, the new ones included."""
    return Work(lanes, lanes, positions, positions)


def work_of(plan: Plan, rows: RowTable) -> Work:
    """That of the plan that was made last."""
    positions = int(rows.launched[plan.lane_rows].sum())
    if not len(plan.chunks):
        return decode_work(plan.num_lanes, positions)
    pairs = positions
    for _, start, count, _ in plan.chunks.tolist():
        positions += start + count
        pairs += count * start + count * (count + 1) // 2
    return Work(plan.num_tokens, plan.num_lanes + len(plan.chunks), positions, pairs)


class Flight(NamedTuple):
    """A step in flight, and the seconds that it takes the device."""

    plan: Plan
    seconds: float


@dataclass(frozen=True)
class StepTime:
    """A step's time on the device: what the ceilings allow, stretched, and what comes on top.

        seconds = factor * roofline + per_step + per_row * rows
        roofline = max(weights / bandwidth, products / rate) + max(cache / bandwidth, attention / rate)

    Products and attention follow one upon the other, so each has the larger of its reading and its computing time.

    Attributes:
        cost: of the model.
        read_bytes_per_s, flop_per_s: the machine's ceilings.
        factor, per_step, per_row: see above; seconds.
        host: seconds of the CPU before a step is launched.
    """

    cost: Cost
    read_bytes_per_s: float
    flop_per_s: float
    factor: float = 1.0
    per_step: float = 0.0
    per_row: float = 0.0
    host: float = 0.0

    def roofline(self, work: Work) -> float:
        cost = self.cost
        products = max(cost.weight_bytes / self.read_bytes_per_s, cost.token_flop * work.tokens / self.flop_per_s)
        attention = max(
            cost.kv_bytes * work.positions / self.read_bytes_per_s, cost.attention_flop * work.pairs / self.flop_per_s
        )
        return products + attention

    def seconds(self, work: Work) -> float:
        return self.factor * self.roofline(work) + self.per_step + self.per_row * work.rows
