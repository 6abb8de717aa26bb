"""Both attention backends against dense attention in float64, through the interface.

Caches are full of NaN wherever a sequence has nothing of its own, so a read too far shows.
"""

import pytest
import torch
from paged_case import DUMMY_BLOCK, make_case

from twostroke.attention.interface import LayerSpec
from twostroke.attention.torch_backend import TorchAttention
from twostroke.kernels.step import StepInputs

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BF16_RATIO = 1e-2
"""Norm of the error over the norm of the answer that bf16 may have."""


def backend_class(name):
    if name == "torch":
        return TorchAttention
    pytest.importorskip("triton")
    from twostroke.attention.triton_backend import TritonAttention

    return TritonAttention


BACKENDS = [("torch", "cpu"), ("triton", "cuda" if torch.cuda.is_available() else "cpu")]
GPU_BACKENDS = [pytest.param(name, "cuda", marks=needs_gpu) for name in ("torch", "triton")]


def make_attention(name, device, layers, num_blocks, block_size, dtype=torch.float32):
    return backend_class(name)(layers, num_blocks, block_size, dtype, torch.device(device))


def run(name, device, spec, block_size, dtype=torch.float32, **case_arguments):
    """Return the case, the attention after the step, and the step's output."""
    case, num_blocks = make_case(spec, block_size=block_size, dtype=dtype, device=device, **case_arguments)
    attention = make_attention(name, device, [spec], num_blocks, block_size, dtype)
    case.fill(attention)
    return case, attention, attention.forward(0, case.q, case.k, case.v, case.step)


def check(case, out, tolerance=1e-5):
    read = ~case.answer.isnan()
    assert out.shape == case.answer.shape
    assert out.is_contiguous()
    assert out.isfinite().all()
    torch.testing.assert_close(out.double()[read], case.answer[read], rtol=tolerance, atol=tolerance)


CASES = {
    "lanes": ([1, 15, 16, 17, 9], [], 0),
    "one lane": ([17], [], 0),
    "dead lanes": ([0, 3, 0, 8], [], 0),
    "one chunk": ([], [(0, 17)], 0),
    "chunks with a past": ([], [(16, 3), (0, 1), (17, 5)], 0),
    "mixed": ([15, 0, 4], [(0, 3), (4, 9)], 0),
    "mixed with padding": ([2, 0], [(5, 4), (0, 0)], 3),
}


