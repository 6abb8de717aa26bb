"""Decode steps of few tokens: the decoder's part against its plain path on the CPU, the kernel itself on a GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_decoder import CPU, MODELS, make_attention, make_step, random_tokens, save_random_model
from torch.nn import functional

import twostroke.kernels.thin_linear as thin_linear
import twostroke.model.linear as linear
from twostroke.kernels.announced import Announcements, Written
from twostroke.kernels.compiler import CompilerMissing
from twostroke.kernels.thin_linear import MAX_TOKENS, Scaled, ThinLinears, ThinWeight
from twostroke.model.load import load_model
from twostroke.model.thin import ThinDecoder

EPS = 1e-5
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)


class PlainLinears:
    """What `ThinLinears` computes, in PyTorch; a residual's squares come in two parts."""

    def __init__(self, eps):
        self.eps = eps

    def begin(self):
        pass

    def scaling(self, weight, bias=None):
        return SimpleNamespace(weight=weight, bias=bias)

    heading = gating = adding = scaling

    def scaled(self, x, weight):
        return functional.linear(self._normed(x), weight.weight, weight.bias)

    def gated(self, x, weight):
        gate, up = self.scaled(x, weight).chunk(2, 1)
        return Written(functional.silu(gate) * up)

    def residual(self, x, weight, residual, norm):
        total = residual + functional.linear(x.values, weight.weight)
        squares = torch.stack([half.square().sum(1) for half in total.chunk(2, 1)])
        return Scaled(total, total * norm, squares)

    def _normed(self, x):
        if x.squares is None:
            return x.values
        return x.values * torch.rsqrt(x.squares.sum(0) / x.values.shape[1] + self.eps)[:, None]


@pytest.fixture(params=["llama", "llama-tied", "mistral-window", "qwen2", "qwen3"])
def model(request, tmp_path, monkeypatch):
    monkeypatch.setattr(linear, "pack_weight", lambda weight: None)
    save_random_model(MODELS[request.param], tmp_path)
    return load_model(tmp_path, impl="native", device=CPU).model


def test_thin_steps_give_the_logits_of_the_plain_path(model):
    prompt, following = random_tokens(9, seed=1), random_tokens(3, seed=2)
    thin = ThinDecoder(model, PlainLinears(model.config.norm_eps), range(1, MAX_TOKENS + 1))
    with torch.inference_mode():
        logits = []
        for forward in (model.forward, thin.forward):
            attention = make_attention(model)
            model.forward(make_step(model, [], [(0, 0, prompt), (2, 0, prompt[:4])]), attention)
            steps = [make_step(model, [(0, 9 + i, token), (2, 4 + i, token)], []) for i, token in enumerate(following)]
            assert all(thin.takes(step) for step in steps)
            logits.append(torch.cat([forward(step, attention) for step in steps]))
    assert logits[0].std() > 0.3
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=1e-4)


def test_only_steps_of_few_lanes_are_thin(model):
    few, more = (ThinDecoder(model, PlainLinears(EPS), lanes) for lanes in (range(1, 4), range(4, 6)))
    lanes = [(0, 0, 1)]
    assert [few.takes(make_step(model, lanes * count, [])) for count in range(1, 7)] == [True] * 3 + [False] * 3
    assert [more.takes(make_step(model, lanes * count, [])) for count in range(1, 7)] == [False] * 3 + [True] * 2 + [
        False
    ]
    assert not few.takes(make_step(model, lanes, [(1, 0, [2])]))
    assert not few.takes(make_step(model, lanes, [], sample_index=[0]))


def test_no_thin_steps_on_a_cpu(model):
    assert ThinDecoder.made_for(model) == []


def test_a_missing_compiler_leaves_the_plain_path_and_says_so(model, monkeypatch, caplog):
    def missing(*_):
        raise CompilerMissing("no CUDA compiler (nvcc) was found")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("twostroke.model.thin.ThinLinears", missing)
    monkeypatch.setattr(ThinWeight, "fits", staticmethod(lambda weight, gated=False: True))
    model.device = torch.device("cuda")
    assert ThinDecoder.made_for(model) == []
    assert "nvcc" in caplog.text


