"""Products of a model's layer, and what they should make."""

import torch
from torch.nn import functional

from twostroke.kernels.announced import Written
from twostroke.kernels.thin_linear import ThinLinears

EPS = 1e-5


def ratio(got, want):
    return float((got.double() - want).norm() / want.norm())


class Products:
    """Products of every kind, each the input of the next, in the shapes of a model."""

    def __init__(self, tokens, hidden, rows, device):
        def bf16(*shape, scale=1.0):
            return (torch.randn(*shape, device=device) * scale).to(torch.bfloat16)

        self.residual, self.norm, self.wide = bf16(tokens, hidden), bf16(hidden), bf16(tokens, rows // 2)
        self.into, self.bias, self.gate_up = bf16(rows, hidden, scale=0.03), bf16(rows), bf16(rows, hidden, scale=0.03)
        self.out = bf16(hidden, rows // 2, scale=0.03)
        self.linears = linears = ThinLinears(device, EPS)
        self.adding, self.gating = [linears.adding(self.out) for _ in range(2)], linears.gating(self.gate_up)
        self.others = [linears.scaling(self.into, bias) for bias in (None, None, self.bias)]

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


def check(made, products):
    for got, want in zip(made, products.exact(), strict=True):
        assert ratio(got.sum(0) if want.dim() == 1 else got, want) < 1e-2
