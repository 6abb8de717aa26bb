"""The schedule of decode attention: which program takes which share of which lane.

Work is shared out by tokens. One small kernel, once a step, reads the lengths of the whole batch and cuts lanes into
shares of about equal size: a long lane among short ones gets many programs, lanes that fill the GPU by themselves get
one each and leave no partial results. The number of programs is fixed by shapes, so one captured graph serves all
lengths.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .early import early, wait_for_kernel_ahead
from .sizes import cdiv, next_power_of_2

RECORD = 8
"""int32 words of a record, so that it lies in one sector of the GPU's memory."""

ROW, LANE, BEGIN, END, SPLIT, SPLITS = range(6)
"""Words of a program's record: it reads the positions [BEGIN, END) of a lane's past, as number SPLIT of its SPLITS
programs; the last of them has the newest position too. A dead lane has 0 splits, and one program."""

UNEVEN = 10
"""Tiles that the largest share may have beyond the mean before more shares pay; measured, see bench/NOTES.md."""

_RECORD = tl.constexpr(RECORD)
_ROW, _LANE, _BEGIN, _END = tl.constexpr(ROW), tl.constexpr(LANE), tl.constexpr(BEGIN), tl.constexpr(END)
_SPLIT, _SPLITS = tl.constexpr(SPLIT), tl.constexpr(SPLITS)


class DecodeSchedule(NamedTuple):
    """What each program of a step's decode attention does, for the layers of one kind.

    Attributes:
        words: int32 [1 + extra + max(max_lanes, extra), RECORD]. The first word counts the records in use, which begin
            at line 1. Longest lanes come first, so that the last programs to start are short ones, and the records of
            lanes with several programs are the first 2 * extra at most.
        extra: programs beside one per lane; as many as run at once.
    """

    words: torch.Tensor
    extra: int

    @classmethod
    def empty(cls, max_lanes: int, extra: int, device: torch.device) -> DecodeSchedule:
        """Return memory for steps of up to `max_lanes` lanes."""
        lines = 1 + extra + max(max_lanes, extra)
        return cls(torch.empty(lines, RECORD, dtype=torch.int32, device=device), extra)


@triton.jit
def _seen(length, window, TILE: tl.constexpr):
    """Return (first visible position, tiles before the newest position) of lanes."""
    past = tl.maximum(length - 1, 0)
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    return first, tl.cdiv(past - first, TILE)


