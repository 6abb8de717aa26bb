"""From a device's name to a device."""

from __future__ import annotations

import torch

from ..errors import InvalidConfig
from .cpu import CpuDevice
from .streams import Device


def make_device(device: str | Device) -> Device:
    """Return the device of a name such as `auto`, `cpu` or `cuda:1`; one that is made already is returned as it is.

    Raises:
        InvalidConfig: there is no such device here.
    """
    if isinstance(device, Device):
        return device
    name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if not isinstance(name, str | torch.device):
        raise InvalidConfig(f"device={device!r} must be a name such as 'cpu' or 'cuda:0'")
    try:
        wanted = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise InvalidConfig(f"device={device!r} must be 'auto', 'cpu', 'cuda', or 'cuda:' and a number") from error
    if wanted.type == "cpu":
        return CpuDevice()
    if wanted.type != "cuda" or not torch.cuda.is_available():
        raise InvalidConfig(f"device={device!r} is not available here")
    from .cuda import CudaDevice

    return CudaDevice(wanted)
