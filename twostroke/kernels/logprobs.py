"""Log-probabilities in Triton: two launches of fixed grids. The logits are read once, and never copied.

    survey   grid [S, splits]  largest logit, sum of exponentials, tokens above the target, and the split's top k
    join     grid [S]          joins the splits, and writes the record

Programs of rows that ask for nothing end at once. The top k of a split are found one by one, k <= 20, and so are the
top k among the splits' candidates; of equal logits the lowest id comes first.
"""

# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl

from .sizes import cdiv, next_power_of_2
from .splits import first_largest

_SPLIT = 4096
_SPLIT_WARPS = 8
_WIDTH = 32
"""Room for the candidates of a split; a power of two above the most that can be asked for."""

_INFINITY = tl.constexpr(float("inf"))
_NO_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=["targets_stride"], do_not_specialize_on_alignment=["rows", "targets"])
def _survey(
    logits,
    logits_stride,
    vocab,
    rows,
    wanted,
    targets,
    targets_stride,
    peaks,
    sums,
    aboves,
    values,
    tokens,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
):
    position = tl.program_id(0)
    split = tl.program_id(1)
    count = tl.load(wanted + tl.load(rows + position))
    if count > 0:
        place = position * tl.num_programs(1) + split
        row_logits = logits + position.to(tl.int64) * logits_stride
        target = tl.load(row_logits + tl.load(targets + position * targets_stride)).to(tl.float32)
        ids = split * SPLIT + tl.arange(0, SPLIT)
        x = tl.load(row_logits + ids, mask=ids < vocab, other=-_INFINITY).to(tl.float32)
        bad = tl.max(((x != x) | (x == _INFINITY)).to(tl.int32), 0) != 0
        best, token = first_largest(x, ids)
        peak = tl.where(bad, _INFINITY, best)
        tl.store(peaks + place, peak)
        tl.store(sums + place, tl.sum(tl.where(x > -_INFINITY, tl.exp(x - best), 0.0), 0))
        tl.store(aboves + place, tl.sum((x > target).to(tl.int32), 0))
        for i in range(0, count - 1):
            tl.store(values + place * WIDTH + i, best)
            tl.store(tokens + place * WIDTH + i, token)
            x = tl.where(ids == token, -_INFINITY, x)
            best, token = first_largest(x, ids)


@triton.jit(
    do_not_specialize=["targets_stride"], do_not_specialize_on_alignment=["logits", "rows", "targets", "chances"]
)
def _join(
    logits,
    logits_stride,
    rows,
    wanted,
    targets,
    targets_stride,
    chances,
    num_splits,
    peaks,
    sums,
    aboves,
    values,
    tokens,
    records,
    records_stride,
    CHANCES: tl.constexpr,
    TOP: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    position = tl.program_id(0)
    count = tl.load(wanted + tl.load(rows + position))
    if count > 0:
        split = tl.arange(0, SPLITS)
        place = position * num_splits + split
        inside = split < num_splits
        peak = tl.load(peaks + place, mask=inside, other=-_INFINITY)
        best = tl.max(peak, 0)
        weight = tl.where(peak > -_INFINITY, tl.load(sums + place, mask=inside, other=0.0) * tl.exp(peak - best), 0.0)
        total = best + tl.log(tl.sum(weight, 0))  # NaN if the largest logit is not finite
        target = tl.load(logits + position.to(tl.int64) * logits_stride + tl.load(targets + position * targets_stride))
        record = records + position * records_stride
        floats = record.to(tl.pointer_type(tl.float32))
        good = tl.abs(best) < _INFINITY
        tl.store(floats, tl.where(good, target.to(tl.float32) - total, float("nan")))
        if CHANCES:
            tl.store(floats + 1, tl.load(chances + position))
        else:
            tl.store(floats + 1, 0.0)
        tl.store(record + 2, 1 + tl.sum(tl.load(aboves + place, mask=inside, other=0), 0))
        entry = tl.arange(0, SPLITS * WIDTH)
        there = (entry < num_splits * WIDTH) & (entry % WIDTH < count - 1)
        x = tl.load(values + position * num_splits * WIDTH + entry, mask=there, other=-_INFINITY)
        ids = tl.load(tokens + position * num_splits * WIDTH + entry, mask=there, other=_NO_ID)
        rank = tl.arange(0, WIDTH)
        top_ids = tl.zeros([WIDTH], tl.int32) - 1
        top_logprobs = tl.zeros([WIDTH], tl.float32)
        for i in range(0, count - 1):
            largest, token = first_largest(x, ids)
            found = tl.where(good, largest, -_INFINITY) > -_INFINITY
            top_ids = tl.where(rank == i, tl.where(found, token, -1), top_ids)
            top_logprobs = tl.where(rank == i, largest - total, top_logprobs)
            x = tl.where(ids == token, -_INFINITY, x)
        tl.store(record + 3 + rank, top_ids, mask=rank < TOP)
        tl.store(floats + 3 + TOP + rank, top_logprobs, mask=rank < TOP)


def write_records(
    logits: torch.Tensor,
    rows: torch.Tensor,
    wanted: torch.Tensor,
    targets: torch.Tensor,
    chances: torch.Tensor | None,
    records: torch.Tensor,
    top: int,
) -> None:
    """See `sampling.logprobs.write_logprobs`; `top` is the most that can be asked for."""
    count, vocab = logits.shape
    num_splits = cdiv(vocab, _SPLIT)

    def workspace(width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count * num_splits * width, dtype=dtype, device=logits.device)

    splits = (
        *(workspace(1, torch.float32), workspace(1, torch.float32), workspace(1, torch.int32)),
        *(workspace(_WIDTH, torch.float32), workspace(_WIDTH, torch.int32)),
    )
    asked = (rows, wanted, targets, targets.stride(0))
    _survey[(count, num_splits)](
        *(logits, logits.stride(0), vocab), *asked, *splits, WIDTH=_WIDTH, SPLIT=_SPLIT, num_warps=_SPLIT_WARPS
    )
    _join[(count,)](
        *(logits, logits.stride(0)),
        *asked,
        logits if chances is None else chances,
        num_splits,
        *splits,
        *(records, records.stride(0)),
        CHANCES=chances is not None,
        TOP=top,
        SPLITS=next_power_of_2(num_splits),
        WIDTH=_WIDTH,
    )