@pytest.mark.parametrize(("name", "device"), BACKENDS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "group", "block_size"),
    [(6, 2, 20, 0, 0, 4), (2, 2, 16, 5, 1, 16)],
)
def test_equals_dense_attention(name, device, case, heads, kv_heads, head_dim, window, group, block_size):
    """F10 among them: dead lanes and padding are finite, whatever lies in the cache."""
    lengths, chunks, padding = CASES[case]
    spec = LayerSpec(heads, kv_heads, head_dim, 0.31, window, group)
    case, _, out = run(name, device, spec, block_size, lengths=lengths, chunks=chunks, padding=padding)
    check(case, out)


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_bound_unknown_or_too_large_changes_nothing(name, device):
    spec = LayerSpec(2, 1, 16, 0.25)
    for max_length in (0, 12):
        case, _, out = run(name, device, spec, 4, lengths=[9, 2], chunks=[], max_length=max_length)
        check(case, out)


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_f09_padding_writes_only_to_the_dummy_block(name, device):
    spec = LayerSpec(2, 1, 16, 0.25)
    case, attention, _ = run(name, device, spec, 4, lengths=[0, 5, 0], chunks=[(2, 3)], padding=4)
    block, offset = case.step.cache_slots[0] // 4, case.step.cache_slots[0] % 4
    real = block != DUMMY_BLOCK
    assert real.sum() == 4
    expected = make_attention("torch", device, [spec], len(attention.keys[0]), 4)
    case.fill(expected)
    for written, cache, new in (
        (attention.keys[0], expected.keys[0], case.k),
        (attention.values[0], expected.values[0], case.v),
    ):
        cache[block[real], :, offset[real]] = new[real]
        torch.testing.assert_close(written[1:], cache[1:], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_f10_padded_lanes_change_nothing_for_the_others(name, device):
    spec = LayerSpec(2, 1, 16, 0.25)
    _, _, alone = run(name, device, spec, 4, lengths=[6, 3, 9], chunks=[])
    case, num_blocks = make_case(spec, lengths=[6, 3, 9], chunks=[], block_size=4, device=device)
    attention = make_attention(name, device, [spec], num_blocks, 4)
    case.fill(attention)
    step, pad = case.step, torch.zeros(2, dtype=torch.int32, device=device)
    dummy_row = torch.full_like(pad, step.block_tables.shape[1] - 1)
    padded = step._replace(
        input_ids=torch.cat((step.input_ids, pad.long())),
        cache_slots=torch.cat((step.cache_slots, pad.long()[None]), 1),
        lane_rows=torch.cat((step.lane_rows, dummy_row)),
        lane_lengths=torch.cat((step.lane_lengths, pad)),
    )
    q, k, v = (torch.cat((x, torch.full_like(x[:2], 1e4))) for x in (case.q, case.k, case.v))
    out = attention.forward(0, q, k, v, padded)
    assert out.isfinite().all()
    torch.testing.assert_close(out[:3], alone)


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_lanes_and_chunks_that_are_not_in_use_change_nothing_for_the_others(name, device, window):
    """F10: lanes for which there is room share their places with chunk tokens, and lie in the padding behind them."""
    spec = LayerSpec(4, 2, 16, 0.25, window)
    case, num_blocks = make_case(
        spec, lengths=[6, 0, 9], chunks=[(3, 2), (0, 21)], padding=7, block_size=4, device=device
    )
    attention = make_attention(name, device, [spec], num_blocks, 4)
    case.fill(attention)
    step = case.step

    def pad(values, count, filler):
        return torch.cat((values, values.new_full((count,), filler)))

    dummy_row = step.block_tables.shape[1] - 1
    padded = step._replace(
        lane_rows=pad(step.lane_rows, 25, dummy_row),
        lane_lengths=pad(step.lane_lengths, 25, 0),
        chunk_rows=pad(step.chunk_rows, 6, dummy_row),
        chunk_starts=pad(step.chunk_starts, 6, 0),
        chunk_offsets=pad(step.chunk_offsets, 6, int(step.chunk_offsets[-1])),
    )
    out = attention.forward(0, case.q, case.k, case.v, padded)
    assert out.isfinite().all()
    check(case, out)


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_layers_of_several_kinds_share_a_step(name, device):
    """Windows and cache groups differ by layer; what one kind found must not serve the other."""
    specs = [LayerSpec(4, 2, 16, 0.25, 0, 0), LayerSpec(4, 2, 16, 0.25, 5, 0), LayerSpec(4, 4, 16, 0.25, 0, 0)]
    cases = [make_case(spec, lengths=[9, 4], chunks=[(3, 6)], block_size=4, device=device) for spec in specs]
    attention = make_attention(name, device, specs, cases[0][1], 4)
    step = cases[0][0].step
    for layer, (case, _) in enumerate(cases):
        case.fill(attention, layer)
        check(case, attention.forward(layer, case.q, case.k, case.v, step))


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_a_step_whose_tensors_are_refilled_is_read_anew(name, device):
    spec = LayerSpec(2, 1, 16, 0.25)
    first, num_blocks = make_case(spec, lengths=[9, 4], chunks=[(2, 2)], block_size=4, device=device)
    second, _ = make_case(spec, lengths=[5, 7], chunks=[(3, 2)], block_size=4, device=device, seed=1)
    step = first.step._replace(max_length=9)
    attention = make_attention(name, device, [spec], num_blocks, 4)
    for case in (first, second):
        case.fill(attention)
        for kept, new in zip(step, case.step, strict=True):
            if isinstance(kept, torch.Tensor):
                kept[..., : new.shape[-1]].copy_(new)
        check(case, attention.forward(0, case.q, case.k, case.v, step))


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_prompt_in_chunks_then_decoding_equals_causal_sdpa(name, device):
    """A whole life of two sequences: chunks of 5 and 3 tokens, then one token at a time."""
    spec, total, block_size = LayerSpec(4, 2, 16, 0.25), 12, 4
    q, k, v = torch.randn(2, total, 8, 16).split([4, 2, 2], 2)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, scale=0.25, enable_gqa=True
    ).transpose(1, 2)
    attention = make_attention(name, device, [spec], 8, block_size)
    table = torch.tensor([[[5, 2, 7], [1, 6, 3], [0, 0, 0]]])
    done = 0
    for tokens, is_chunk in [(5, True), (3, True), *[(1, False)] * 4]:
        span = slice(done, done + tokens)
        step = uniform_step(table, 2, done, tokens, is_chunk, block_size, device)
        out = attention.forward(0, *(x[:, span].flatten(0, 1).to(device) for x in (q, k, v)), step)
        torch.testing.assert_close(out.cpu(), expected[:, span].flatten(0, 1), rtol=1e-5, atol=1e-5)
        done += tokens