@pytest.mark.parametrize(("most_bytes", "count"), [(1 << 20, 2), (1, 1)])
def test_more_lanes_are_thin_where_weights_are_small(model, monkeypatch, most_bytes, count):
    medium_linear = pytest.importorskip("twostroke.kernels.medium_linear")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("twostroke.model.thin.ThinLinears", lambda device, eps: PlainLinears(eps))
    monkeypatch.setattr(ThinWeight, "fits", staticmethod(lambda weight, gated=False: True))
    monkeypatch.setattr(medium_linear.MediumWeight, "fits", staticmethod(lambda weight: True))
    monkeypatch.setattr(medium_linear, "MAX_BYTES", most_bytes)
    monkeypatch.setattr(model, "device", torch.device("cuda"))
    assert len(ThinDecoder.made_for(model)) == count


def test_weights_that_fit():
    def fits(rows, columns, dtype=torch.bfloat16, gated=False):
        return ThinWeight.fits(torch.empty(rows, columns, dtype=dtype, device="meta"), gated=gated)

    assert fits(4096, 4096)
    assert fits(2 * 14336, 4096, gated=True)
    assert not fits(4096, 4096, torch.float32)
    assert not fits(4100, 4096)
    assert not fits(4096, 4100)
    assert not fits(4104, 4096, gated=True)
    assert not fits(4096, 64)


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


class StandIn:
    """The functions of the compiled source; a described matrix is its address. Keeps what was launched."""

    def __init__(self):
        self.launched = []

    def product_bytes(self):
        return ctypes.sizeof(thin_linear._Product)

    def clusters_at_once(self, *_):
        return 66

    def describe_matrix(self, place, pointer, *_):
        ctypes.c_uint64.from_address(place.value).value = pointer.value
        return 0

    def launch_product(self, product, *_):
        self.launched.append(thin_linear._Product.from_buffer_copy(product._obj))
        return 0

    def read(self):
        """Where launched products found weight and input."""
        fields = (thin_linear._Product.w, thin_linear._Product.x)
        return [
            [ctypes.c_uint64.from_address(ctypes.addressof(product) + field.offset).value for field in fields]
            for product in self.launched
        ]


@pytest.fixture
def library(monkeypatch):
    made = StandIn()
    monkeypatch.setattr(thin_linear, "load_library", lambda *_: made)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    return made


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16)


def test_weights_are_read_where_they_are(library):
    """G11: an engine that slept has them at other addresses than those at which it was built."""
    linears = ThinLinears(CPU, EPS)
    weight, x, norm = zeros(128, 256), zeros(3, 256), zeros(128)
    thin, residual = linears.adding(weight), zeros(3, 128)
    before = weight.data_ptr()
    for _ in range(2):
        linears.residual(Written(x), thin, residual, norm)
        weight.data = weight.clone()
    (first, _), (second, read) = library.read()
    assert first == before != second
    assert read == x.data_ptr()


@pytest.mark.parametrize("told", [True, False])
def test_products_tell_each_other(library, told):
    """Each output that a product reads has counts of its own; what attention saw has none, and tells nobody."""
    linears = ThinLinears(CPU, EPS)
    output, down = (linears.adding(zeros(128, columns)) for columns in (256, 384))
    gate_up, qkv = linears.gating(zeros(768, 128)), linears.scaling(zeros(512, 128))
    for _ in range(2):
        if told:
            linears.begin()
        x = linears.residual(Written(zeros(3, 256)), output, zeros(3, 128), zeros(128))
        x = linears.residual(linears.gated(x, gate_up), down, x.residual, zeros(128))
        linears.scaled(x, qkv)
    o, gated, added, scaled, *again = library.launched
    assert o.in_ready is None
    assert scaled.out_ready is None
    assert [product.out_ready for product in again] == [product.out_ready for product in (o, gated, added, scaled)]
    if not told:
        assert all(product.in_ready is product.out_ready is None for product in (o, gated, added, scaled))
        return
    for product, following in ((o, gated), (gated, added), (added, scaled)):
        assert product.out_ready == following.in_ready
        assert following.in_count == product.tiles
        assert (
            (following.in_count - 1) * following.in_columns < product.rows <= following.in_count * following.in_columns
        )
    assert [made.out_ready - o.out_ready for made in (gated, added)] == [4 * o.tiles, 4 * (o.tiles + gated.tiles)]


