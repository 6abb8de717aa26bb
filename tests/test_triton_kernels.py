"""Every Triton kernel against its PyTorch twin, in float32: interpreted where there is no GPU (see conftest.py)."""

import pytest
import torch
from paged_case import dense_attention, make_case
from test_ops import merged_heads

from twostroke.attention.interface import LayerSpec
from twostroke.attention.torch_backend import TorchAttention
from twostroke.kernels import ops

pytest.importorskip("triton")

from twostroke.kernels import activation, embed, norm
from twostroke.kernels.cache_write import cache_write
from twostroke.kernels.paged_prefill import PrefillTiles, prefill_attention, prefill_tiles

# The interpreter of triton 3.6 relies on what numpy 2.3 announces to drop.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """Fresh memory is full of NaN, so that what a kernel forgets to write is seen."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(tensor):
        return tensor.fill_(NAN) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: poison(empty(*args, **kwargs)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: poison(empty_like(*args, **kwargs)))


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (3, 80), (17, 576)])
def test_a_norm(tokens, width):
    x, weight = torch.randn(tokens, width + 16)[:, :width], torch.randn(width)
    wide = torch.zeros(tokens, width + 16, device=DEVICE)
    wide[:, :width] = x.to(DEVICE)
    close(norm.rms_norm(wide[:, :width], weight.to(DEVICE), 1e-3), ops.rms_norm(x, weight, 1e-3))


@pytest.mark.parametrize(("tokens", "width", "parts"), [(1, 64, 1), (3, 80, 5), (17, 576, 32)])
def test_the_rest_of_a_norm(tokens, width, parts):
    """A product left the sums of squares of parts of what it scaled by the norm's weight."""
    x, weight = torch.randn(tokens, width), torch.randn(width)
    squares = torch.rand(parts, tokens)
    squares *= x.square().sum(1) / squares.sum(0)
    finished = norm.finish_norm((x * weight).to(DEVICE), squares.to(DEVICE), 1e-3)
    close(finished, ops.rms_norm(x, weight, 1e-3))


@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (3, 80), (2, 1536)])
def test_silu_mul(tokens, width):
    gate_up = torch.randn(tokens, 2 * width + 3)[:, : 2 * width]
    strided = torch.zeros(tokens, 2 * width + 3, device=DEVICE)[:, : 2 * width].copy_(gate_up)
    close(activation.silu_mul(strided), ops.silu_mul(gate_up))


@pytest.mark.parametrize(("width", "half"), [(64, 32), (80, 40)])
def test_embed(width, half):
    ids, positions = torch.tensor([4, 0, 4, 2, 1]), torch.tensor([0, 1, 17, 4_095, 130_000])
    embedding, weight = torch.randn(5, width), torch.randn(width)
    inv_freq = 500_000.0 ** (-torch.arange(half) / half)
    given = (ids, positions, embedding, weight, 1e-3, inv_freq, 1.25)
    on_device = [one.to(DEVICE) if isinstance(one, torch.Tensor) else one for one in given]
    for actual, expected in zip(embed.embed(*on_device), ops.embed(*given), strict=True):
        close(actual, expected)