def uniform_step(table, rows, done, tokens, is_chunk, block_size, device):
    """A step in which `rows` sequences of `done` positions each run `tokens` more."""
    position = torch.arange(done, done + tokens).repeat(rows)
    row = torch.arange(rows).repeat_interleave(tokens)
    everyone, nobody = torch.arange(rows, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    step = StepInputs(
        input_ids=torch.zeros_like(position),
        positions=position,
        cache_slots=(table[0, row, position // block_size] * block_size + position % block_size)[None],
        lane_rows=nobody if is_chunk else everyone,
        lane_lengths=nobody if is_chunk else torch.full_like(everyone, done + 1),
        chunk_rows=everyone if is_chunk else nobody,
        chunk_starts=torch.full_like(everyone, done) if is_chunk else nobody,
        chunk_offsets=(torch.arange(rows + 1 if is_chunk else 1) * tokens).int(),
        block_tables=table.int(),
        sample_index=None,
        max_length=0 if is_chunk else done + 1,
        max_chunk=tokens if is_chunk else 0,
    )
    return StepInputs(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in step))


def test_more_lanes_than_the_schedules_hold_are_refused():
    spec = LayerSpec(2, 1, 16, 0.25)
    case, num_blocks = make_case(spec, lengths=[1, 2, 3], chunks=[], block_size=4)
    attention = backend_class("triton")([spec], num_blocks, 4, torch.float32, torch.device("cpu"), max_lanes=2)
    with pytest.raises(ValueError, match=r"3 lanes.*max_lanes=2"):
        attention.forward(0, case.q, case.k, case.v, case.step)


def error_ratio(case, out):
    read = ~case.answer.isnan()
    assert out.isfinite().all()
    return ((out.double() - case.answer)[read].norm() / case.answer[read].norm()).item()


@pytest.mark.parametrize(("name", "device"), GPU_BACKENDS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (9, 3, 64), (4, 4, 80), (16, 2, 256)])
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("block_size", [16, 256])
def test_bf16_on_the_device(name, device, heads, kv_heads, head_dim, window, block_size):
    spec = LayerSpec(heads, kv_heads, head_dim, head_dim**-0.5, window)
    lengths = [1, 255, 256, 0, 257, 2_500, 31, 0]
    case, _, out = run(
        name, device, spec, block_size, torch.bfloat16,
        lengths=lengths, chunks=[(0, 300), (700, 65), (16, 1), (0, 31)], padding=5,
    )  # fmt: skip
    assert error_ratio(case, out) <= BF16_RATIO


@pytest.mark.parametrize(("name", "device"), GPU_BACKENDS)
def test_fp32_on_the_device(name, device):
    spec = LayerSpec(8, 2, 128, 128**-0.5)
    case, _, out = run(name, device, spec, 16, lengths=[1, 700, 0], chunks=[(5, 130), (0, 9)])
    check(case, out)


@pytest.mark.parametrize(("name", "device"), GPU_BACKENDS)
def test_no_call_waits_for_the_device(name, device):
    spec = LayerSpec(8, 2, 64, 0.125)
    case, num_blocks = make_case(spec, lengths=[9, 40], chunks=[(3, 20)], block_size=16, device=device)
    attention = make_attention(name, device, [spec], num_blocks, 16)
    case.fill(attention)
    attention.forward(0, case.q, case.k, case.v, case.step)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = attention.forward(0, case.q, case.k, case.v, case.step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check(case, out)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_captured_graph_serves_all_lengths():
    spec = LayerSpec(8, 2, 128, 128**-0.5)
    arguments = {"chunks": [], "block_size": 16, "dtype": torch.bfloat16, "device": "cuda"}
    case, num_blocks = make_case(spec, lengths=[3_000, 1, 700, 64], max_length=0, **arguments)
    attention = make_attention("triton", "cuda", [spec], num_blocks, 16, torch.bfloat16)
    step, inputs = case.step, (case.q.clone(), case.k.clone(), case.v.clone())
    attention.forward(0, *inputs, step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.forward(0, *inputs, step)
    for seed, lengths in enumerate([[3_000, 1, 700, 64], [5, 0, 2_999, 17], [0, 0, 0, 0], [1, 1_024, 16, 15]]):
        again, _ = make_case(spec, lengths=lengths, seed=seed, **arguments)
        again.fill(attention)
        for kept, new in zip((*step, *inputs), (*again.step, again.q, again.k, again.v), strict=True):
            if isinstance(kept, torch.Tensor):
                kept[..., : new.shape[-1]].copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        assert out.isfinite().all()
        if any(lengths):
            assert error_ratio(again, out) <= BF16_RATIO


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cache_of_more_than_2_to_31_elements():
    spec = LayerSpec(8, 8, 128, 128**-0.5)
    arguments = {"lengths": [33, 5], "chunks": [(3, 40)], "block_size": 16}
    case, needed = make_case(spec, dtype=torch.bfloat16, device="cuda", **arguments)
    num_blocks = 2**31 // (8 * 16 * 128) + needed
    shift = num_blocks - needed
    case.step.block_tables.add_(shift)
    case.step.cache_slots.add_(shift * 16)
    attention = make_attention("triton", "cuda", [spec], num_blocks, 16, torch.bfloat16)
    case.fill(attention)
    out = attention.forward(0, case.q, case.k, case.v, case.step)
    assert error_ratio(case, out) <= BF16_RATIO
