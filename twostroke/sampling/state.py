"""The part of the device-resident row state that sampling reads."""

from __future__ import annotations

from typing import NamedTuple

import torch


class SamplingState(NamedTuple):
    """One column per row; row R is the dummy row (greedy). All tensors are views of the batch state.

    Attributes:
        temperature: float32 [R + 1]; 0 is greedy.
        top_k: int32 [R + 1]; 0 is off.
        top_p: float32 [R + 1]; 1 is off.
        min_p: float32 [R + 1]; 0 is off.
        typical_p: float32 [R + 1]; 1 is off.
        seed_low, seed_high: int32 [R + 1], the bits of the 64-bit seed.
        outputs: int32 [R + 1], output index of the token to be sampled now.
        min_outputs: int32 [R + 1]; stop ids are masked while outputs < min_outputs.
        stop_ids: int32 [MAX_STOP_IDS, R + 1]; -1 where unused.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    typical_p: torch.Tensor
    seed_low: torch.Tensor
    seed_high: torch.Tensor
    outputs: torch.Tensor
    min_outputs: torch.Tensor
    stop_ids: torch.Tensor
