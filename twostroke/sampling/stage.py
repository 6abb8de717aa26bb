"""A stage: what changes logits before tokens are sampled from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class Stage(NamedTuple):
    """One of the stages between the forward pass and the sampler.

    Attributes:
        feature: the bit of a plan's features without which the stage is left out.
        edit: (logits [S, V], rows [S]); changes the float32 logits in place, on the current stream, those of the rows
            that ask for it. It waits for nothing, and its launches do not depend on data on the device.
    """

    feature: int
    edit: Callable[[torch.Tensor, torch.Tensor], None]
