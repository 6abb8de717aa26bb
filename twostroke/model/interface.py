"""What the runner needs of a model, whichever its implementation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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

    def tensors(self) -> list[torch.Tensor]:
        """All tensors that a sleeping engine may put away; two of them may lie in one storage."""
        ...

    def weight_shapes(self) -> dict[str, torch.Size]:
        """The shapes of the tensors that `write_weights` takes, by the names that checkpoints give them."""
        ...

    def spare_names(self, names: Iterable[str]) -> set[str]:
        """Those of `names` that a checkpoint may have and `write_weights` passes over, since they say nothing new."""
        ...

    def copy_weights(self) -> dict[str, torch.Tensor]:
        """Return copies of the weights as `write_weights` takes them, made on the current stream; no step may run."""
        ...

    def write_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy checked tensors over the weights, on the current stream; the storage stays, so graphs stay valid."""
        ...

    def free(self) -> None:
        """Let go of the weights for good; what else there is to know of the model stays."""
        ...

    def forward(self, step: StepInputs, attention: Attention) -> torch.Tensor:
        """Return logits [S, vocab_size] in `dtype`, at `step.sample_index` (every token if that is None)."""
        ...
