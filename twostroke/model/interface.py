"""What the runner needs of a model, whichever its implementation."""

from __future__ import annotations

from typing import Protocol

import torch

from ..attention.interface import Attention, LayerSpec
from ..kernels.step import StepInputs


class Model(Protocol):
    """A causal language model over paged attention.

    Attributes:
        layers: the attention of each layer, in order.
        vocab_size: number of logits.
        max_positions: most positions that the model was made for.
        dtype: of weights, activations and cache.
        device: where the weights are.
        weight_bytes: bytes of weights that a decode step reads (each matrix once; of the embedding only if it is tied).
    """

    layers: list[LayerSpec]
    vocab_size: int
    max_positions: int
    dtype: torch.dtype
    device: torch.device
    weight_bytes: int

    def forward(self, step: StepInputs, attention: Attention) -> torch.Tensor:
        """Return logits [S, vocab_size] in `dtype`, at `step.sample_index` (every token if that is None)."""
        ...
