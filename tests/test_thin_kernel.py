"""Linear layers for few tokens on a GPU: right, the same in every run, and never waiting for each other for ever."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch
from thin_library import forget_others
from thin_products import EPS, Products, check

import twostroke.kernels.thin_linear as thin_linear
from twostroke.kernels.thin_linear import ThinLinears

GPU = torch.device("cuda")
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs the CUDA compiler")
def test_the_source_compiles(tmp_path):
    source = Path(thin_linear.__file__).with_suffix(".cu")
    command = [
        "nvcc",
        "-std=c++17",
        "-gencode",
        "arch=compute_90a,code=sm_90a",
        "-cubin",
        "-o",
        tmp_path / "thin",
        source,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("way", ["waiting", "told", "in chains"])
@pytest.mark.parametrize(("hidden", "rows"), [(1024, 4096), (1000, 1184), (4096, 6144)])
@pytest.mark.parametrize("tokens", [1, 7, 32, 33, 64])
def test_products_are_right_and_the_same_in_every_run(tokens, hidden, rows, way, monkeypatch):
    """Shapes that do not divide into tiles or slices too. Without chains where another one makes them."""
    forget_others(monkeypatch)
    other = ThinLinears(GPU, EPS) if way == "told" else None
    torch.manual_seed(tokens)
    products = Products(tokens, hidden, rows, GPU)
    assert products.linears.chains == (other is None)
    begin = (lambda: None) if way == "waiting" else products.linears.begin
    begin()
    first = [made.clone() for made in products.run()]
    check(first, products)
    for _ in range(50):
        begin()
        made = products.run()
        assert all(torch.equal(a, b) for a, b in zip(first, made, strict=True))
        for tensor in made:
            tensor.fill_(float("nan"))  # the next run finds them so: what it reads too early shows


class Engine:
    """Steps of products, eight in a graph, on a stream of their own.

    Attributes:
        first: what the first step made. different: how many results of later ones were not the same.
    """

    def __init__(self, products):
        self.products, self.stream = products, torch.cuda.Stream()
        self.different = torch.zeros((), dtype=torch.int64, device="cuda")
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.first = [made.clone() for made in self._step()]
            self._compare(self._step())  # what runs for the first time may not be captured
        self.stream.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            for made in [self._step() for _ in range(8)]:
                self._compare(made)

    def replay(self):
        with torch.cuda.stream(self.stream):
            self.graph.replay()

    def _step(self):
        self.products.linears.begin()
        return self.products.run()

    def _compare(self, made):
        for tensor, first in zip(made, self.first, strict=True):
            self.different += (tensor != first).any()
            tensor.fill_(float("nan"))


def wait_for(engines, seconds=60.0):
    """End the tests if the device does not get there: whatever is queued behind would wait, too."""
    deadline = time.monotonic() + seconds
    while not all(engine.stream.query() for engine in engines):
        if time.monotonic() > deadline:
            pytest.exit("two kernels wait for each other's blocks", returncode=1)
        time.sleep(0.001)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("tokens", [(7, 64), (64, 7), (32, 32)])
def test_two_of_one_device_run_at_once_to_the_end(tokens, monkeypatch):
    forget_others(monkeypatch)
    torch.manual_seed(0)
    engines = [Engine(Products(count, 4096, 6144, GPU)) for count in tokens]
    assert [engine.products.linears.chains for engine in engines] == [True, False]
    for _ in range(15):
        for _ in range(20):
            for engine in engines:
                engine.replay()
        wait_for(engines)
    for engine in engines:
        check(engine.first, engine.products)
        assert int(engine.different) == 0
