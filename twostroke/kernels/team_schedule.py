"""The schedule of decode attention by teams: each gets the same work, whatever the lanes.

A team is one warp for each kv head, which read the same positions. Lanes lie behind each other on a line, each as long
as its tiles and what it takes to begin and end it; the line is cut into equal parts, one for each team. So no team
waits for another, also where lanes are few and of many lengths, and nothing is drawn while the kernel runs. Cuts near
the ends of a lane move there, so that nobody reads crumbs. Where few lanes can be cut into as many parts as there are
teams and that is about as fast, each team gets one part: of `n` lanes of one length, for example.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .decode_schedule import RECORD
from .sizes import next_power_of_2

PART, NEXT = 6, 7
"""Words of a record beside those of `decode_schedule`: where the results of its lane's shares begin, in shares, if
there are several; and the line of the team's next record, 0 if there is none. A team without work has a LANE of -1."""

_RECORD = tl.constexpr(RECORD)
_PART, _NEXT = tl.constexpr(PART), tl.constexpr(NEXT)
_ENDS = tl.constexpr(3)  # tiles that are read in the time that it takes to begin and end a share
_DEAD = tl.constexpr(1)
_NEAR = tl.constexpr(3)  # tiles that no share is worth
_LEAST = tl.constexpr(8)  # of a team, at least _ENDS + 2 * _NEAR - 1: so the next record is of this or of the next team


class TeamSchedule(NamedTuple):
    """What each team of a step's decode attention does, for the layers of one kind.

    Attributes:
        words: int32 [2 * teams + max_lanes, RECORD]. The first lines are the teams' first records.
        teams: that share the work.
    """

    words: torch.Tensor
    teams: int

    @classmethod
    def empty(cls, max_lanes: int, teams: int, device: torch.device) -> TeamSchedule:
        """Return memory for steps of up to `max_lanes` lanes."""
        return cls(torch.empty(2 * teams + max_lanes, RECORD, dtype=torch.int32, device=device), teams)


@triton.jit
def _measure(lengths_ptr, lane, lanes, window, TILE: tl.constexpr):
    """Return (first visible position, past positions, tiles, cost in tiles) of lanes, none for those out of range."""
    inside = (lane >= 0) & (lane < lanes)
    length = tl.load(lengths_ptr + lane, mask=inside, other=0)
    past = tl.maximum(length - 1, 0)
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    tiles = tl.where(past > first, tl.cdiv(past, TILE) - first // TILE, 0)
    return first, past, tiles, tl.where(inside, tl.where(length > 0, tiles + _ENDS, _DEAD), 0)


@triton.jit
def _cut(begin, tiles, share, teams):
    """Return (team, shares) of lanes that begin at a place of the line: the first share's team, others follow."""
    team = tl.minimum((begin + _NEAR - 1) // share, teams - 1)
    return team, 1 + tl.maximum((begin + tiles - _NEAR) // share - team, 0)


@triton.jit(
    do_not_specialize=["lanes", "teams", "window", "min_share"],
    do_not_specialize_on_alignment=["lane_rows_ptr", "lane_lengths_ptr"],
)
def team_schedule_kernel(
    lane_rows_ptr,
    lane_lengths_ptr,
    words_ptr,
    lanes,
    teams,
    window,
    min_share,
    TILE: tl.constexpr,
    LANES_PAD: tl.constexpr,
    TEAMS_PAD: tl.constexpr,
):
    """One program writes all records."""
    lane = tl.arange(0, LANES_PAD)
    inside = lane < lanes
    row = tl.load(lane_rows_ptr + lane, mask=inside, other=0)
    length = tl.load(lane_lengths_ptr + lane, mask=inside, other=0)
    first, past, tiles, cost = _measure(lane_lengths_ptr, lane, lanes, window, TILE)
    _, _, tiles_before, cost_before = _measure(lane_lengths_ptr, lane - 1, lanes, window, TILE)

    start = tl.cumsum(cost, 0) - cost
    share = tl.maximum(tl.cdiv(tl.sum(cost, 0), teams), _LEAST)
    team, splits = _cut(start, tiles, share, teams)
    team_before, splits_before = _cut(start - cost_before, tiles_before, share, teams)
    team_after = tl.minimum((start + cost + _NEAR - 1) // share, teams - 1)
    leads = (lane == 0) | (team_before + splits_before - 1 < team)
    goes_on = (lane + 1 < lanes) & (team_after == team + splits - 1)

    # The other way: parts of about the same size, a team each.
    size = tl.maximum(tl.cdiv(tl.sum(tiles, 0), teams), min_share)
    part = tl.maximum(tl.cdiv(tiles, tl.maximum((tiles + size // 2) // size, 1)), 1)
    parts = tl.where(inside, tl.maximum(tl.cdiv(tiles, part), 1), 0)
    single = (tl.sum(parts, 0) <= teams) & (tl.max(part, 0) <= share + 2)
    splits = tl.where(single, parts, tl.where(inside, splits, 0))
    record = tl.cumsum(splits, 0) - splits
    team = tl.where(single, record, team)
    leads, goes_on = leads | single, goes_on & (single == 0)

    several = tl.where(splits > 1, splits, 0)
    results = tl.cumsum(several, 0) - several
    for split in range(tl.max(splits, 0)):
        ok = split < splits
        last = split == splits - 1
        line = tl.where(leads | (split > 0), team + split, teams + record + split)
        words = words_ptr + line * _RECORD
        begin = tl.where(single, split * part, tl.where(split == 0, 0, (team + split) * share - start))
        end = tl.where(last, tiles, tl.where(single, (split + 1) * part, (team + split + 1) * share - start))
        tl.store(words + 0, row, mask=ok)
        tl.store(words + 1, lane, mask=ok)
        tl.store(words + 2, tl.maximum((first // TILE + begin) * TILE, first), mask=ok)
        tl.store(words + 3, tl.minimum((first // TILE + end) * TILE, past), mask=ok)
        tl.store(words + 4, split, mask=ok)
        tl.store(words + 5, tl.where(length > 0, splits, 0), mask=ok)
        tl.store(words + _PART, results, mask=ok)
        tl.store(words + _NEXT, tl.where(last & goes_on, teams + record + split + 1, 0), mask=ok)
    other = tl.arange(0, TEAMS_PAD)
    idle = (other > tl.max(tl.where(inside, team + splits - 1, -1), 0)) & (other < teams)
    tl.store(words_ptr + other * _RECORD + 1, -1, mask=idle)


def make_team_schedule(
    schedule: TeamSchedule,
    lane_rows: torch.Tensor,
    lane_lengths: torch.Tensor,
    *,
    window: int,
    tile: int,
    min_share: int,
) -> None:
    """Write the schedule of a step, with the arguments of `decode_schedule.make_schedule`.

    Args:
        schedule: its words are overwritten.
        min_share: tiles of a share at the least, where each team gets one.
    """
    lanes = lane_rows.shape[0]
    pads = {"LANES_PAD": next_power_of_2(lanes), "TEAMS_PAD": next_power_of_2(schedule.teams)}
    team_schedule_kernel[(1,)](
        lane_rows, lane_lengths, schedule.words, lanes, schedule.teams, window, min_share, TILE=tile, **pads
    )  # fmt: skip
