"""One kernel norms, rotates and stores; it does what the plain rotation and the cache write do one after the other."""

import pytest
import torch

pytest.importorskip("triton")

from twostroke.kernels import ops
from twostroke.kernels.cache_write import cache_write
from twostroke.kernels.rotary_write import rotate_and_write

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("tokens", "first"), [(1, 0), (5, 2)])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim"), [(4, 2, 64), (9, 3, 64), (3, 1, 80), (1, 1, 16), (32, 8, 128)]
)
@pytest.mark.parametrize("norms", [(False, False), (True, True), (True, False)])
@pytest.mark.parametrize("rotate_queries", [True, False])
def test_equal_to_rotating_and_writing(tokens, first, q_heads, kv_heads, head_dim, norms, rotate_queries):
    block_size, blocks = 4, 6
    merged = torch.randn(tokens, q_heads + 2 * kv_heads, head_dim, device=DEVICE)
    q, k, v = merged.split((q_heads, kv_heads, kv_heads), dim=1)
    positions = torch.randint(0, 1000, (tokens,), device=DEVICE)
    inv_freq = torch.rand(head_dim // 2, device=DEVICE)
    cos, sin = ops.rotary_tables(positions, inv_freq, 1.0)
    weights = [torch.randn(head_dim, device=DEVICE) if norm else None for norm in norms]
    slots = torch.randperm(blocks * block_size, device=DEVICE)[:tokens]
    shape = (blocks, kv_heads, block_size, head_dim)
    keys, values, expected_keys, expected_values = (torch.full(shape, 7.0, device=DEVICE) for _ in range(4))

    expected_q, expected_k = q.clone(), k.clone()
    queries = expected_q if rotate_queries else q.clone()
    ops.rotate_(queries[first:], expected_k[first:], cos[first:], sin[first:], *weights, 1e-5)
    from_first = torch.tensor([first], dtype=torch.int32, device=DEVICE)
    cache_write(expected_k, v, expected_keys, expected_values, slots, from_first)
    k_before, v_before = k.clone(), v.clone()
    rotate_and_write(q, k, v, cos, sin, *weights, 1e-5, keys, values, slots, from_first, rotate_queries=rotate_queries)

    assert torch.allclose(q, expected_q, atol=1e-5)
    assert torch.allclose(keys, expected_keys, atol=1e-5)
    assert torch.equal(values, expected_values)
    assert torch.equal(k, k_before)
    assert torch.equal(v, v_before)
    assert not torch.allclose(keys, torch.full_like(keys, 7.0))
