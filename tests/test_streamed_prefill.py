"""The attention of prompt chunks in CUDA C++, against dense attention in float64: on a GPU, and by emulated blocks.

The cache is full of NaN wherever a sequence has nothing of its own, and so is the output before.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from emulation import emulated
from paged_case import dense_attention, make_case
from streamed_case import random_rotary
from streamed_prefill_case import (
    NAN,
    SHAPES,
    WHERE,
    check,
    hopper,
    in_cache,
    run,
    schedule_of,
    with_unused_chunks,
)

from twostroke.attention.interface import LayerSpec
from twostroke.kernels import streamed_prefill
from twostroke.kernels.compiler import CompilerMissing
from twostroke.kernels.streamed_prefill import StreamedPrefill

pytest.importorskip("triton")

from twostroke.attention import triton_backend
from twostroke.kernels.prefill_schedule import make_prefill_schedule

# The interpreter of triton 3.6 relies on what numpy 2.3 announces to drop.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


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
def test_equals_dense_attention(prefill_launcher, where, kv_heads, group, head_dim, block_size, chunks):
    """Behind lanes, and ahead of padding and of chunks that are not in use."""
    spec = LayerSpec(kv_heads * group, kv_heads, head_dim, head_dim**-0.5, group=1)
    options = {"block_size": block_size, "dtype": torch.bfloat16, "device": where}
    case, num_blocks = make_case(spec, lengths=[4, 0, 9], chunks=chunks, padding=37, **options)
    case.q[int(case.step.chunk_offsets[-1]) :] = NAN
    attend = prefill_launcher(where)
    out = run(attend, case, spec, num_blocks, block_size)
    check(case, out)
    for _ in range(20 if where == "cuda" else 0):
        assert torch.equal(run(attend, case, spec, num_blocks, block_size)[3:], out[3:])


@emulated
@pytest.mark.parametrize("chunks", [[(118, 1)], [(0, 0), (5, 9)], []])
def test_blocks_without_an_item(prefill_launcher, chunks):
    """More blocks than items: they end, and let the others end."""
    spec = LayerSpec(4, 2, 64, 64**-0.5)
    case, num_blocks = make_case(
        spec, lengths=[3], chunks=chunks, padding=4, block_size=16, dtype=torch.bfloat16, device="cpu"
    )
    rotary = random_rotary(len(case.q), 64, (True, True), "cpu")
    few, many = (run(prefill_launcher("cpu", blocks=blocks), case, spec, num_blocks, 16, rotary) for blocks in (1, 9))
    end = 1 + sum(tokens for _, tokens in chunks)
    assert torch.equal(few[1:], many[1:])
    assert many[1:end].isfinite().all()
    assert not many[end:].any()


@emulated
@pytest.mark.parametrize("rotated", [False, True])
def test_who_takes_which_item_and_when_changes_nothing(prefill_launcher, rotated):
    spec = LayerSpec(4, 2, 128, 128**-0.5)
    options = {"block_size": 16, "dtype": torch.bfloat16}
    case, num_blocks = make_case(spec, lengths=[], chunks=[(40, 70), (0, 300), (200, 40)], **options)
    rotary = random_rotary(len(case.q), 128, (True, True), "cpu") if rotated else None
    orders = [(seed, blocks) for seed in range(6) for blocks in (1, 3)]
    outs = [run(prefill_launcher("cpu", *order), case, spec, num_blocks, 16, rotary) for order in orders]
    if not rotated:
        check(case, outs[0])
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("sign", [-1, 1])
def test_scores_of_any_size(prefill_launcher, where, sign):
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
    out = run(prefill_launcher(where), case, spec, num_blocks, 16)
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
def test_large_steps_are_right_and_every_run_the_same(prefill_launcher, heads, kv_heads, head_dim):
    """More items than blocks, and rings that are used again many times."""
    spec = LayerSpec(heads, kv_heads, head_dim, head_dim**-0.5)
    chunks = [(0, 1_024), (1_500, 300), (0, 100), (37, 411), (0, 777)]
    options = {"block_size": 16, "dtype": torch.bfloat16, "device": "cuda"}
    case, num_blocks = make_case(spec, lengths=[], chunks=chunks, padding=5, **options)
    attend = prefill_launcher("cuda")
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
