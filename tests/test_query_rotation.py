"""Queries that are normed and rotated inside the attention of prompt chunks."""

from __future__ import annotations

import pytest
import torch
from emulation import emulated
from paged_case import make_case
from streamed_case import random_rotary
from streamed_prefill_case import SHAPES, WHERE, hopper, run

from twostroke.attention.interface import LayerSpec
from twostroke.attention.torch_backend import TorchAttention
from twostroke.kernels import ops

pytest.importorskip("triton")

from twostroke.attention import triton_backend

# The interpreter of triton 3.6 relies on what numpy 2.3 announces to drop.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


@emulated
def test_who_rotates_queries(prefill_launcher):
    """Attention where each multiprocessor has three tiles, here of 8 kv heads; a pass where angles have no room."""
    attend = prefill_launcher("cpu", blocks=132)
    assert [attend.rotates(tokens, 16, 8) for tokens in (3199, 3200)] == [False, True]
    assert [attend.rotates(tokens, 32, 8) for tokens in (1599, 1600)] == [False, True]
    assert not attend.rotates(1 << 20, 8, 8)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("kv_heads", "group", "head_dim", "block_size"), [shape for shape in SHAPES if shape[1] > 1])
def test_queries_are_normed_and_rotated_on_their_way(
    prefill_launcher, where, normed, kv_heads, group, head_dim, block_size
):
    """Items end where no tile does, and there are more of them than there is room for."""
    torch.manual_seed(0)
    spec = LayerSpec(kv_heads * group, kv_heads, head_dim, head_dim**-0.5, group=1)
    options = {"block_size": block_size, "dtype": torch.bfloat16, "device": where}
    case, num_blocks = make_case(spec, lengths=[4, 9], chunks=[(5, 200), (0, 31), (130, 3)], padding=37, **options)
    rotary = random_rotary(len(case.q), head_dim, (normed, normed), where)
    out = run(prefill_launcher(where), case, spec, num_blocks, block_size, rotary)
    plain = run(prefill_launcher(where), case, spec, num_blocks, block_size)
    # NOTE: no more than the rounding of a sum or two apart: `ops.rotate_` adds in an order of its own.
    ops.rotate_(case.q, torch.zeros_like(case.k), *rotary)
    expected = run(prefill_launcher(where), case, spec, num_blocks, block_size)
    begin, end = int(case.step.chunk_offsets[0]), int(case.step.chunk_offsets[-1])
    errors, norms = ((x - y).double().norm(dim=2)[begin:end] for x, y in ((out, expected), (plain, expected)))
    assert (errors <= 1e-2 * expected[begin:end].double().norm(dim=2)).all()
    assert (norms > 5 * errors).double().mean() > 0.9, "rotation changes what comes out"
    assert out[:begin].isnan().all()
    assert not out[end:].any()


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "chunks", "on_their_way"),
    [
        (16, 8, 128, [(5, 2000), (0, 31), (130, 2100)], True),
        (16, 8, 128, [(5, 200), (0, 31), (130, 3)], False),
        (4, 4, 128, [(5, 2000), (0, 31), (130, 2100)], False),
        (6, 2, 64, [(5, 2000), (0, 31), (130, 7000)], True),
    ],
)
@pytest.mark.parametrize("normed", [False, True])
def test_through_the_backend_with_rotation(heads, kv_heads, head_dim, chunks, on_their_way, normed):
    """Against the plain backend in float32; where that is best, a pass of its own rotates the queries."""
    spec = LayerSpec(heads, kv_heads, head_dim, head_dim**-0.5)
    options = {"block_size": 16, "dtype": torch.bfloat16, "device": "cuda"}
    case, num_blocks = make_case(spec, lengths=[7, 300], chunks=chunks, **options)
    rotary = random_rotary(len(case.q), head_dim, (normed, normed), "cuda")._replace(eps=1e-6)
    q, k = case.q.clone(), case.k.clone()
    ops.rotate_(q, k, *rotary)
    plain = TorchAttention([spec], num_blocks, 16, torch.float32, torch.device("cuda"))
    case.fill(plain)
    expected = plain.forward(0, q.float(), k.float(), case.v.float(), case.step)
    fused = triton_backend.TritonAttention([spec], num_blocks, 16, torch.bfloat16, torch.device("cuda"))
    assert fused._streamed_prefill.rotates(len(case.q), heads, kv_heads) == on_their_way
    case.fill(fused)
    out = fused.forward_rotary(0, case.q, case.k, case.v, rotary, case.step)
    errors, norms = (x.double().norm(dim=2) for x in (out - expected, expected))
    assert (errors <= 1e-2 * norms).all(), f"off by {(errors / norms).max():.1%}"
