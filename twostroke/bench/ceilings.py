"""What the machine can do at best: the bandwidth of reading, and the rate of matrix products."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .timing import seconds_each

READ_BYTES = 4 << 30
PRODUCT_SIZE = 8192
REPETITIONS = 20


class ReadCut(NamedTuple):
    """How a read is cut: programs on a multiprocessor, int32 elements that a program reads in a turn, and whether the
    second-level cache is told to give up first what was read.
    """

    programs: int
    block: int
    evict_first: bool


READ_CUTS = [ReadCut(*cut) for cut in product((4, 8, 32), (2048, 4096), (False, True))]


@dataclass(frozen=True)
class Ceilings:
    """Attributes:
    read_bytes_per_s: of device memory, best of several passes over 4 GiB in each of `READ_CUTS`.
    flop_per_s: of a bf16 product of two random 8192 x 8192 matrices, best of several.
    """

    read_bytes_per_s: float
    flop_per_s: float


@triton.jit
def _read(source, sums, elements, stride, BLOCK: tl.constexpr, EVICTION: tl.constexpr):
    total = tl.zeros([BLOCK], tl.int32)
    for first in range(tl.program_id(0) * BLOCK, elements, stride):
        total += tl.load(source + first + tl.arange(0, BLOCK), eviction_policy=EVICTION)
    tl.store(sums + tl.program_id(0), tl.sum(total))


def read_all(source: torch.Tensor, sums: torch.Tensor, cut: ReadCut) -> None:
    """Read `source`, int32 and a multiple of `cut.block` elements, by as many programs as `sums`, int32, has places.

    Each program writes the sum of what it read, so that nothing can be left out.
    """
    eviction = "evict_first" if cut.evict_first else ""
    stride = len(sums) * cut.block
    _read[(len(sums),)](
        source, sums, len(source), stride, BLOCK=cut.block, EVICTION=eviction, num_warps=cut.block // 512
    )


def measure_ceilings() -> Ceilings:
    """Read both ceilings of the current CUDA device; one to two seconds, most of them to compile.

    No single way to read is the fastest on each day and in each process: one cut gave 3.9 to 4.3 TB/s on an H200. So
    memory is read in several cuts, `READ_CUTS`, and the best pass of all is the ceiling.
    """
    processors = torch.cuda.get_device_properties().multi_processor_count
    source = torch.randint(0, 100, (READ_BYTES // 4,), dtype=torch.int32, device="cuda")
    sums = torch.empty(processors * max(cut.programs for cut in READ_CUTS), dtype=torch.int32, device="cuda")
    read = min(
        min(seconds_each(partial(read_all, source, sums[: processors * cut.programs], cut), REPETITIONS))
        for cut in READ_CUTS
    )
    a, b = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    multiplied = min(seconds_each(lambda: a @ b, REPETITIONS))
    return Ceilings(READ_BYTES / read, 2 * PRODUCT_SIZE**3 / multiplied)
