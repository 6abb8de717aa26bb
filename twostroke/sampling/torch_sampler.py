"""The sampler in plain PyTorch: the CPU's path, and what the Triton kernels are held against.

`kernels.sample` explains distances and radii. Every stage costs only the rows that need it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812

from ..kernels.philox import (
    MAX_GUMBEL,
    MIN_GUMBEL,
    PURPOSE_SPLIT,
    PURPOSE_TOKEN,
    SPLIT,
    WORD,
    gumbel,
    philox,
)
from .state import SamplingState

_REACH = MAX_GUMBEL - MIN_GUMBEL
"""What is farther than this behind another one loses to it whatever the noise."""


def sample_rows(
    logits: torch.Tensor,
    rows: torch.Tensor,
    state: SamplingState,
    tokens: torch.Tensor,
    errors: torch.Tensor,
    typical: bool,
    chances: torch.Tensor | None,
) -> None:
    """See `sampler.sample`."""
    best, token = _first_largest(logits)
    failed = ~best.isfinite()
    barred = state.outputs[rows] < state.min_outputs[rows]
    if barred.any():
        logits = _bar_stop_ids(logits, state.stop_ids[:, rows], barred)
        best, token = _first_largest(logits)
        failed |= ~best.isfinite()
    drawn = ((state.temperature[rows] > 0) & ~failed).nonzero().squeeze(1)
    if len(drawn):
        drawn_state = SamplingState(*(column[..., rows[drawn]] for column in state))
        distance = (best[drawn, None].float() - logits[drawn].float()) / drawn_state.temperature[:, None]
        radius = keep_radius(distance, drawn_state)
        if typical:
            distance = only_typical(distance, radius, drawn_state.typical_p)
        token[drawn], chance = draw(distance.masked_fill_(distance > radius[:, None], math.inf), drawn_state)
    if chances is not None:
        chances.zero_()
        if len(drawn):
            chances[drawn] = chance
    tokens.copy_(token.masked_fill(failed, 0))
    errors.copy_(failed)


def _first_largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit of each row and the lowest id that has it; a NaN counts as the largest."""
    if logits.dtype == torch.float32 and not logits.is_cuda:
        # NOTE: numpy's argmax takes a fifth of the time of torch's.
        token = torch.from_numpy(logits.detach().numpy().argmax(1))
    else:
        token = logits.argmax(1)
    return logits.gather(1, token[:, None]).squeeze(1), token


def _bar_stop_ids(logits: torch.Tensor, stop_ids: torch.Tensor, barred: torch.Tensor) -> torch.Tensor:
    """A copy of `logits` [S, V] with -inf at the stop ids [MAX_STOP_IDS, S] of the rows in the mask `barred` [S]."""
    place, row = ((stop_ids >= 0) & barred).nonzero(as_tuple=True)
    return logits.index_put((row, stop_ids[place, row].long()), logits.new_tensor(-math.inf))


def keep_radius(distance: torch.Tensor, state: SamplingState) -> torch.Tensor:
    """The distance up to which tokens are kept by top_k, top_p within it, and min_p.

    Args:
        distance: float32 [S, V], (largest logit - logit) / temperature.
        state: one column per row of `distance`.

    Returns:
        float32 [S]; infinity without filters. A kept token's ties are kept.
    """
    vocab = distance.shape[1]
    by_k = (state.top_k > 0) & (state.top_k < vocab)
    filtered = (by_k | (state.top_p < 1)).nonzero().squeeze(1)
    radius = -state.min_p.log()
    if len(filtered):
        top_k = torch.where(by_k, state.top_k, vocab)[filtered]
        found = _filter_radius(distance[filtered], top_k, state.top_p[filtered])
        radius[filtered] = torch.minimum(radius[filtered], found)
    return radius


