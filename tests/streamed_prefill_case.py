"""Steps whose prompt chunks the kernel in CUDA C++ attends to: on a GPU, and by emulated blocks.

The cache is full of NaN wherever a sequence has nothing of its own, and so is the output before.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch
from emulation import emulated

from twostroke.attention.torch_backend import TorchAttention
from twostroke.kernels import streamed_prefill
from twostroke.kernels.streamed_prefill import tile_tokens

pytest.importorskip("triton")

from twostroke.kernels.prefill_schedule import make_prefill_schedule

NAN = float("nan")
EMULATED_BLOCKS = 2
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)
WHERE = [pytest.param("cpu", marks=emulated), pytest.param("cuda", marks=[pytest.mark.gpu, hopper])]
SHAPES = [
    # kv_heads, group, head_dim, block_size
    (2, 1, 64, 16),
    (1, 3, 64, 48),
    (2, 2, 128, 16),
    (1, 4, 128, 32),
    (1, 7, 128, 64),
    (1, 16, 64, 256),
]


def emulate(library, monkeypatch, seed, blocks):
    """Let what is launched run on the CPU, in the order that a seed gives."""
    ctypes.c_int.in_dll(library, "seed").value = seed
    monkeypatch.setattr(streamed_prefill, "load_library", lambda *_: library)
    processors = SimpleNamespace(multi_processor_count=blocks)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: processors)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))


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