@triton.jit
def _cut(tiles, share, rounding):
    """Return (tiles of a program, programs) of lanes.

    Programs are rounded up by a `rounding` of share - 1, so that none has more than `share` tiles, and to the nearest
    by one of share // 2.
    """
    wanted = tl.maximum((tiles + rounding) // share, 1)
    part = tl.maximum(tl.cdiv(tiles, wanted), 1)
    return part, tl.maximum(tl.cdiv(tiles, part), 1)


@triton.jit
def _programs(tiles, inside, share, rounding):
    """Return how many programs the lanes that are `inside` the batch have together."""
    _, splits = _cut(tiles, share, rounding)
    return tl.sum(tl.where(inside, splits, 0), 0)


@triton.jit
def _smallest_share(tiles, inside, least, programs):
    """Return the smallest share, `least` tiles or more, such that `programs` of no more tiles hold all lanes."""
    low = least
    high = tl.maximum(tl.max(tiles, 0), least)
    while low < high:
        middle = (low + high) // 2
        fits = _programs(tiles, inside, middle, middle - 1) <= programs
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    return high


@triton.jit
def _share_of(tiles, inside, lanes, extra, min_share, ROUNDS: tl.constexpr, UNEVEN: tl.constexpr):
    """Return (share, rounding) by which a batch is cut, see `make_schedule` and `_cut`."""
    total = tl.sum(tiles, 0)
    mean = tl.maximum(tl.cdiv(total, extra), min_share)
    # Rounded to the nearest, since a share a little too large is better than one program more with a short rest. None
    # is larger than half again the mean then: shares that all begin at once, but are larger than that, are no better.
    share, rounding = mean, mean // 2
    if lanes <= extra:
        even = _smallest_share(tiles, inside, mean, extra)
        if (even - total // _programs(tiles, inside, even, even - 1) > UNEVEN) & (ROUNDS == 2):
            half = tl.maximum(tl.cdiv(total, 2 * extra), min_share)
            share = _smallest_share(tiles, inside, half, 2 * extra)
            rounding = share - 1
        elif 2 * even <= 3 * mean:
            share, rounding = even, even - 1
    return share, rounding


@triton.jit(
    do_not_specialize=["lanes", "extra", "window", "min_share"],
    do_not_specialize_on_alignment=["lane_rows_ptr", "lane_lengths_ptr"],
)
def schedule_kernel(
    lane_rows_ptr,
    lane_lengths_ptr,
    words_ptr,
    lanes,
    extra,
    window,
    min_share,
    TILE: tl.constexpr,
    LANES_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
    UNEVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program writes the records of `BLOCK` lanes; each reads the lengths of all.

    It does so while the kernel ahead still runs: lengths and rows are older than that one.
    """
    other = tl.arange(0, LANES_PAD)
    lengths = tl.load(lane_lengths_ptr + other, mask=other < lanes, other=0)
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < lanes
    length = tl.load(lane_lengths_ptr + lane, mask=inside, other=0)
    row = tl.load(lane_rows_ptr + lane, mask=inside, other=0)

    all_inside = other < lanes
    _, all_tiles = _seen(lengths, window, TILE)
    share, rounding = _share_of(all_tiles, all_inside, lanes, extra, min_share, ROUNDS, UNEVEN)
    _, all_splits = _cut(all_tiles, share, rounding)
    all_splits = tl.where(all_inside, all_splits, 0)
    first, tiles = _seen(length, window, TILE)
    part, splits = _cut(tiles, share, rounding)
    longer = all_tiles[None, :] > tiles[:, None]
    as_long = (all_tiles[None, :] == tiles[:, None]) & (other[None, :] < lane[:, None])
    place = tl.sum(tl.where(longer | as_long, all_splits[None, :], 0), 1)
    wait_for_kernel_ahead(PDL)
    if tl.program_id(0) == 0:
        tl.store(words_ptr, tl.sum(all_splits, 0))
    past = tl.maximum(length - 1, 0)
    splits = tl.where(inside, splits, 0)
    for split in range(tl.max(splits, 0)):
        record = words_ptr + (1 + place + split) * _RECORD
        ok = split < splits
        begin = first + split * part * TILE
        tl.store(record + _ROW, row, mask=ok)
        tl.store(record + _LANE, lane, mask=ok)
        tl.store(record + _BEGIN, begin, mask=ok)
        tl.store(record + _END, tl.minimum(begin + part * TILE, past), mask=ok)
        tl.store(record + _SPLIT, split, mask=ok)
        tl.store(record + _SPLITS, tl.where(length > 0, splits, 0), mask=ok)


def make_schedule(
    schedule: DecodeSchedule,
    lane_rows: torch.Tensor,
    lane_lengths: torch.Tensor,
    *,
    window: int,
    tile: int,
    min_share: int,
    rounds: int,
) -> None:
    """Write the schedule of a step.

    Lanes are cut into shares of about the mean: what each of the programs that run at once would take. Lanes that are
    no more than these programs are cut into no more shares either, since one more would begin when the others end; but
    not if some were longer than half again the mean. Where some are much longer than others, and a program may take
    two, lanes are cut into up to twice as many.

    Args:
        schedule: its words are overwritten.
        lane_rows: int32 [L].
        lane_lengths: int32 [L], positions that each lane sees, the newest included; 0 for a dead lane.
        window: newest positions that are visible; 0 is all.
        tile: positions of a tile.
        min_share: tiles of a program at the least, where a lane has several.
        rounds: 1, or 2 if a program that is done takes another share.
    """
    lanes = lane_rows.shape[0]
    pad = next_power_of_2(lanes)
    block = max(1, min(pad, 8192 // pad))
    schedule_kernel[(cdiv(lanes, block),)](
        lane_rows, lane_lengths, schedule.words, lanes, schedule.extra, window, min_share,
        TILE=tile, LANES_PAD=pad, BLOCK=block, ROUNDS=rounds, UNEVEN=UNEVEN,
        **early(schedule.words.device),
    )  # fmt: skip
