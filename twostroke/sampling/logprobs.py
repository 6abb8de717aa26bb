"""Log-probabilities: of the tokens that were chosen, and of the most likely ones."""

from __future__ import annotations

import torch

from ..logprob_record import MAX_LOGPROBS


def write_logprobs(
    logits: torch.Tensor,
    rows: torch.Tensor,
    wanted: torch.Tensor,
    targets: torch.Tensor,
    chances: torch.Tensor | None,
    records: torch.Tensor,
) -> None:
    """Write the record of each position whose row asks for it, on the current stream. Nothing waits for the device.

    Args:
        logits: [S, V] as the model gave them, in bfloat16, float16 or float32, the last dimension contiguous.
        rows: int32 [S].
        wanted: int32 [R + 1], of each row 0 for nothing, or 1 + how many of the most likely tokens.
        targets: int32 [S], the token of each position.
        chances: float32 [S], what stands as `sampling_logprob`; None for 0.
        records: int32 [S, RECORD_WORDS], written.
    """
    if logits.is_cuda:
        # NOTE: imported here, since a CPU build of torch comes without triton.
        from ..kernels.logprobs import write_records

        write_records(logits, rows, wanted, targets, chances, records, MAX_LOGPROBS)
        return
    counts = wanted[rows]
    asking = counts.nonzero().squeeze(1)
    if not len(asking):
        return
    x, counts = logits[asking].float(), counts[asking] - 1
    totals = logsumexp_by_row(x)[:, None]
    target = x.gather(1, targets[asking, None].long())
    ids, values = _top(x, int(counts.max()))
    unused = (torch.arange(ids.shape[1]) >= counts[:, None]) | ~values.isfinite() | ~totals.isfinite()
    written = torch.full((len(asking), records.shape[1]), -1, dtype=torch.int32)
    floats = written.view(torch.float32)
    floats[:, :1] = torch.where(totals.isfinite(), target - totals, torch.nan)
    floats[:, 1] = 0.0 if chances is None else chances[asking]
    written[:, 2] = 1 + (x > target).sum(1)
    written[:, 3 : 3 + ids.shape[1]] = ids.masked_fill(unused, -1)
    floats[:, 3 + MAX_LOGPROBS : 3 + MAX_LOGPROBS + ids.shape[1]] = values - totals
    records[asking] = written


def logsumexp_by_row(x: torch.Tensor) -> torch.Tensor:
    """log(sum(exp(x))) of each row of `x` [n, V], one by one: a sum's order over several depends on their number."""
    return torch.stack([row.logsumexp(0) for row in x])


def _top(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids and values of the `count` largest of each row of `x` [n, V], the lowest id first among equals."""
    if not count:
        return torch.empty(len(x), 0, dtype=torch.int32), x.new_empty(len(x), 0)
    count = min(count, x.shape[1])
    # NOTE: topk alone may leave out any of those that equal the last one.
    least = x.topk(count, 1).values[:, -1:]
    ids = torch.zeros(len(x), count, dtype=torch.int32)
    for place, mask in enumerate(x >= least):
        candidates = mask.nonzero().squeeze(1)
        order = x[place, candidates].sort(descending=True, stable=True).indices[:count]
        ids[place, : len(order)] = candidates[order].int()
    return ids, x.gather(1, ids.long())
