"""The attention of decode lanes in CUDA C++, against the plain backend in float32.

The cache is full of NaN wherever a sequence has nothing of its own, so a read too far shows.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from paged_case import make_case

from twostroke.attention.interface import LayerSpec
from twostroke.attention.torch_backend import TorchAttention
from twostroke.kernels import ops, streamed_decode
from twostroke.kernels.ops import Rotary
from twostroke.kernels.streamed_decode import UNIT, StreamedDecode, streamed_tiles

pytest.importorskip("triton")

from twostroke.kernels.decode_schedule import DecodeSchedule, make_schedule
from twostroke.kernels.paged_decode import DecodeWorkspace

NAN = float("nan")
CUDA = torch.device("cuda")
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)


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


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs the CUDA compiler")
def test_the_source_compiles(tmp_path):
    source = Path(streamed_decode.__file__).with_suffix(".cu")
    architecture = "arch=compute_90a,code=sm_90a"
    command = ["nvcc", "-std=c++17", "-gencode", architecture, "-cubin", "-o", tmp_path / "streamed", source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr


def random_rotary(tokens, head_dim, norms):
    inv_freq = 10_000.0 ** (-torch.arange(head_dim // 2, device=CUDA) / (head_dim // 2))
    tables = ops.rotary_tables(torch.randint(0, 4_000, (tokens,), device=CUDA), inv_freq, 1.0)
    weights = [1 + torch.randn(head_dim, device=CUDA).bfloat16() / 8 if norm else None for norm in norms]
    return Rotary(*tables, *weights, 1e-5)


def in_float32(rotary):
    q_norm, k_norm = (None if norm is None else norm.float() for norm in (rotary.q_norm, rotary.k_norm))
    return rotary._replace(q_norm=q_norm, k_norm=k_norm)


def plain(case, spec, num_blocks, block_size, rotary):
    """Return (keys, values, output) of the plain backend, in float32."""
    attention = TorchAttention([spec], num_blocks, block_size, torch.float32, CUDA)
    case.fill(attention)
    q, k, v = (x.float() for x in (case.q, case.k, case.v))
    if rotary is None:
        out = attention.forward(0, q, k, v, case.step)
    else:
        out = attention.forward_rotary(0, q, k, v, in_float32(rotary), case.step)
    return attention.keys[0], attention.values[0], out


class Streamed:
    """Runs the kernel on a case, the first time on a cache that lacks the newest positions."""

    def __init__(self, case, spec, num_blocks, block_size, *, stages, extra, min_share=1):
        self.case, self.spec = case, spec
        self.cache = TorchAttention([spec], num_blocks, block_size, torch.bfloat16, CUDA)
        self.tiles = streamed_tiles(crowded=False)._replace(stages=stages, min_share=min_share)
        self.workspace = DecodeWorkspace.zeros(2 * extra * spec.heads, spec.head_dim, CUDA)
        self.workspace.partial.fill_(NAN)
        self.workspace.log_sum.fill_(NAN)
        self.schedule = DecodeSchedule.empty(case.step.num_lanes, extra, CUDA)
        self.attend = StreamedDecode(CUDA)
        case.fill(self.cache)

    def __call__(self, rotary):
        case, spec, step = self.case, self.spec, self.case.step
        cut = {"window": spec.window, "tile": UNIT, "min_share": self.tiles.min_share}
        make_schedule(self.schedule, step.lane_rows, step.lane_lengths, **cut)
        out = torch.full(case.q.shape, NAN, device=CUDA, dtype=torch.bfloat16)
        self.attend(
            case.q, case.k, case.v, rotary, self.cache.keys[0], self.cache.values[0],
            step.block_tables[spec.group], step.cache_slots[spec.group], self.schedule, out, self.workspace,
            scale=spec.scale, tiles=self.tiles,
        )  # fmt: skip
        assert not self.workspace.arrivals.any()
        assert not self.workspace.tickets.any()
        return out


LENGTHS = [1, UNIT, UNIT + 1, 0, UNIT + 2, 2 * UNIT + 1, 0, 150, 700, 33, 2]


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("stages", [3, 6])
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "block_size", "window"),
    [(2, 1, 64, 16, 5), (3, 3, 64, 32, 0), (2, 4, 128, 16, 0), (8, 2, 128, 64, 40), (1, 8, 128, 16, 1)],
)
@pytest.mark.parametrize("norms", [None, (False, False), (True, True), (False, True)])
def test_equals_rotating_writing_and_attending(stages, kv_heads, group, head_dim, block_size, window, norms):
    """F09, F10 among it: dead lanes write nothing and come out as zeros, whatever lies in the cache."""
    torch.manual_seed(0)
    spec = LayerSpec(kv_heads * group, kv_heads, head_dim, head_dim**-0.5, window, group=1)
    options = {"lengths": LENGTHS, "chunks": [], "block_size": block_size, "dtype": torch.bfloat16}
    case, num_blocks = make_case(spec, device="cuda", **options)
    rotary = None if norms is None else random_rotary(len(LENGTHS), head_dim, norms)
    keys, values, expected = plain(case, spec, num_blocks, block_size, rotary)
    inputs = [x.clone() for x in (case.q, case.k, case.v)]
    run = Streamed(case, spec, num_blocks, block_size, stages=stages, extra=9)
    first = run(rotary)
    torch.testing.assert_close(run.cache.keys[0][1:].float(), keys[1:], rtol=2e-2, atol=2e-2, equal_nan=True)
    torch.testing.assert_close(run.cache.values[0][1:].float(), values[1:], rtol=0, atol=0, equal_nan=True)
    assert run.cache.keys[0][0].isnan().all()
    dead = case.step.lane_lengths == 0
    assert torch.equal(first[dead], torch.zeros_like(first[dead]))
    torch.testing.assert_close(first[~dead].float(), expected[~dead], rtol=2e-2, atol=2e-2)
    assert all(torch.equal(x, before) for x, before in zip((case.q, case.k, case.v), inputs, strict=True))
    for _ in range(20):
        assert torch.equal(run(rotary), first)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize(("stages", "lanes", "longest"), [(3, 20, 1_900), (6, 20, 1_900), (6, 300, 300)])
def test_every_share_is_taken_and_every_run_the_same(stages, lanes, longest):
    """More shares than warps, and rings that are used again many times."""
    spec = LayerSpec(32, 8, 128, 128**-0.5)
    lengths = [(37 * i * i) % longest for i in range(lanes)]
    case, num_blocks = make_case(
        spec, lengths=lengths, chunks=[], block_size=16, dtype=torch.bfloat16, device="cuda", seed=1
    )
    rotary = random_rotary(lanes, 128, (False, False))
    _, _, expected = plain(case, spec, num_blocks, 16, rotary)
    run = Streamed(case, spec, num_blocks, 16, stages=stages, extra=66, min_share=4)
    first, alive = run(rotary), case.step.lane_lengths > 0
    torch.testing.assert_close(first[alive].float(), expected[alive], rtol=2e-2, atol=2e-2)
    for _ in range(200):
        assert torch.equal(run(rotary), first)