def test_announcements_of_a_step():
    told = Announcements(5, CPU)
    for _ in range(2):
        told.begin()
        outputs = told.take(2, 64), told.take(3, 56)
        assert [(len(counts), columns) for counts, columns in outputs] == [(2, 64), (3, 56)]
        for counts, _ in outputs:
            assert not counts.any()
            counts += 1
    with pytest.raises(RuntimeError, match="6 parts at least: there is room for 5"):
        told.take(1, 8)


def bf16(*shape, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).to(torch.bfloat16)


def ratio(got, want):
    return float((got.double() - want).norm() / want.norm())


class Chain:
    """Products of every kind, each the input of the next, in the shapes of a model."""

    def __init__(self, tokens, hidden, rows):
        self.residual, self.norm, self.wide = bf16(tokens, hidden), bf16(hidden), bf16(tokens, rows // 2)
        self.into, self.bias, self.gate_up = bf16(rows, hidden, scale=0.03), bf16(rows), bf16(rows, hidden, scale=0.03)
        self.out = bf16(hidden, rows // 2, scale=0.03)
        self.linears = linears = ThinLinears(torch.device("cuda"), EPS)
        self.adding, self.gating = [linears.adding(self.out) for _ in range(2)], linears.gating(self.gate_up)
        into = self.into
        self.others = linears.scaling(into), linears.heading(into), linears.scaling(into, self.bias)

    def run(self):
        """Return residual, values and squares of the first product, the second, those of the third, three more."""
        linears, norm = self.linears, self.norm
        x = linears.residual(Written(self.wide), self.adding[0], self.residual, norm)
        inner = linears.gated(x, self.gating)
        y = linears.residual(inner, self.adding[1], x.residual, norm)
        return (*x[:3], inner.values, *y[:3], *(linears.scaled(y, weight) for weight in self.others))

    def exact(self):
        """The same in double; squares are of all columns."""
        into, bias, gate_up, out = (x.double() for x in (self.into, self.bias, self.gate_up, self.out))
        x = self.residual.double() + self.wide.double() @ out.T
        gate, up = (self._normed(x) @ gate_up.T).chunk(2, 1)
        inner = functional.silu(gate) * up
        y = x + inner @ out.T
        plain = self._normed(y) @ into.T
        return (*self._scaled(x), inner, *self._scaled(y), plain, plain, plain + bias)

    def _normed(self, x):
        return x * torch.rsqrt(x.square().mean(1, keepdim=True) + EPS) * self.norm.double()

    def _scaled(self, x):
        return x, x * self.norm.double(), x.square().sum(1)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 32, 33, 64])
def test_products_are_right_and_the_same_in_every_run(tokens, told):
    """Shapes that do not divide into tiles or slices too."""
    torch.manual_seed(tokens)
    for hidden, rows in ((1024, 4096), (1000, 1184), (4096, 6144)):
        chain = Chain(tokens, hidden, rows)
        begin = chain.linears.begin if told else lambda: None
        begin()
        first = [made.clone() for made in chain.run()]
        for got, want in zip(first, chain.exact(), strict=True):
            assert ratio(got.sum(0) if want.dim() == 1 else got, want) < 1e-2
        for _ in range(50):
            begin()
            made = chain.run()
            assert all(torch.equal(a, b) for a, b in zip(first, made, strict=True))
            for tensor in made:
                tensor.fill_(float("nan"))  # the next run finds them so: what it reads too early shows
