"""Decode steps of some dozens of tokens and more: their products, interpreted without a GPU and compiled with one."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")

import twostroke.kernels.medium_linear as medium_linear
from twostroke.kernels.announced import Written
from twostroke.kernels.medium_linear import MAX_BYTES, MediumLinears, MediumTiles, MediumWeight, medium_tiles
from twostroke.kernels.thin_linear import Epilogue, Scaled

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

EPS = 1e-3
NAN = float("nan")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter")
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs compute capability 9.0"
)


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """Fresh memory is full of NaN, so that what a kernel forgets to write is seen."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(NAN))


class Products:
    """Random weights of a layer, its products, and what they must give."""

    def __init__(self, linears, tokens, hidden, inner, make):
        self.linears = linears
        self.h, self.norm, self.wide = make(tokens, hidden), make(hidden), make(tokens, inner)
        self.out, self.into = make(hidden, inner) / inner**0.5, make(2 * inner, hidden) / hidden**0.5
        self.bias = make(2 * inner)

    def run(self):
        linears = self.linears
        x = linears.residual(Written(self.wide), linears.adding(self.out), self.h, self.norm)
        first = Scaled(x.residual, x.values, None)
        return (
            *x[:3],
            linears.scaled(first, linears.scaling(self.into)),
            linears.scaled(x, linears.scaling(self.into)),
            linears.scaled(x, linears.scaling(self.into, self.bias)),
            linears.gated(x, linears.gating(self.into)).values,
        )

    def wanted(self):
        """In float64; the squares are those of all parts."""
        h, norm, wide, out, into, bias = (
            tensor.double() for tensor in (self.h, self.norm, self.wide, self.out, self.into, self.bias)
        )
        total = h + wide @ out.T
        inverse = torch.rsqrt(total.square().mean(1, keepdim=True) + EPS)
        plain = (total * norm) @ into.T
        gate, up = (plain * inverse).chunk(2, 1)
        return (
            *(total, total * norm, total.square().sum(1)),
            *(plain, plain * inverse, plain * inverse + bias, functional.silu(gate) * up),
        )


def compared(got, wanted):
    return [(a.sum(0) if place == 2 else a, b) for place, (a, b) in enumerate(zip(got, wanted, strict=True))]


@on_cpu
@pytest.mark.parametrize(("tokens", "hidden", "inner"), [(5, 32, 48), (33, 40, 72)])
def test_products(tokens, hidden, inner):
    """Sizes that do not divide into tiles, too."""
    torch.manual_seed(0)
    tiles = MediumTiles(16, 16, 32, warps=4, stages=2)
    products = Products(MediumLinears(torch.device("cpu"), EPS, lambda *_: tiles), tokens, hidden, inner, torch.randn)
    for got, wanted in compared(products.run(), products.wanted()):
        torch.testing.assert_close(got, wanted.float(), rtol=1e-4, atol=1e-4)


@on_cpu
def test_a_weight_too_large_to_pay_is_left_to_the_library(monkeypatch):
    """An output head. The library's product takes the norm's result, where a medium one scales behind itself."""
    torch.manual_seed(0)
    products = Products(MediumLinears(torch.device("cpu"), EPS), 5, 32, 48, torch.randn)
    wanted = products.wanted()
    x = Scaled(wanted[0].float(), wanted[1].float(), torch.stack([wanted[2].float() / 2] * 2))
    monkeypatch.setattr(medium_linear, "MAX_BYTES", 1)
    monkeypatch.setattr(MediumLinears, "_launch", None)
    head = products.linears.scaling(products.into)
    torch.testing.assert_close(products.linears.scaled(x, head), wanted[4].float(), rtol=1e-4, atol=1e-4)
    first = Scaled(x.residual, x.values, None)
    torch.testing.assert_close(products.linears.scaled(first, head), wanted[3].float(), rtol=1e-4, atol=1e-4)


def test_weights_that_fit_and_pay():
    def weight(rows, columns, dtype=torch.bfloat16):
        return torch.empty_strided((rows, columns), (columns, 1), dtype=dtype, device="meta")

    assert MediumWeight.fits(weight(100, 1024))
    assert not MediumWeight.fits(weight(100, 1024, torch.float32))
    assert not MediumWeight.fits(weight(100, 1020))
    assert MediumWeight.pays(weight(2 * 3072, 1024))
    assert not MediumWeight.pays(weight(6144, 4096))
    assert weight(4096, 4096).nbytes > MAX_BYTES


@pytest.mark.parametrize(("rows", "columns"), [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)])
def test_no_tile_reaches_beyond_the_last_token(rows, columns):
    """Whatever lies there takes longer to read than tokens do. Up to 64 tokens have one tile."""
    weight = torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")
    for epilogue in Epilogue:
        for tokens in range(65, 257):
            assert medium_tiles(MediumWeight(weight, None, epilogue), tokens).tokens <= tokens


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from twostroke.kernels.medium_linear import medium_linear_kernel

names = medium_linear_kernel.arg_names
for epilogue in range(3):
    halves = 2 if epilogue == 2 else 1
    sizes = dict(EPILOGUE=epilogue, INPUTS=1024, OUTPUTS=3072, PARTS=0 if epilogue == 1 else 16, PARTS_PAD=16,
                 BIAS=epilogue == 0, TOKENS=64, ROWS=64, SLICE=64, PDL=True)
    kinds = {"num_tokens": "i32", "eps": "fp32"} | dict.fromkeys(("squares_ptr", "out_squares_ptr"), "*fp32")
    kinds |= {"x": "tensordesc<bf16[64, 64]>", "weight": f"tensordesc<bf16[{halves}, 64, 64]>"}
    signature = {name: "constexpr" if name in sizes else kinds.get(name, "*bf16") for name in names}
    constants = {(names.index(name),): value for name, value in sizes.items()}
    pointers = [name for name in names if signature[name].startswith("*")]
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    made = compile(ASTSource(medium_linear_kernel, signature, constants, aligned), target=GPUTarget("cuda", 90, 32),
                   options={"num_warps": 4, "num_stages": 3, "launch_pdl": True})
    ptx = made.asm["ptx"]
    wait, go = (ptx.index("griddepcontrol." + word) for word in ("wait", "launch_dependents"))
    assert ptx.index("prefetch.global.L2") < wait < go < ptx.index("cp.async")
    assert "ld.global" not in ptx or go < ptx.index("ld.global")
    assert "wgmma.mma_async" in ptx
"""


@on_cpu
def test_what_the_interpreter_cannot_run_compiles_for_hopper():
    """Dependents may start only after the wait, and nothing but weights is asked for before it."""
    code = "import os; del os.environ['TRITON_INTERPRET']\n" + COMPILE
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("tokens", [33, 64, 65, 96, 128, 200, 256])
def test_products_are_right_and_the_same_in_every_run(tokens):
    """With the tiles that steps run with; shapes that do not divide into tiles, too."""
    torch.manual_seed(tokens)

    def make(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    linears = MediumLinears(torch.device("cuda"), EPS, medium_tiles)
    for hidden, inner in ((1024, 3072), (1000, 1192), (576, 1536)):
        products = Products(linears, tokens, hidden, inner, make)
        first = products.run()
        for got, wanted in compared(first, products.wanted()):
            assert (got.double() - wanted).norm() < 8e-3 * wanted.norm()
        for _ in range(50):
            assert all(torch.equal(a, b) for a, b in zip(first, products.run(), strict=True))
