"""What the machine can do at best: the bandwidth of reading, and the rate of matrix products."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .timing import seconds_each

READ_BYTES = 4 << 30
PRODUCT_SIZE = 8192
REPETITIONS = 20


@dataclass(frozen=True)
class Ceilings:
    """Attributes:
    read_bytes_per_s: of device memory, best of several passes over 4 GiB.
    flop_per_s: of a bf16 product of two random 8192 x 8192 matrices, best of several.
    """

    read_bytes_per_s: float
    flop_per_s: float


@triton.jit
def _read(source, sums, elements, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.int32)
    for first in range(tl.program_id(0) * BLOCK, elements, PROGRAMS * BLOCK):
        total += tl.load(source + first + tl.arange(0, BLOCK))
    tl.store(sums + tl.program_id(0), tl.sum(total))


def measure_ceilings() -> Ceilings:
    """Read both ceilings of the current CUDA device; about a second."""
    programs = torch.cuda.get_device_properties().multi_processor_count * 8
    elements = READ_BYTES // 4
    source = torch.randint(0, 100, (elements,), dtype=torch.int32, device="cuda")
    sums = torch.empty(programs, dtype=torch.int32, device="cuda")
    grid, cut = (programs,), {"PROGRAMS": programs, "BLOCK": 4096, "num_warps": 8}
    read = min(seconds_each(lambda: _read[grid](source, sums, elements, **cut), REPETITIONS))
    a, b = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = min(seconds_each(lambda: a @ b, REPETITIONS))
    return Ceilings(READ_BYTES / read, 2 * PRODUCT_SIZE**3 / product)
