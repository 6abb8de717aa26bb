"""The attention of decode lanes in CUDA C++, against the plain backend in float32: on a GPU, and by emulated warps."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from itertools import cycle, product
from pathlib import Path

import pytest
import torch
from emulation import emulated
from paged_case import make_case
from streamed_case import EMULATED_BLOCKS, NAN, Streamed, assert_near, plain, random_rotary

from twostroke.attention.interface import LayerSpec
from twostroke.kernels import streamed_decode
from twostroke.kernels.compiler import CompilerMissing
from twostroke.kernels.streamed_decode import TILES, UNIT, StreamedDecode, streamed_tiles

pytest.importorskip("triton")

from twostroke.attention import triton_backend

# The interpreter of triton 3.6 relies on what numpy 2.3 announces to drop.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

WARPS = [f"{tiles.warps} warps" for tiles in TILES]
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)
WHERE = [pytest.param("cpu", marks=emulated), pytest.param("cuda", marks=[pytest.mark.gpu, hopper])]


def test_shapes_that_fit():
    def fits(heads=32, kv_heads=8, head_dim=128, block_size=16, dtype=torch.bfloat16):
        return StreamedDecode.fits(heads, kv_heads, head_dim, block_size, dtype)

    assert fits()
    assert fits(heads=9, kv_heads=3, head_dim=64, block_size=32)
    assert not fits(heads=128)
    assert not fits(head_dim=80)
    assert not fits(block_size=8)
    assert not fits(dtype=torch.float16)
    assert not fits(dtype=torch.float32)


def test_lanes_that_are_about_a_share_for_each_warp_get_fewer_warps():
    lanes = {warps: [n for n in range(1, 300) if streamed_tiles(n, 8, 132).warps == warps] for warps in (4, 8)}
    assert lanes == {4: [*range(106, 133)], 8: [*range(1, 106), *range(133, 300)]}


def test_a_missing_compiler_leaves_the_kernel_in_triton_and_says_so(monkeypatch, caplog):
    def missing(*_):
        raise CompilerMissing("no CUDA compiler (nvcc) was found")

    monkeypatch.setattr(streamed_decode, "load_library", missing)
    given = ([LayerSpec(32, 8, 128, 0.1)], 16, torch.bfloat16, torch.device("cuda"))
    assert triton_backend._streamed_for(*given, (9, 0)) is None
    assert "nvcc" in caplog.text
    caplog.clear()
    assert triton_backend._streamed_for(*given, (8, 0)) is None
    assert not caplog.text, "no other GPU has the kernel"


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs the CUDA compiler")
def test_the_source_compiles(tmp_path):
    source = Path(streamed_decode.__file__).with_suffix(".cu")
    architecture = "arch=compute_90a,code=sm_90a"
    command = ["nvcc", "-std=c++17", "-gencode", architecture, "-cubin", "-o", tmp_path / "streamed", source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr


LENGTHS = [1, UNIT, UNIT + 1, 0, UNIT + 2, 2 * UNIT + 1, 0, 150, 700, 33, 2]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "block_size", "window"),
    [
        (2, 1, 64, 16, 5),
        (3, 3, 64, 32, 0),
        (2, 4, 128, 16, 0),
        (4, 2, 128, 64, 40),
        (1, 8, 128, 16, 1),
    ],
)
@pytest.mark.parametrize("norms", [None, (False, False), (True, True), (False, True)])
@pytest.mark.parametrize("tiles", TILES, ids=WARPS)
def test_equals_rotating_writing_and_attending(
    launcher, where, kv_heads, group, head_dim, block_size, window, norms, tiles
):
    """F09, F10 among it: dead lanes write nothing and come out as zeros, whatever lies in the cache and in them."""
    torch.manual_seed(0)
    spec = LayerSpec(kv_heads * group, kv_heads, head_dim, head_dim**-0.5, window, group=1)
    options = {"lengths": LENGTHS, "chunks": [], "block_size": block_size, "dtype": torch.bfloat16}
    case, num_blocks = make_case(spec, device=where, **options)
    dead = case.step.lane_lengths == 0
    for x in (case.q, case.k, case.v):
        x[dead] = NAN
    rotary = None if norms is None else random_rotary(len(LENGTHS), head_dim, norms, where)
    keys, values, expected = plain(case, spec, num_blocks, block_size, rotary)
    inputs = [x.clone().view(torch.int16) for x in (case.q, case.k, case.v)]
    run = Streamed(launcher(where), case, spec, num_blocks, block_size, extra=9, tiles=tiles)
    first = run(rotary)
    torch.testing.assert_close(run.cache.keys[0][1:].float(), keys[1:], rtol=2e-2, atol=2e-2, equal_nan=True)
    torch.testing.assert_close(run.cache.values[0][1:].float(), values[1:], rtol=0, atol=0, equal_nan=True)
    assert run.cache.keys[0][0].isnan().all()
    assert torch.equal(first[dead], torch.zeros_like(first[dead]))
    assert_near(first[~dead], expected[~dead])
    for x, before in zip((case.q, case.k, case.v), inputs, strict=True):
        assert torch.equal(x.view(torch.int16), before)
    for _ in range(20 if where == "cuda" else 1):
        assert torch.equal(run(rotary), first)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("group", [1, 3, 5, 7, 8])
def test_shares_of_a_long_lane_are_added_up(launcher, where, group):
    """One lane alone, in a share of a few units for each warp; every number of query heads."""
    spec = LayerSpec(2 * group, 2, 64, 64**-0.5)
    options = {"chunks": [], "block_size": 16, "dtype": torch.bfloat16, "device": where}
    case, num_blocks = make_case(spec, lengths=[900, 3], **options)
    _, _, expected = plain(case, spec, num_blocks, 16, None)
    run = Streamed(launcher(where), case, spec, num_blocks, 16, extra=11)
    out = run(None)
    assert int(run.schedule.words[0, 0]) > 8
    assert_near(out, expected)


@emulated
@pytest.mark.parametrize("block_size", [16, 48])
def test_a_share_of_many_blocks(launcher, block_size):
    """More than the 64 whose numbers lie in registers, twice."""
    spec = LayerSpec(8, 8, 64, 64**-0.5)
    options = {"chunks": [], "block_size": block_size, "dtype": torch.bfloat16}
    case, num_blocks = make_case(spec, lengths=[130 * block_size + 5, 40], **options)
    _, _, expected = plain(case, spec, num_blocks, block_size, None)
    run = Streamed(launcher("cpu"), case, spec, num_blocks, block_size, extra=1)
    out = run(None)
    assert int(run.schedule.words[0, 0]) == 2, "no lane is cut"
    assert_near(out, expected)


@emulated
@pytest.mark.parametrize("tiles", TILES, ids=WARPS)
def test_who_takes_which_share_changes_nothing(launcher, streamed_library, tiles):
    """Warps one after the other, from the first or from the last: each takes all shares that are left. Or in turn, so
    that the rings of a block are in use together.
    """
    spec = LayerSpec(8, 4, 128, 128**-0.5)
    lengths = [(37 * i * i) % 190 for i in range(14)]
    options = {"chunks": [], "block_size": 16, "dtype": torch.bfloat16, "seed": 1}
    case, num_blocks = make_case(spec, lengths=lengths, **options)
    rotary = random_rotary(len(lengths), 128, (False, False), "cpu")
    _, _, expected = plain(case, spec, num_blocks, 16, rotary)
    run = Streamed(launcher("cpu"), case, spec, num_blocks, 16, extra=5, min_share=4, tiles=tiles)
    outs, order = [], ctypes.c_int.in_dll(streamed_library, "order")
    for order.value in (1, 2, 0):
        outs.append(run(rotary))
    assert 4 * int(run.schedule.words[0, 0]) > EMULATED_BLOCKS * tiles.warps
    alive = case.step.lane_lengths > 0
    assert_near(outs[0][alive], expected[alive])
    assert torch.equal(outs[1], outs[0])
    assert torch.equal(outs[2], outs[0])


@emulated
def test_a_schedule_without_a_line_to_spare(launcher):
    """As many shares as there may be, of lanes of 60 units and 20; the last of them is taken, too."""
    spec = LayerSpec(2, 2, 64, 64**-0.5)
    options = {"chunks": [], "block_size": 16, "dtype": torch.bfloat16}
    case, num_blocks = make_case(spec, lengths=[60 * UNIT, 20 * UNIT], **options)
    _, _, expected = plain(case, spec, num_blocks, 16, None)
    run = Streamed(launcher("cpu"), case, spec, num_blocks, 16, extra=2)
    out = run(None)
    assert int(run.schedule.words[0, 0]) == 4 == len(run.schedule.words) - 1
    assert_near(out, expected)


@emulated
def test_steps_of_any_number_of_lanes_share_a_workspace(launcher, monkeypatch):
    """One after the other, with each number of warps and more lanes than shares at once; layers of two kinds."""
    attend, device = launcher("cpu"), torch.device("cpu")
    monkeypatch.setattr(triton_backend, "_device_facts", lambda _: ((9, 0), EMULATED_BLOCKS))
    monkeypatch.setattr(triton_backend, "_streamed_for", lambda *_: attend)
    specs = [LayerSpec(4, 2, 128, 128**-0.5), LayerSpec(6, 3, 64, 64**-0.5, 40)]
    fused = triton_backend.TritonAttention(specs, 200, 16, torch.bfloat16, device, max_lanes=20)
    assert {(kind.window, kind.tiles) for kind in fused._schedules} == set(product((0, 40), TILES))
    fused._workspace.partial.fill_(NAN)
    fused._workspace.log_sum.fill_(NAN)
    for lanes in (4, 8, 12, 20, 8, 1):
        lengths = [(37 * i * i) % 90 for i in range(lanes - 1)] + [400]
        for layer, spec in enumerate(specs):
            options = {"chunks": [], "block_size": 16, "dtype": torch.bfloat16}
            case, num_blocks = make_case(spec, lengths=lengths, **options)
            _, _, expected = plain(case, spec, num_blocks, 16, None)
            case.fill(fused, layer)
            out, alive = fused.forward(layer, case.q, case.k, case.v, case.step), case.step.lane_lengths > 0
            assert_near(out[alive], expected[alive])
            assert not out[~alive].any()
            assert not fused._workspace.arrivals.any()
            assert not fused._workspace.tickets.any()


def test_uneven_lanes_of_a_step_get_two_shares_a_warp(launcher, monkeypatch):
    """Two long lanes among short ones, nearly as many as the eight shares of a kv head that run at once."""
    attend, device = launcher("cpu"), torch.device("cpu")
    monkeypatch.setattr(triton_backend, "_device_facts", lambda _: ((9, 0), EMULATED_BLOCKS))
    monkeypatch.setattr(triton_backend, "_streamed_for", lambda *_: attend)
    spec = LayerSpec(2, 2, 128, 0.1)
    lengths = [120 * UNIT + 1] * 2 + [25 * UNIT + 1] * 4
    backend = triton_backend.TritonAttention([spec], 200, 16, torch.bfloat16, device, max_lanes=6)
    case, _ = make_case(spec, lengths=lengths, chunks=[], block_size=16, dtype=torch.bfloat16)
    backend._start(case.step)
    ((kind, schedule),) = backend._schedules.items()
    assert kind.extra == 8
    assert 8 < int(schedule.words[0, 0]) <= 16


SHAPES = [(32, 8, 128), (32, 8, 64), (5, 5, 64), (48, 3, 64), (7, 1, 128), (12, 2, 80), (64, 64, 256)]
SPECS = [LayerSpec(*shape, 0.1, window) for shape, window in zip(SHAPES, cycle((0, 4096)))]
LAYERS = {str(spec[:3]): [spec] for spec in SPECS} | {"two sizes of heads": SPECS[:2], "all": SPECS}


@pytest.mark.parametrize(("processors", "most"), [(1, 300), (132, 300), (132, 1)])
@pytest.mark.parametrize("specs", LAYERS.values(), ids=LAYERS)
def test_there_is_room_for_every_step(monkeypatch, processors, most, specs):
    """Of layers that share nothing but the workspace, some of them without such a kernel."""
    streamed = object()
    monkeypatch.setattr(triton_backend, "_device_facts", lambda _: ((9, 0), processors))
    monkeypatch.setattr(triton_backend, "_streamed_for", lambda *_: streamed)
    backend = triton_backend.TritonAttention(specs, 2, 16, torch.bfloat16, torch.device("cpu"), max_lanes=most)
    for spec, lanes in product(specs, range(1, most + 1)):
        kind = backend._kind(spec, lanes)
        schedule, results = backend._schedules[kind], 2 * kind.extra * spec.heads
        assert len(schedule.words) > max(lanes + kind.extra, kind.tiles.rounds * kind.extra)
        assert kind.attend is streamed or kind.tiles.rounds == 1, "the kernel in Triton takes one record a program"
        assert min(len(backend._workspace.log_sum), len(backend._workspace.arrivals)) >= results
        assert len(backend._workspace.partial) >= results * spec.head_dim


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize(("lanes", "longest"), [(20, 1_900), (300, 300)])
@pytest.mark.parametrize("tiles", TILES, ids=WARPS)
def test_every_share_is_taken_and_every_run_the_same(launcher, lanes, longest, tiles):
    """More shares than warps, and rings that are used again many times."""
    spec = LayerSpec(32, 8, 128, 128**-0.5)
    lengths = [(37 * i * i) % longest for i in range(lanes)]
    options = {"chunks": [], "block_size": 16, "dtype": torch.bfloat16, "device": "cuda", "seed": 1}
    case, num_blocks = make_case(spec, lengths=lengths, **options)
    rotary = random_rotary(lanes, 128, (False, False), "cuda")
    _, _, expected = plain(case, spec, num_blocks, 16, rotary)
    run = Streamed(launcher("cuda"), case, spec, num_blocks, 16, extra=132, min_share=4, tiles=tiles)
    first, alive = run(rotary), case.step.lane_lengths > 0
    assert_near(first[alive], expected[alive])
    for _ in range(200):
        assert torch.equal(run(rotary), first)
