"""The attention of prompt chunks in CUDA C++, against dense attention in float64: on a GPU, and by emulated blocks.

The cache is full of NaN wherever a sequence has nothing of its own, and so is the output before.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from emulation import compiled, emulated
from paged_case import dense_attention, make_case

from twostroke.attention.interface import LayerSpec
from twostroke.attention.torch_backend import TorchAttention
from twostroke.kernels import ops, streamed_prefill
from twostroke.kernels.compiler import CompilerMissing
from twostroke.kernels.ops import Rotary
from twostroke.kernels.streamed_prefill import StreamedPrefill, tile_tokens

pytest.importorskip("triton")

from twostroke.attention import triton_backend
from twostroke.kernels.prefill_schedule import make_prefill_schedule

# The interpreter of triton 3.6 relies on what numpy 2.3 announces to drop.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

NAN = float("nan")
EMULATED_BLOCKS = 2
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)
WHERE = [pytest.param("cpu", marks=emulated), pytest.param("cuda", marks=[pytest.mark.gpu, hopper])]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    sources = ["streamed_prefill.cuh", "query_rotation.cuh", "row_softmax.cuh", "pairs.cuh"]
    return compiled(tmp_path_factory.mktemp("emulated"), "prompts/streamed_prefill.cpp", sources)


@pytest.fixture
def launcher(request, monkeypatch):
    """Makes a `StreamedPrefill` for a device; on the CPU its blocks are emulated, in an order that a seed gives."""

    def make(where, seed=0, blocks=EMULATED_BLOCKS):
        if where == "cpu":
            emulation = request.getfixturevalue("library")
            ctypes.c_int.in_dll(emulation, "seed").value = seed
            monkeypatch.setattr(streamed_prefill, "load_library", lambda *_: emulation)
            processors = SimpleNamespace(multi_processor_count=blocks)
            monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: processors)
            monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
        return StreamedPrefill(torch.device(where))

    return make


def test_shapes_that_fit():
    def fits(heads=32, kv_heads=8, head_dim=128, block_size=16, dtype=torch.bfloat16, window=0):
        return StreamedPrefill.fits(heads, kv_heads, head_dim, block_size, dtype, window)

    assert fits()
    assert fits(heads=9, kv_heads=3, head_dim=64, block_size=48)
    assert not fits(heads=136)
    assert not fits(head_dim=80)
    assert not fits(block_size=8)
    assert not fits(dtype=torch.float16)
    assert not fits(window=512)


@emulated
def test_who_rotates_queries(launcher):
    """Attention where each multiprocessor has three tiles, here of 8 kv heads; a pass where angles have no room."""
    attend = launcher("cpu", blocks=132)
    assert [attend.rotates(tokens, 16, 8) for tokens in (3199, 3200)] == [False, True]
    assert [attend.rotates(tokens, 32, 8) for tokens in (1599, 1600)] == [False, True]
    assert not attend.rotates(1 << 20, 8, 8)


def test_a_missing_compiler_leaves_the_kernel_in_triton_and_says_so(monkeypatch, caplog):
    def missing(*_):
        raise CompilerMissing("no CUDA compiler (nvcc) was found")

    monkeypatch.setattr(streamed_prefill, "load_library", missing)
    given = ([LayerSpec(32, 8, 128, 0.1)], 16, torch.bfloat16, torch.device("cuda"))
    assert triton_backend._streamed_prefill_for(*given, (9, 0)) is None
    assert "prompt chunks" in caplog.text
    assert "nvcc" in caplog.text
    caplog.clear()
    assert triton_backend._streamed_prefill_for(*given, (8, 0)) is None
    assert not caplog.text, "no other GPU has the kernel"


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs the CUDA compiler")
def test_the_source_compiles_without_spills_or_waits_of_the_compilers_own(tmp_path):
    source = Path(streamed_prefill.__file__).with_suffix(".cu")
    options = ["-std=c++17", "-O3", "-gencode", "arch=compute_90a,code=sm_90a", "-Xptxas", "-v"]
    command = ["nvcc", *options, "-cubin", "-o", tmp_path / "streamed", source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(" 0 bytes spill stores") == 2
    assert "warning" not in done.stderr
    assert "serialized" not in done.stderr


def in_cache(case, spec, num_blocks, block_size):
    """Return a cache of the past, and of the step's own positions."""
    cache = TorchAttention([spec], num_blocks, block_size, torch.bfloat16, case.q.device)
    case.fill(cache)
    begin, end = int(case.step.chunk_offsets[0]), int(case.step.chunk_offsets[-1])
    slots = case.step.cache_slots[spec.group, begin:end]
    for kept, new in ((cache.keys[0], case.k), (cache.values[0], case.v)):
        kept[slots // block_size, :, slots % block_size] = new[begin:end]
    return cache


def schedule_of(step, tokens, spec):
    step, size = with_unused_chunks(step, 3), tile_tokens(spec.heads, spec.kv_heads)
    offsets = (step.chunk_rows, step.chunk_starts, step.chunk_offsets)
    return make_prefill_schedule(*offsets, tokens=tokens, tile_tokens=size)


def with_unused_chunks(step, count):
    def padded(values, filler):
        return torch.cat((values, values.new_full((count,), filler)))

    return step._replace(
        chunk_rows=padded(step.chunk_rows, step.block_tables.shape[1] - 1),
        chunk_starts=padded(step.chunk_starts, 0),
        chunk_offsets=padded(step.chunk_offsets, int(step.chunk_offsets[-1])),
    )


def run(attend, case, spec, num_blocks, block_size, rotary=None):
    """Return the output, NaN where nothing was written."""
    cache = in_cache(case, spec, num_blocks, block_size)
    queries = case.q.clone()
    out = torch.full(case.q.shape, NAN, device=case.q.device, dtype=torch.bfloat16)
    schedule = schedule_of(case.step, len(out), spec)
    table = case.step.block_tables[spec.group]
    attend(case.q, cache.keys[0], cache.values[0], table, schedule, out, scale=spec.scale, rotary=rotary)
    assert not attend._tickets.any()
    assert torch.equal(case.q.view(torch.int16), queries.view(torch.int16))
    return out


def check(case, out):
    """By the norms of each token's heads; before the first chunk nothing is written, behind the last one zeros."""
    begin, end = int(case.step.chunk_offsets[0]), int(case.step.chunk_offsets[-1])
    assert out[:begin].isnan().all()
    assert not out[end:].any()
    errors, norms = (x.norm(dim=2) for x in (out[begin:end].double() - case.answer[begin:end], case.answer[begin:end]))
    assert (errors <= 1e-2 * norms).all(), f"off by {(errors / norms).max():.1%}"


SHAPES = [
    # kv_heads, group, head_dim, block_size
    (2, 1, 64, 16),
    (1, 3, 64, 48),
    (2, 2, 128, 16),
    (1, 4, 128, 32),
    (1, 7, 128, 64),
    (1, 16, 64, 256),
]
CHUNKS = {
    "one token": [(0, 1)],
    "one token after others": [(300, 1)],
    "short ones": [(0, 5), (17, 3), (0, 1), (127, 1), (128, 2)],
    "whole tiles": [(0, 128), (128, 128)],
    "long ones": [(5, 200), (0, 130), (370, 33)],
}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(("kv_heads", "group", "head_dim", "block_size"), SHAPES)
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_equals_dense_attention(launcher, where, kv_heads, group, head_dim, block_size, chunks):
    """Behind lanes, and ahead of padding and of chunks that are not in use."""
    spec = LayerSpec(kv_heads * group, kv_heads, head_dim, head_dim**-0.5, group=1)
    options = {"block_size": block_size, "dtype": torch.bfloat16, "device": where}
    case, num_blocks = make_case(spec, lengths=[4, 0, 9], chunks=chunks, padding=37, **options)
    case.q[int(case.step.chunk_offsets[-1]) :] = NAN
    attend = launcher(where)
    out = run(attend, case, spec, num_blocks, block_size)
    check(case, out)
    for _ in range(20 if where == "cuda" else 0):
        assert torch.equal(run(attend, case, spec, num_blocks, block_size)[3:], out[3:])


def make_rotary(tokens, head_dim, normed, where):
    cos, sin = torch.randn(2, tokens, head_dim // 2, generator=torch.Generator().manual_seed(1)).to(where)
    weight = (1 + torch.rand(head_dim, generator=torch.Generator().manual_seed(2))).bfloat16().to(where)
    return Rotary(cos, sin, weight if normed else None, None, 0.5)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("kv_heads", "group", "head_dim", "block_size"), [shape for shape in SHAPES if shape[1] > 1])
def test_queries_are_normed_and_rotated_on_their_way(launcher, where, normed, kv_heads, group, head_dim, block_size):
    """As by a pass of its own; items end where no tile does, and there are more of them than there is room for."""
    spec = LayerSpec(kv_heads * group, kv_heads, head_dim, head_dim**-0.5, group=1)
    options = {"block_size": block_size, "dtype": torch.bfloat16, "device": where}
    case, num_blocks = make_case(spec, lengths=[4, 9], chunks=[(5, 200), (0, 31), (130, 3)], padding=37, **options)
    rotary = make_rotary(len(case.q), head_dim, normed, where)
    out = run(launcher(where), case, spec, num_blocks, block_size, rotary)
    plain = run(launcher(where), case, spec, num_blocks, block_size)
    # NOTE: no more than the rounding of a sum or two apart: `ops.rotate_` adds in an order of its own.
    ops.rotate_(case.q, torch.zeros_like(case.k), *rotary)
    expected = run(launcher(where), case, spec, num_blocks, block_size)
    begin, end = int(case.step.chunk_offsets[0]), int(case.step.chunk_offsets[-1])
    errors, norms = ((x - y).double().norm(dim=2)[begin:end] for x, y in ((out, expected), (plain, expected)))
    assert (errors <= 1e-2 * expected[begin:end].double().norm(dim=2)).all()
    assert (norms > 5 * errors).double().mean() > 0.9, "rotation changes what comes out"
    assert out[:begin].isnan().all()
    assert not out[end:].any()


@emulated
@pytest.mark.parametrize("chunks", [[(118, 1)], [(0, 0), (5, 9)], []])
def test_blocks_without_an_item(launcher, chunks):
    """More blocks than items: they end, and let the others end."""
    spec = LayerSpec(4, 2, 64, 64**-0.5)
    case, num_blocks = make_case(
        spec, lengths=[3], chunks=chunks, padding=4, block_size=16, dtype=torch.bfloat16, device="cpu"
    )
    rotary = make_rotary(len(case.q), 64, True, "cpu")
    few, many = (run(launcher("cpu", blocks=blocks), case, spec, num_blocks, 16, rotary) for blocks in (1, 9))
    end = 1 + sum(tokens for _, tokens in chunks)
    assert torch.equal(few[1:], many[1:])
    assert many[1:end].isfinite().all()
    assert not many[end:].any()


@emulated
@pytest.mark.parametrize("rotated", [False, True])
def test_who_takes_which_item_and_when_changes_nothing(launcher, rotated):
    spec = LayerSpec(4, 2, 128, 128**-0.5)
    options = {"block_size": 16, "dtype": torch.bfloat16}
    case, num_blocks = make_case(spec, lengths=[], chunks=[(40, 70), (0, 300), (200, 40)], **options)
    rotary = make_rotary(len(case.q), 128, True, "cpu") if rotated else None
    orders = [(seed, blocks) for seed in range(6) for blocks in (1, 3)]
    outs = [run(launcher("cpu", *order), case, spec, num_blocks, 16, rotary) for order in orders]
    if not rotated:
        check(case, outs[0])
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("sign", [-1, 1])
def test_scores_of_any_size(launcher, where, sign):
    """Whose powers of two are beyond what a number can be; and rows whose largest score comes last, or first."""
    spec = LayerSpec(4, 2, 64, 64**-0.5)
    options = {"block_size": 16, "dtype": torch.bfloat16, "device": where}
    case, num_blocks = make_case(spec, lengths=[], chunks=[(100, 200)], **options)
    row = int(case.step.chunk_rows[0])
    keys, values = case.sequences[row]
    ramp = torch.linspace(-sign, sign, len(keys))[:, None, None]
    keys[:] = (keys + 40 * ramp).bfloat16()
    case.k[:] = keys[100:].to(where)
    case.q.abs_()
    expected = dense_attention(spec, case.q.cpu(), keys, values)
    out = run(launcher(where), case, spec, num_blocks, 16)
    errors, norms = (x.norm(dim=2) for x in (out.double().cpu() - expected, expected))
    assert (errors <= 1e-2 * norms).all()


CASES = [
    ([(0, 5)], 8, 0),
    ([(0, 64), (100, 65), (3, 1)], 16, 9),
    ([(7, 100), (0, 100), (50, 0), (0, 17)], 32, 0),
    ([], 16, 40),
    ([(i, 1 + i % 50) for i in range(70)], 42, 3),
]


@pytest.mark.parametrize(("chunks", "size", "padding"), CASES)
@pytest.mark.parametrize("first", [0, 7])
def test_the_schedule_has_every_token_once_and_the_longest_tiles_first(chunks, size, padding, first):
    where = "cuda" if torch.cuda.is_available() else "cpu"
    offsets = torch.tensor([first] + [count for _, count in chunks]).cumsum(0)
    rows, starts = torch.arange(len(chunks)) + 5, torch.tensor([start for start, _ in chunks])
    tokens = int(offsets[-1]) + padding
    words = make_prefill_schedule(
        *(x.int().to(where) for x in (rows, starts, offsets)), tokens=tokens, tile_tokens=size
    ).words.cpu()
    tiles = words[1 : 1 + int(words[0, 0])].tolist()
    seen = {}
    for row, position, token, count in tiles:
        assert 0 < count <= size
        for i in range(count):
            assert seen.setdefault(token + i, (row, position + i)) == (row, position + i)
    expected = {
        int(offsets[chunk]) + i: (chunk + 5, start + i)
        for chunk, (start, count) in enumerate(chunks)
        for i in range(count)
    }
    assert {token: place for token, place in seen.items() if token < int(offsets[-1])} == expected
    assert sorted(seen) == list(range(first, tokens))
    assert sum(count for *_, count in tiles) == tokens - first
    reach = [position + size for row, position, _, count in tiles if position >= 0]
    assert reach == sorted(reach, reverse=True)
    assert all(position == -count for _, position, _, count in tiles[len(reach) :])


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 8, 128), (32, 8, 128), (9, 3, 64)])
def test_large_steps_are_right_and_every_run_the_same(launcher, heads, kv_heads, head_dim):
    """More items than blocks, and rings that are used again many times."""
    spec = LayerSpec(heads, kv_heads, head_dim, head_dim**-0.5)
    chunks = [(0, 1_024), (1_500, 300), (0, 100), (37, 411), (0, 777)]
    options = {"block_size": 16, "dtype": torch.bfloat16, "device": "cuda"}
    case, num_blocks = make_case(spec, lengths=[], chunks=chunks, padding=5, **options)
    attend = launcher("cuda")
    first = run(attend, case, spec, num_blocks, 16)
    check(case, first)
    cache = in_cache(case, spec, num_blocks, 16)
    schedule = schedule_of(case.step, len(first), spec)
    table = case.step.block_tables[spec.group]
    for early in [False, True] * 50:
        out = torch.full_like(first, NAN)
        attend(case.q, cache.keys[0], cache.values[0], table, schedule, out, scale=spec.scale, early=early)
        assert torch.equal(out, first)


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
    rotary = make_rotary(len(case.q), head_dim, normed, "cuda")._replace(eps=1e-6)
    rotary = rotary._replace(k_norm=rotary.q_norm)
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


