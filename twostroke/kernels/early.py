"""Programmatic dependent launch: kernels that start while the one ahead of them ends, so that launches take no time.

All such kernels, those in CUDA C++ too, keep to one rule: a kernel writes, and lets the next one start, only behind its
own wait, and never ends before a block of it has waited. So when a kernel starts, all but the one right ahead are done.
Before its wait it reads at most what is older than that one.

Behind a kernel that never lets the next one start (PyTorch's, a library's) it starts at that one's end, and a kernel
that is launched without the option starts when the one ahead has ended, as ever.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

CAPABILITY = (9, 0)
"""From which on devices can do that."""


@triton.jit
def wait_for_kernel_ahead(PDL: tl.constexpr):
    """Wait until all that the kernels ahead wrote is there, then let the next one start."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@cache
def early(device: torch.device) -> dict[str, bool]:
    """Return the arguments of a launch on `device` that may be early: the kernel's PDL, and the launch's own option."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY
    # NOTE: Triton's interpreter does not know the option.
    return {"PDL": True, "launch_pdl": True} if able else {"PDL": False}
