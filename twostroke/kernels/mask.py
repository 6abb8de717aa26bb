"""Masks of allowed tokens, one bit each, applied to logits."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .sizes import cdiv

_TILE = 4096


@triton.jit
def _apply_masks(logits, masks, vocab, mask_stride, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = token < vocab
    word = tl.load(masks + row * mask_stride + token // 32, mask=inside, other=-1)
    barred = inside & (((word >> (token % 32)) & 1) == 0)
    x = tl.load(logits + row * vocab + token, mask=barred, other=0.0)
    tl.store(logits + row * vocab + token, x + float("-inf"), mask=barred)


def apply_masks(logits: torch.Tensor, masks: torch.Tensor) -> None:
    """See `sampling.mask.apply_masks`."""
    rows, vocab = logits.shape
    _apply_masks[(rows, cdiv(vocab, _TILE))](logits, masks, vocab, masks.stride(0), TILE=_TILE)