def _filter_radius(distance: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The radius by top_k in [1, V] and, within it, top_p: float32 [n]. Sorts `distance` in place."""
    # NOTE: numpy's sort takes a quarter of the time of torch's topk.
    distance.numpy().sort(1)
    radius = distance.gather(1, top_k.long()[:, None] - 1)
    mass = torch.where(distance <= radius, (-distance).exp(), 0.0).cumsum(1, dtype=torch.float64)
    reached = mass >= top_p[:, None] * mass[:, -1:]
    first = distance.gather(1, reached.byte().argmax(1, keepdim=True))
    return torch.where(top_p[:, None] < 1, first, radius).squeeze(1)


def only_typical(distance: torch.Tensor, radius: torch.Tensor, typical_p: torch.Tensor) -> torch.Tensor:
    """Put tokens that are not typical at an infinite distance.

    Of the tokens within the radius, those are typical whose surprise is nearest to the entropy and whose probability
    reaches typical_p, ties included; `kernels.typical` explains why surprise - entropy is distance - mean distance.

    Args:
        distance: float32 [S, V].
        radius, typical_p: float32 [S]; a typical_p of 1 is off.

    Returns:
        float32 [S, V].
    """
    weight = torch.where(distance <= radius[:, None], (-distance).exp(), 0.0)
    kept = weight > 0
    mass = weight.sum(1, keepdim=True, dtype=torch.float64)
    center = (weight * distance.where(kept, 0.0)).sum(1, keepdim=True, dtype=torch.float64) / mass
    shift = (distance - center.float()).abs().where(kept, math.inf)
    ordered, order = shift.sort(dim=1, stable=True)
    reached = weight.gather(1, order).cumsum(1, dtype=torch.float64) >= typical_p[:, None] * mass
    spread = ordered.gather(1, reached.byte().argmax(1, keepdim=True))
    return distance.where((shift <= spread) | (typical_p[:, None] >= 1), math.inf)


def draw(distance: torch.Tensor, state: SamplingState) -> tuple[torch.Tensor, torch.Tensor]:
    """A token of each row, int64 [S], and its log-probability, float32 [S]; `kernels.draw` explains splits.

    Args:
        distance: float32 [S, V]; infinity for what is not kept.
        state: one column per row of `distance`.
    """
    # NOTE: of a vocabulary smaller than a split only the last group of four is filled up.
    width = min(SPLIT, distance.shape[1] + -distance.shape[1] % 4)
    splits = F.pad(distance, (0, -distance.shape[1] % width), value=math.inf).view(len(distance), -1, width)
    weights = (-splits).exp().sum(2)
    split = _draw_one(weights.log(), torch.zeros(len(splits), dtype=torch.int64), PURPOSE_SPLIT, state)
    within = splits[torch.arange(len(splits)), split]
    token = _draw_one(-within, split * width, PURPOSE_TOKEN, state)
    chance = -within.gather(1, token[:, None]).squeeze(1) - weights.sum(1).log()
    return split * width + token, chance


def _draw_one(scores: torch.Tensor, first: torch.Tensor, purpose: int, state: SamplingState) -> torch.Tensor:
    """argmax(score + noise) of each row of `scores` [S, N], lowest index on ties: int64 [S].

    Score i of a row has the noise of the number `first` + i; `first` is int64 [S], multiples of four. Philox gives the
    words of four neighbours at once, so noise is made for the groups of four that hold a score which can win.
    """
    padded = F.pad(scores, (0, -scores.shape[1] % 4), value=-math.inf)
    quads = padded.view(len(padded), -1, 4)
    can_win = padded >= padded.amax(1, keepdim=True) - _REACH
    row, quad = can_win.view(torch.int32).nonzero(as_tuple=True)
    low, high, output = (column.long()[row] & WORD for column in (state.seed_low, state.seed_high, state.outputs))
    words = torch.stack(philox((low, high), (output, 0, first[row] // 4 + quad, purpose)), 1)
    noisy = torch.full_like(quads, -math.inf)
    noisy[row, quad] = quads[row, quad] + gumbel(words)
    return noisy.view_as(padded).argmax(1)
