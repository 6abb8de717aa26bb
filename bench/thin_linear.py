"""Checks and times the thin linear layers of a decode step, beside cuBLAS, in CUDA graphs.

usage: PYTHONPATH=. python bench/thin_linear.py [layers]      (on a GPU of compute capability 9.0)
"""

import sys

import torch
from torch.nn import functional as F  # noqa: N812

from twostroke.bench.ceilings import measure_ceilings
from twostroke.bench.timing import graph_seconds
from twostroke.kernels.announced import Announcements, Written
from twostroke.kernels.ops import add_rms_norm, silu_mul
from twostroke.kernels.thin_linear import Scaled, ThinLinears

H, INNER, QKV, V, EPS = 4096, 14336, 6144, 128256, 1e-5
SHAPES = {"o": (H, H), "gate_up": (2 * INNER, H), "down": (H, INNER), "qkv": (QKV, H)}
TOKENS = 32


def bf16(*shape, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).to(torch.bfloat16)


class Layers:
    """Random layers, and what runs them."""

    def __init__(self, linears, count, tokens=TOKENS):
        self.linears = linears
        self.plain = {name: [bf16(*shape, scale=0.02) for _ in range(count)] for name, shape in SHAPES.items()}
        makers = {"o": linears.adding, "down": linears.adding, "gate_up": linears.gating, "qkv": linears.scaling}
        self.thin = {name: [makers[name](w) for w in ws] for name, ws in self.plain.items()}
        self.h, self.norm = bf16(tokens, H), bf16(H)
        self.x = Scaled(self.h, (self.h.float() * self.norm.float()).to(torch.bfloat16),
                        self.h.float().square().sum(1)[None].contiguous())  # fmt: skip
        self.seen, self.wide = bf16(tokens, H), bf16(tokens, INNER)

    def chain(self, telling=None):
        """The layers; with `telling`, products tell each other of each tile."""
        x, linears, made = self.x, self.linears, []
        if telling is not None:
            telling.begin()
        for o, gate_up, down, qkv in zip(*self.thin.values(), strict=True):
            x = linears.residual(Written(self.seen), o, x.residual, self.norm, telling)
            inner = linears.gated(x, gate_up, telling)
            y = linears.residual(inner, down, x.residual, self.norm, telling)
            made += [*x[:3], inner.values]
            x = y
            made += [*x[:3], linears.scaled(x, qkv, telling).values]
        return made

    def telling(self):
        return Announcements(sum(weight.tiles for weights in self.thin.values() for weight in weights), self.h.device)

    def cublas(self, count=None):
        r, out = self.h, None
        for o, gate_up, down, qkv in zip(*(weights[:count] for weights in self.plain.values()), strict=True):
            n, r = add_rms_norm(F.linear(self.seen, o), r, self.norm, EPS)
            n, r = add_rms_norm(F.linear(silu_mul(F.linear(n, gate_up)), down), r, self.norm, EPS)
            out = F.linear(n, qkv)
        return r, out

    def exact(self):
        """The first layer, in double."""
        o, gate_up, down, qkv = (ws[0].double() for ws in self.plain.values())

        def normed(r):
            return r * torch.rsqrt(r.square().mean(1, keepdim=True) + EPS) * self.norm.double()

        r = self.h.double() + self.seen.double() @ o.T
        gate, up = (normed(r) @ gate_up.T).split(INNER, 1)
        r = r + (F.silu(gate) * up) @ down.T
        return r, normed(r) @ qkv.T

    def one(self, name, weight):
        if name == "gate_up":
            return self.linears.gated(self.x, weight)
        if name == "qkv":
            return self.linears.scaled(self.x, weight)
        return self.linears.residual(Written(self.seen if name == "o" else self.wide), weight, self.h, self.norm)

    def all_of(self, name):
        return lambda: [self.one(name, weight) for weight in self.thin[name]]


def error(got, want):
    return float((got.double() - want).norm() / want.norm())


def check(linears):
    for tokens in (1, 7, 32, 33, 64):
        layers = Layers(linears, 4, tokens)
        for telling in (None, layers.telling()):
            first = [made.clone() for made in layers.chain(telling)]
            thin, cublas, exact = (first[4], first[7]), layers.cublas(1), layers.exact()
            figures = [
                f"thin {error(a, c):.1e}, cuBLAS {error(b, c):.1e}" for a, b, c in zip(thin, cublas, exact, strict=True)
            ]
            different = 0
            for _ in range(300):
                again = layers.chain(telling)
                different += not all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
                for made in again:
                    made.fill_(float("nan"))
            print(
                f"{tokens} tokens, {'told' if telling else 'waiting'}: norm ratios of residual and qkv: {figures}; "
                f"{different} of 300 runs differ",
                flush=True,
            )


def main(count=32):
    torch.manual_seed(0)
    linears = ThinLinears(torch.device("cuda"), EPS)
    check(linears)
    bandwidth = measure_ceilings().read_bytes_per_s
    us = 1e6 / count
    for tokens in (32, 64):
        layers = Layers(linears, count, tokens)
        print(tokens, "tokens:", {name: (ws[0].tile, ws[0].tiles, ws[0].clusters) for name, ws in layers.thin.items()})
        floor = {name: 1e6 * w[0].nbytes / bandwidth for name, w in layers.plain.items()}
        print(f"us per layer: floor {sum(floor.values()):.1f}", {name: f"{value:.1f}" for name, value in floor.items()})
        print(f"cuBLAS {us * graph_seconds(layers.cublas):.1f}", flush=True)
        alone = {name: f"{us * graph_seconds(layers.all_of(name)):.1f}" for name in SHAPES}
        telling = layers.telling()
        waiting, told = graph_seconds(layers.chain), graph_seconds(lambda layers=layers, t=telling: layers.chain(t))
        print(f"thin {us * told:.1f}, waiting for whole products {us * waiting:.1f}; each alone {alone}", flush=True)
        heads = [bf16(V, H, scale=0.02) for _ in range(2)]
        thin_heads = [linears.heading(head) for head in heads]
        thin = 1e6 * graph_seconds(lambda layers=layers, ws=thin_heads: [linears.scaled(layers.x, w) for w in ws]) / 2
        cublas = 1e6 * graph_seconds(lambda layers=layers, ws=heads: [F.linear(layers.h, w) for w in ws]) / 2
        print(f"head: thin {thin:.1f}, cuBLAS {cublas:.1f}, floor {1e6 * heads[0].nbytes / bandwidth:.1f}")
        del layers, heads, thin_heads


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
