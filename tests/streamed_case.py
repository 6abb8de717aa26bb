"""Attention of decode lanes by the kernel in CUDA C++, by emulated warps without a GPU; and by the plain backend.

The cache is full of NaN wherever a sequence has nothing of its own, so a read too far shows.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from twostroke.attention.torch_backend import TorchAttention
from twostroke.kernels import ops, streamed_decode
from twostroke.kernels.ops import Rotary
from twostroke.kernels.streamed_decode import TILES, UNIT

pytest.importorskip("triton")

from twostroke.kernels.decode_schedule import DecodeSchedule, make_schedule
from twostroke.kernels.paged_decode import DecodeWorkspace

NAN = float("nan")
EMULATED_BLOCKS = 2


def emulate(library, monkeypatch):
    """Let the warps of kernels launched from now on be those of `library`, on few multiprocessors."""
    monkeypatch.setattr(streamed_decode, "load_library", lambda *_: library)
    processors = SimpleNamespace(multi_processor_count=EMULATED_BLOCKS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: processors)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))


def random_rotary(tokens, head_dim, norms, where):
    inv_freq = 10_000.0 ** (-torch.arange(head_dim // 2, device=where) / (head_dim // 2))
    tables = ops.rotary_tables(torch.randint(0, 4_000, (tokens,), device=where), inv_freq, 1.0)
    weights = [1 + torch.randn(head_dim, device=where).bfloat16() / 8 if norm else None for norm in norms]
    return Rotary(*tables, *weights, 0.5)


def in_float32(rotary):
    q_norm, k_norm = (None if norm is None else norm.float() for norm in (rotary.q_norm, rotary.k_norm))
    return rotary._replace(q_norm=q_norm, k_norm=k_norm)


def plain(case, spec, num_blocks, block_size, rotary):
    """Return (keys, values, output) of the plain backend, in float32."""
    attention = TorchAttention([spec], num_blocks, block_size, torch.float32, case.q.device)
    case.fill(attention)
    q, k, v = (x.float() for x in (case.q, case.k, case.v))
    if rotary is None:
        out = attention.forward(0, q, k, v, case.step)
    else:
        out = attention.forward_rotary(0, q, k, v, in_float32(rotary), case.step)
    return attention.keys[0], attention.values[0], out


def assert_near(out, expected):
    """By the norms of each lane's heads: a position of a long lane adds less than single numbers are rounded by."""
    errors, norms = (x.double().norm(dim=2) for x in (out - expected, expected))
    assert (errors <= 2e-2 * norms).all(), f"off by {(errors / norms).max():.1%}"


class Streamed:
    """Runs the kernel on a case, the first time on a cache that lacks the newest positions."""

    def __init__(self, attend, case, spec, num_blocks, block_size, *, extra, min_share=1, tiles=TILES[-1]):
        device = case.q.device
        self.attend, self.case, self.spec = attend, case, spec
        self.cache = TorchAttention([spec], num_blocks, block_size, torch.bfloat16, device)
        self.tiles = tiles._replace(min_share=min_share)
        self.workspace = DecodeWorkspace.zeros(2 * extra * spec.heads, spec.head_dim, device)
        self.workspace.partial.fill_(NAN)
        self.workspace.log_sum.fill_(NAN)
        self.schedule = DecodeSchedule.empty(case.step.num_lanes, extra, device)
        case.fill(self.cache)

    def __call__(self, rotary):
        case, spec, step = self.case, self.spec, self.case.step
        cut = {"window": spec.window, "tile": UNIT, "min_share": self.tiles.min_share, "rounds": self.tiles.rounds}
        make_schedule(self.schedule, step.lane_rows, step.lane_lengths, **cut)
        out = torch.full(case.q.shape, NAN, device=case.q.device, dtype=torch.bfloat16)
        self.attend(
            case.q, case.k, case.v, rotary, self.cache.keys[0], self.cache.values[0],
            step.block_tables[spec.group], step.cache_slots[spec.group], self.schedule, out, self.workspace,
            scale=spec.scale, tiles=self.tiles,
        )  # fmt: skip
        assert not self.workspace.arrivals.any()
        assert not self.workspace.tickets.any()
        return out