@pytest.mark.parametrize(("kv_heads", "head_dim", "block_size"), [(1, 64, 4), (3, 80, 16), (20, 128, 4)])
def test_cache_write_touches_its_slots_and_nothing_else(kv_heads, head_dim, block_size):
    _, k, v, _ = merged_heads(5, 2, kv_heads, head_dim)
    slots = torch.randperm(6 * block_size)[:5]
    keys, values = torch.full((2, 6, kv_heads, block_size, head_dim), NAN)
    expected_keys, expected_values = keys.clone(), values.clone()
    first = 2
    for token, slot in list(enumerate(slots.tolist()))[first:]:
        expected_keys[slot // block_size, :, slot % block_size] = k[token]
        expected_values[slot // block_size, :, slot % block_size] = v[token]
    keys, values = keys.to(DEVICE), values.to(DEVICE)
    from_first = torch.tensor([first], dtype=torch.int32, device=DEVICE)
    cache_write(k.to(DEVICE), v.to(DEVICE), keys, values, slots.to(DEVICE), from_first)
    torch.testing.assert_close(keys.cpu(), expected_keys, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(values.cpu(), expected_values, rtol=0, atol=0, equal_nan=True)


def filled_cache(spec, case, num_blocks, block_size):
    """Keys and values of a cache that holds the past and the step's own tokens; every other place is NaN."""
    cache = TorchAttention([spec], num_blocks, block_size, torch.float32, torch.device(DEVICE))
    case.fill(cache)
    everything = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    cache_write(case.k, case.v, cache.keys[0], cache.values[0], case.step.cache_slots[spec.group], everything)
    return cache.keys[0], cache.values[0]


SHAPES = [(1, 64, 16, 5), (3, 80, 4, 0), (3, 80, 4, 5), (4, 128, 16, 0)]
"""Group, head dimension, block size, window."""


@pytest.mark.parametrize(("group", "head_dim", "block_size", "window"), SHAPES)
def test_prefill(group, head_dim, block_size, window):
    spec = LayerSpec(2 * group, 2, head_dim, head_dim**-0.5, window, group=1)
    chunks = [(0, 1), (19, 17), (0, 3), (5, 0), (16, 16)]
    case, num_blocks = make_case(spec, lengths=[], chunks=chunks, block_size=block_size, padding=9, device=DEVICE)
    keys, values = filled_cache(spec, case, num_blocks, block_size)
    step = case.step
    out = torch.full((len(case.q), spec.heads, head_dim), NAN, device=DEVICE)
    prefill_attention(
        case.q, keys, values, step.block_tables[1], step.chunk_rows, step.chunk_starts, step.chunk_offsets, out,
        scale=spec.scale, window=window, tiles=PrefillTiles(16, 16, 4, 1),
    )  # fmt: skip
    assert torch.equal(out[-9:], torch.zeros_like(out[-9:]))
    close(out[:-9], case.answer[:-9].float().cpu())


def test_prefill_finds_its_chunk_among_many():
    spec = LayerSpec(1, 1, 16, 0.25)
    case, num_blocks = make_case(spec, lengths=[], chunks=[(3, 1)] * 70, block_size=4, device=DEVICE)
    keys, values = filled_cache(spec, case, num_blocks, 4)
    step = case.step
    out = torch.full((70, 1, 16), NAN, device=DEVICE)
    prefill_attention(
        case.q, keys, values, step.block_tables[0], step.chunk_rows, step.chunk_starts, step.chunk_offsets, out,
        scale=spec.scale, window=0, tiles=PrefillTiles(16, 16, 4, 1),
    )  # fmt: skip
    close(out, case.answer.float().cpu())


def test_padding_alone_gives_zeros():
    """F10: a step of a padded graph may have no chunk at all."""
    cache = torch.full((2, 1, 4, 16), NAN, device=DEVICE)
    index = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    out = torch.full((5, 1, 16), NAN, device=DEVICE)
    prefill_attention(
        torch.randn(5, 1, 16, device=DEVICE), cache, cache, index[None], index[:0], index[:0], index, out,
        scale=1.0, window=0, tiles=PrefillTiles(16, 16, 4, 1),
    )  # fmt: skip
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_hold_a_group_and_suit_the_matrix_units(capability, dtype):
    for head_dim in (64, 80, 128, 256):
        for group in (1, 3, 4, 32, 71):
            tiles = prefill_tiles(capability, group, head_dim, dtype)
            assert tiles.queries >= group
            assert min(tiles.queries, tiles.positions) >= 16


def test_the_dense_answer_itself_equals_sdpa():
    spec = LayerSpec(4, 2, 8, 0.3)
    q, k, v = torch.randn(7, 4, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 8)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, scale=0.3, enable_gqa=True
    )[0].transpose(0, 1)
    torch.testing.assert_close(dense_attention(spec, q, k, v).float(), expected)
