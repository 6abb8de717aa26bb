"""Masks: which tokens a row may sample, one bit each."""

from __future__ import annotations

import numpy as np
import torch

_ADDED = np.array([-np.inf, 0.0], np.float32)
"""What a bit adds."""


def apply_masks(logits: torch.Tensor, masks: torch.Tensor) -> None:
    """Add -inf to the logits of tokens that are not allowed, in place: what was NaN or +inf stays an error.

    Args:
        logits: float32 [K, V], contiguous.
        masks: int32 [K, >= ceil(V / 32)]: bit v % 32 of word v // 32 is set if token v is allowed.
    """
    if logits.is_cuda:
        # NOTE: imported here, since a CPU build of torch comes without triton.
        from ..kernels import mask

        mask.apply_masks(logits, masks)
        return
    bits = np.unpackbits(masks.contiguous().numpy().view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    logits += torch.from_numpy(_ADDED[bits])
