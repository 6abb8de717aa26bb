"""How much memory the cache may take."""

from __future__ import annotations

import torch

CUDA_SHARE = 0.92
"""Share of the GPU's free memory that the cache may take, before what steps and graphs need."""

HOST_SHARE = 0.25
"""Share of the host's available memory that the cache may take: the machine has other work too."""

_FALLBACK_HOST_BYTES = 4 << 30


def free_bytes(device: torch.device) -> int:
    """Return the bytes that nobody has."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return host_free_bytes()


def available_bytes(device: torch.device) -> int:
    """Return the bytes that a cache on `device` may take if nobody says how many."""
    return int((CUDA_SHARE if device.type == "cuda" else HOST_SHARE) * free_bytes(device))


def used_bytes(device: torch.device) -> int:
    """Return the device memory in use, graphs and libraries included; 0 on the CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def host_free_bytes() -> int:
    """Return MemAvailable of the kernel, in bytes; a fixed 4 GiB where the system does not say."""
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return _FALLBACK_HOST_BYTES
