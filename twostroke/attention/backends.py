"""The backends of attention by name."""

from __future__ import annotations

import torch

from .interface import Attention, LayerSpec


def make_attention(
    kind: str,
    layers: list[LayerSpec],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_lanes: int,
    deterministic: bool,
) -> Attention:
    """Return attention of a kind, `torch` or `triton`, over a cache of its own.

    Args:
        num_blocks: blocks of the cache, the dummy block included.
        max_lanes: most decode lanes of a step.
        deterministic: what a token gets depends on its sequence alone.
    """
    arguments = (layers, num_blocks, block_size, dtype, device)
    # NOTE: imported here, since a CPU build of torch comes without triton.
    if kind == "torch":
        from .invariant_torch import InvariantTorchAttention
        from .torch_backend import TorchAttention

        return InvariantTorchAttention(*arguments) if deterministic else TorchAttention(*arguments)
    from .invariant_triton import InvariantTritonAttention
    from .triton_backend import TritonAttention

    return InvariantTritonAttention(*arguments) if deterministic else TritonAttention(*arguments, max_lanes=max_lanes)