@pytest.mark.gpu
@hopper
def test_one_captured_graph_serves_all_chunks():
    """Through the backend, in the padded sizes of a captured step."""
    spec = LayerSpec(16, 8, 128, 128**-0.5)
    steps = [[(0, 300), (64, 100)], [(0, 1), (700, 399)], [(512, 77), (0, 150)]]
    options = {"lengths": [], "block_size": 16, "dtype": torch.bfloat16, "device": "cuda"}
    cases = [
        make_case(spec, chunks=chunks, padding=400 - sum(count for _, count in chunks), seed=seed, **options)
        for seed, chunks in enumerate(steps)
    ]
    num_blocks = max(blocks for _, blocks in cases)
    width = max(case.step.block_tables.shape[2] for case, _ in cases)
    attention = triton_backend.TritonAttention([spec], num_blocks, 16, torch.bfloat16, torch.device("cuda"))
    assert attention._streamed_prefill is not None
    kept = with_unused_chunks(cases[0][0].step, 2)
    tables = kept.block_tables.new_zeros(1, 8, width)
    kept = kept._replace(block_tables=tables, input_ids=kept.input_ids.new_zeros(400))
    inputs = [x.clone() for x in (cases[0][0].q, cases[0][0].k, cases[0][0].v)]

    def refill(case):
        step = with_unused_chunks(case.step, 2)
        for old, new in zip((*kept, *inputs), (*step, case.q, case.k, case.v), strict=True):
            if not isinstance(old, torch.Tensor) or old is tables or old is kept.input_ids:
                continue
            old.copy_(new)
        rows, blocks = step.block_tables.shape[1:]
        tables[:, :rows, :blocks].copy_(step.block_tables)

    refill(cases[0][0])
    attention.forward(0, *inputs, kept)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.forward(0, *inputs, kept)
    for case, _ in cases:
        case.fill(attention)
        refill(case)
        graph.replay()
        torch.cuda.synchronize()
        check(case, out)
