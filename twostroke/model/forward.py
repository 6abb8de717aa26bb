"""A model over the cache that it runs on."""

from __future__ import annotations

import torch

from ..attention.interface import Attention
from ..kernels.step import StepInputs
from .interface import Model


class Forward:
    """The model over its attention: inputs of a step -> logits [S, V]."""

    def __init__(self, model: Model, attention: Attention) -> None:
        self.model = model
        self.attention = attention

    def __call__(self, step: StepInputs) -> torch.Tensor:
        return self.model.forward(step, self.attention)

    def copy_blocks(self, pairs: torch.Tensor) -> None:
        self.attention.copy_blocks(pairs)
