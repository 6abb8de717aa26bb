"""Memory of the device that is given back for a while."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ..errors import NotEnoughMemory
from .memory import free_bytes
from .streams import Device


class Cache(Protocol):
    """See `attention.interface.Attention`."""

    @property
    def nbytes(self) -> int: ...
    def allocate(self) -> None: ...
    def free(self) -> None: ...


class PutAway:
    """Weights in host memory. Their tensors stay the objects that they are; only the memory behind them goes and comes.

    On the CPU weights stay where they are: they are in host memory already.

    Raises:
        NotEnoughMemory: the host has no room for them; nothing was changed.
    """

    def __init__(self, device: Device, tensors: Sequence[torch.Tensor]) -> None:
        self._device = device.torch_device
        by_address = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        self._storages = list(by_address.values()) if self._device.type != "cpu" else []
        self._sizes = [storage.nbytes() for storage in self._storages]
        try:
            self._copies = [torch.UntypedStorage(storage.nbytes()).copy_(storage) for storage in self._storages]
        except RuntimeError as error:  # torch's, where memory does not reach
            raise NotEnoughMemory(f"the host has no room for {sum(self._sizes)} bytes of weights: {error}") from error

    def free(self) -> None:
        """Give the device's memory back."""
        for storage in self._storages:
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def bring_back(self, cache: Cache) -> None:
        """Allocate the weights and the cache again, at whatever addresses, and fill the weights.

        Raises:
            NotEnoughMemory: the memory is gone; all is as before the call, which may be tried again.
        """
        needed, room = sum(self._sizes) + cache.nbytes, free_bytes(self._device)
        if needed > room:
            raise NotEnoughMemory(f"weights and cache need {needed} bytes, {room} are free")
        try:
            cache.allocate()
            for storage, size, copy in zip(self._storages, self._sizes, self._copies, strict=True):
                storage.resize_(size)
                storage.copy_(copy)
        except RuntimeError as error:  # somebody was faster, or it lies in pieces
            cache.free()
            self.free()
            raise NotEnoughMemory(f"weights and cache need {needed} bytes, which could not be had: {error}") from error
