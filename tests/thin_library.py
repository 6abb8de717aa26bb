"""A stand-in for the compiled source of thin products, where there is no GPU."""

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace
from weakref import WeakValueDictionary

import torch

import twostroke.kernels.thin_linear as thin_linear
from twostroke.kernels.announced import Announcements

CPU = torch.device("cpu")


class StandIn:
    """The functions of the compiled source; a described matrix is its address. Keeps what was launched.

    Attributes:
        chains: the products of each launch. clusters: of each launch.
        code: what a launch returns, 0 if it succeeds.
    """

    def __init__(self):
        self.chains, self.clusters, self.code = [], [], 0

    def chain_bytes(self):
        return ctypes.sizeof(thin_linear._Chain)

    def clusters_at_once(self):
        return 66

    def describe_matrix(self, place, pointer, *_):
        ctypes.c_uint64.from_address(place.value).value = pointer.value
        return 0

    def launch_chain(self, given, clusters, _):
        if self.code == 0:
            chain = thin_linear._Chain.from_buffer_copy(given._obj)
            self.chains.append(list(chain.products[: chain.count]))
            self.clusters.append(clusters)
        return self.code

    @property
    def launched(self):
        return [product for chain in self.chains for product in chain]

    @property
    def lengths(self):
        return [len(chain) for chain in self.chains]

    def read(self):
        """Where launched products found weight and input."""
        fields = (thin_linear._Product.w, thin_linear._Product.x)
        return [
            [ctypes.c_uint64.from_address(ctypes.addressof(product) + field.offset).value for field in fields]
            for product in self.launched
        ]


def forget_others(monkeypatch):
    """Thin linears that earlier tests left do not count among those that live."""
    monkeypatch.setattr(thin_linear.ThinLinears, "_chaining", WeakValueDictionary())


def on_the_cpu(monkeypatch, library):
    """Have thin products use a library that needs no GPU."""
    forget_others(monkeypatch)
    monkeypatch.setattr(thin_linear, "load_library", lambda *_: library)
    monkeypatch.setattr(thin_linear, "Announcements", lambda parts, _: Announcements(parts, CPU))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))


def stand_in(monkeypatch):
    """Have thin products use a stand-in; return it."""
    made = StandIn()
    on_the_cpu(monkeypatch, made)
    return made
