"""Random layers in plain PyTorch, which the scripts that time fused products hold them against."""

import torch
from torch.nn import functional as F  # noqa: N812

from twostroke.kernels.announced import Written
from twostroke.kernels.ops import rms_norm, silu_mul


def bf16(*shape, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).to(torch.bfloat16)


def error(got, want):
    return float((got.double() - want).norm() / want.norm())


def makers(linears):
    """What makes the weights of each of a layer's products, by name."""
    return {"o": linears.adding, "gate_up": linears.gating, "down": linears.adding, "qkv": linears.scaling}


class PlainLayers:
    """Layers without attention.

    Args:
        shapes: (rows, columns) of o, gate_up, down and qkv, in this order.
        eps: of both norms, whose weights are the same.

    Attributes:
        weights: of each product by name, one for each layer. norm: of both norms.
        x: what goes into a fused product behind a norm, a `Scaled`; scripts that time such set it.
    """

    def __init__(self, shapes, eps, count):
        self.weights = {name: [bf16(*shape, scale=0.02) for _ in range(count)] for name, shape in shapes.items()}
        self.norm = bf16(shapes["o"][0])
        self.eps = eps

    def inputs(self, tokens):
        """Draw what goes in: the residual `h`, what attention saw, and the input of down."""
        hidden, seen = self.weights["o"][0].shape
        self.h, self.seen = bf16(tokens, hidden), bf16(tokens, seen)
        self.wide = bf16(tokens, self.weights["down"][0].shape[1])

    def scaled_input(self):
        """The residual x the weight of the norm."""
        return (self.h.float() * self.norm.float()).to(torch.bfloat16)

    def fused(self, linears, name, weight):
        """What one product makes, of a weight that `linears` made."""
        if name == "gate_up":
            return linears.gated(self.x, weight)
        if name == "qkv":
            return linears.scaled(self.x, weight)
        return linears.residual(Written(self.seen if name == "o" else self.wide), weight, self.h, self.norm)

    def cublas(self, count=None):
        """Residual and q/k/v of the last of `count` layers, by the library and the small kernels between."""
        r, out = self.h.clone(), None
        for o, gate_up, down, qkv in zip(*(weights[:count] for weights in self.weights.values()), strict=True):
            n = rms_norm(r.addmm_(self.seen, o.t()), self.norm, self.eps)
            n = rms_norm(r.addmm_(silu_mul(F.linear(n, gate_up)), down.t()), self.norm, self.eps)
            out = F.linear(n, qkv)
        return r, out

    def exact(self):
        """Those of the first layer, in double."""
        o, gate_up, down, qkv = (weights[0].double() for weights in self.weights.values())

        def normed(r):
            return r * torch.rsqrt(r.square().mean(1, keepdim=True) + self.eps) * self.norm.double()

        r = self.h.double() + self.seen.double() @ o.T
        gate, up = (normed(r) @ gate_up.T).chunk(2, 1)
        r = r + (F.silu(gate) * up) @ down.T
        return r, normed(r) @ qkv.T
