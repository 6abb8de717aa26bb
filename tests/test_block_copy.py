"""Copies of cache blocks: every layer, keys and values, in both backends."""

import pytest
import torch

from twostroke.attention.interface import LayerSpec
from twostroke.attention.torch_backend import TorchAttention

LAYERS = [LayerSpec(4, 2, 24, 1.0), LayerSpec(4, 1, 8, 1.0, group=1), LayerSpec(2, 2, 513, 1.0)]
"""Blocks smaller and larger than what a program copies at once."""


def make_attention(name, dtype):
    if name == "triton":
        pytest.importorskip("triton")
        from twostroke.attention.triton_backend import TritonAttention as Attention
    else:
        Attention = TorchAttention
    return Attention(LAYERS, 9, 3, dtype, torch.device("cpu"))


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_copied_in_all_layers(name, dtype):
    attention = make_attention(name, dtype)
    torch.manual_seed(0)
    caches = [*attention.keys, *attention.values]
    for cache in caches:
        cache.copy_(torch.randn(cache.shape))
    expected = [cache.clone() for cache in caches]
    pairs = torch.tensor([[3, 1], [3, 8], [0, 4]], dtype=torch.int32)
    for cache in expected:
        cache[[1, 8, 4]] = cache[[3, 3, 0]]
    attention.copy_blocks(pairs)
    assert all(torch.equal(cache, wanted) for cache, wanted in zip(caches, expected, strict=True))
