"""The layer operations in plain PyTorch, against transformers' modules and formulas written out."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from twostroke.kernels import ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_round_where_transformers_does(dtype):
    module = LlamaRMSNorm(96, eps=1e-5).to(dtype)
    x = torch.randn(7, 96).to(dtype) * 3
    with torch.no_grad():
        module.weight.copy_(torch.randn(96))
        expected = module(x)
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(ops.rms_norm(x, module.weight.data, 1e-5), expected, **tolerance)


def test_eps_counts():
    x = torch.full((1, 4), 1e-3)
    expected = x / (x.square().mean() + 1e-2).sqrt()
    torch.testing.assert_close(ops.rms_norm(x, torch.ones(4), 1e-2), expected)


def test_the_first_layer_starts_from_embeddings_their_norm_and_the_tables_of_their_positions():
    ids, positions, embedding, weight = torch.tensor([2, 0]), torch.tensor([7, 1]), torch.randn(3, 8), torch.randn(8)
    inv_freq = torch.tensor([1.0, 0.1])
    made = ops.embed(ids, positions, embedding, weight, 1e-5, inv_freq, 1.5)
    assert torch.equal(made.residual, embedding[ids])
    assert torch.equal(made.normed, ops.rms_norm(embedding[ids], weight, 1e-5))
    assert all(map(torch.equal, made[2:], ops.rotary_tables(positions, inv_freq, 1.5)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_mul_gates_with_the_first_half(dtype):
    gate_up = torch.randn(3, 10).to(dtype)
    before = gate_up.clone()
    gate, up = gate_up[:, :5], gate_up[:, 5:]
    expected = (gate.float() / (1 + (-gate.float()).exp())).to(dtype) * up
    torch.testing.assert_close(ops.silu_mul(gate_up), expected)
    assert torch.equal(gate_up, before)


def test_rotary_tables_are_cosine_and_sine_of_the_angle_times_the_factor():
    positions = torch.tensor([0, 1, 5, 100_000])
    inv_freq = 10_000.0 ** (-torch.arange(0, 8, 2) / 8)
    cos, sin = ops.rotary_tables(positions, inv_freq, 1.5)
    angles = (positions[:, None].float() * inv_freq).double()
    torch.testing.assert_close(cos.double(), angles.cos() * 1.5, rtol=0, atol=1e-6)
    torch.testing.assert_close(sin.double(), angles.sin() * 1.5, rtol=0, atol=1e-6)
    assert cos.dtype == sin.dtype == torch.float32


def merged_heads(tokens, q_heads, k_heads, head_dim, dtype=torch.float32, generator=None):
    """q, k and v as views of one matrix, and the matrix."""
    heads = q_heads + 2 * k_heads
    merged = torch.randn(tokens, heads * head_dim, generator=generator).to(dtype)
    q, k, v = merged.view(tokens, heads, head_dim).split([q_heads, k_heads, k_heads], 1)
    return q, k, v, merged


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [False, True])
def test_rotation_in_place_equals_transformers(dtype, norm):
    q, k, v, _ = merged_heads(5, 6, 2, 16, dtype)
    cos, sin = ops.rotary_tables(torch.arange(5) * 3, 10_000.0 ** (-torch.arange(0, 16, 2) / 16), 1.0)
    weights = (torch.randn(16).to(dtype), torch.randn(16).to(dtype)) if norm else (None, None)
    expected_q, expected_k = q.clone(), k.clone()
    if norm:
        modules = [LlamaRMSNorm(16, eps=1e-4).to(dtype) for _ in weights]
        with torch.no_grad():
            for module, weight in zip(modules, weights, strict=True):
                module.weight.copy_(weight)
            expected_q, expected_k = modules[0](expected_q), modules[1](expected_k)
    expected_q, expected_k = apply_rotary_pos_emb(
        expected_q.float(), expected_k.float(), cos.repeat(1, 2), sin.repeat(1, 2)
    )
    v_before = v.clone()
    assert ops.rotate_(q, k, cos, sin, *weights, eps=1e-4) is None
    torch.testing.assert_close(q, expected_q.to(dtype), rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)
    torch.testing.assert_close(k, expected_k.to(dtype), rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)
    assert torch.equal(v, v_before)


def test_norm_of_one_of_the_two_leaves_the_other_alone():
    q, k, _, _ = merged_heads(2, 2, 1, 8)
    before = k.clone()
    ops.rotate_(q, k, torch.ones(2, 4), torch.zeros(2, 4), q_weight=torch.ones(8), eps=0.0)
    assert torch.equal(k, before)
    torch.testing.assert_close(q.square().mean(-1), torch.ones(2, 2))
