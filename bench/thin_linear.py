"""Checks and times the thin linear layers of a decode step, beside cuBLAS, in CUDA graphs.

usage: PYTHONPATH=. python bench/thin_linear.py [layers]      (on a GPU of compute capability 9.0)
"""

import sys

import torch
from plain_layers import PlainLayers, bf16, error, makers
from torch.nn import functional as F  # noqa: N812

from twostroke.bench.ceilings import measure_ceilings
from twostroke.bench.timing import graph_seconds
from twostroke.kernels.announced import Written
from twostroke.kernels.thin_linear import Scaled, ThinLinears

H, INNER, QKV, V, EPS = 4096, 14336, 6144, 128256, 1e-5
SHAPES = {"o": (H, H), "gate_up": (2 * INNER, H), "down": (H, INNER), "qkv": (QKV, H)}
TOKENS = 32


class Layers(PlainLayers):
    """Random layers, and what runs them.

    Args:
        told: a layer's products are one kernel, in which they tell each other of each tile; otherwise each is one, and
            waits for the whole one ahead.
    """

    def __init__(self, count, tokens=TOKENS, *, told=False):
        super().__init__(SHAPES, EPS, count)
        self.linears = ThinLinears(torch.device("cuda"), EPS)
        assert self.linears.chains, "others of this device are still there"
        self.told = told
        make = makers(self.linears)
        self.thin = {name: [make[name](weight) for weight in weights] for name, weights in self.weights.items()}
        self.inputs(tokens)
        self.x = Scaled(self.h, self.scaled_input(), self.h.float().square().sum(1)[None].contiguous())

    def chain(self):
        """Return all that each layer makes: eight tensors."""
        x, linears, made = self.x, self.linears, []
        if self.told:
            linears.begin()
        for o, gate_up, down, qkv in zip(*self.thin.values(), strict=True):
            x = linears.residual(Written(self.seen), o, x.residual, self.norm)
            inner = linears.gated(x, gate_up)
            y = linears.residual(inner, down, x.residual, self.norm)
            made += [*x[:3], inner.values, *y[:3], linears.scaled(y, qkv)]
            x = y
        return made

    def one(self, name, weight):
        made = self.fused(self.linears, name, weight)
        self.linears.launch()
        return made

    def all_of(self, name):
        return lambda: [self.one(name, weight) for weight in self.thin[name]]


def check(tokens, *, told):
    layers = Layers(4, tokens, told=told)
    first = [made.clone() for made in layers.chain()]
    thin, cublas, exact = (first[4], first[7]), layers.cublas(1), layers.exact()
    figures = [f"thin {error(a, c):.1e}, cuBLAS {error(b, c):.1e}" for a, b, c in zip(thin, cublas, exact, strict=True)]
    different = 0
    for _ in range(300):
        again = layers.chain()
        different += not all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
        for made in again:
            made.fill_(float("nan"))  # what the next run reads too early shows
    print(
        f"{tokens} tokens, {'in chains' if told else 'waiting'}: norm ratios of residual and qkv: {figures}; "
        f"{different} of 300 runs differ",
        flush=True,
    )


def time_layers(tokens, count, bandwidth):
    us = 1e6 / count
    layers = Layers(count, tokens)
    print(tokens, "tokens:", {name: (ws[0].tile, ws[0].tiles) for name, ws in layers.thin.items()})
    floor = {name: 1e6 * w[0].nbytes / bandwidth for name, w in layers.weights.items()}
    print(f"us per layer: floor {sum(floor.values()):.1f}", {name: f"{value:.1f}" for name, value in floor.items()})
    print(f"cuBLAS {us * graph_seconds(layers.cublas):.1f}", flush=True)
    alone = {name: f"{us * graph_seconds(layers.all_of(name)):.1f}" for name in SHAPES}
    waiting = us * graph_seconds(layers.chain)
    del layers
    told = us * graph_seconds(Layers(count, tokens, told=True).chain)
    print(f"thin {told:.1f}, waiting for whole products {waiting:.1f}; each alone {alone}", flush=True)


def time_heads(tokens, bandwidth):
    layers, heads = Layers(1, tokens), [bf16(V, H, scale=0.02) for _ in range(2)]
    thin_heads = [layers.linears.scaling(head) for head in heads]
    thin = 1e6 * graph_seconds(lambda: [layers.linears.scaled(layers.x, head) for head in thin_heads]) / 2
    cublas = 1e6 * graph_seconds(lambda: [F.linear(layers.h, head) for head in heads]) / 2
    print(f"head: thin {thin:.1f}, cuBLAS {cublas:.1f}, floor {1e6 * heads[0].nbytes / bandwidth:.1f}", flush=True)


def main(count=32):
    torch.manual_seed(0)
    for tokens in (1, 7, 32, 33, 64):
        for told in (False, True):
            check(tokens, told=told)
    bandwidth = measure_ceilings().read_bytes_per_s
    for tokens in (32, 64):
        time_layers(tokens, count, bandwidth)
        time_heads(tokens, bandwidth)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
