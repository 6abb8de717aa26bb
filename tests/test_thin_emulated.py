"""Chains of thin products by emulated blocks: all warps of all clusters, in orders and at speeds that a seed gives.

What is not there yet is NaN: shared memory, outputs, the place that something is under way to, and inputs as long as
the kernel ahead runs. So what is read too early shows, and what is given back too early.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from emulation import compiled, emulated
from thin_library import CPU, on_the_cpu
from thin_products import EPS, Products, check

import twostroke.kernels.thin_linear as thin_linear
from twostroke.kernels.thin_linear import Scaled, ThinLinears

pytestmark = emulated


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    sources = ["thin_linear.cuh", "product_chain.cuh", "chain_finisher.cuh"]
    return compiled(tmp_path_factory.mktemp("emulated"), "chain/thin_linear.cpp", sources)


@pytest.fixture
def emulation(library, monkeypatch):
    """Sets the variables of the emulation: how many `clusters` run at once, the `seed`."""
    on_the_cpu(monkeypatch, library)
    return lambda name, value: setattr(ctypes.c_int.in_dll(library, name), "value", value)


@pytest.mark.parametrize("way", ["waiting", "in chains"])
@pytest.mark.parametrize(
    ("clusters", "tokens", "hidden", "rows", "tile"),
    [
        (1, 1, 256, 528, 64),
        (2, 7, 264, 560, 48),
        (3, 32, 392, 528, 32),
        (2, 33, 520, 656, 64),
        (3, 64, 328, 592, 48),
        (5, 7, 256, 800, 64),  # more than a product of 256 rows has tiles
    ],
)
def test_products_are_right_and_the_same_in_every_order(
    emulation, monkeypatch, clusters, tokens, hidden, rows, tile, way
):
    """Rows that do not divide into tiles, k that does not divide into slices, or not into as many for each block."""
    monkeypatch.setattr(thin_linear, "TILES", (tile,))
    emulation("clusters", clusters)
    torch.manual_seed(tokens)
    products = Products(tokens, hidden, rows, CPU)
    first = None
    for seed in range(4):
        emulation("seed", seed)
        if way == "in chains":
            products.linears.begin()
        made = products.run()
        if first is None:
            first = made
            check(first, products)
        assert all(torch.equal(a, b) for a, b in zip(first, made, strict=True)), seed


def test_who_waits_for_ever_is_named(emulation, capfd):
    """A product whose input nobody announces: two of its parts are this block's."""
    emulation("clusters", 2)
    linears = ThinLinears(CPU, EPS)
    first, second = (linears.scaling(torch.zeros(256, 256, dtype=torch.bfloat16)) for _ in range(2))
    linears.begin()
    announced = linears._announced(first)
    with pytest.raises(RuntimeError, match="launch failed"):
        linears.scaled(Scaled(*torch.zeros(2, 7, 256, dtype=torch.bfloat16), None, announced), second)
    said = capfd.readouterr().err
    assert "block 3 warp 9 waits for an announcement (2 threads)" in said
    assert "block 0 warp 0 waits for the barrier full 0 (32 threads)" in said
    assert said.endswith("nobody can go on\n")
