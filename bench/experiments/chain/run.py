"""Checks and times the linear layers of a decode step, a layer's chain in one launch, beside cuBLAS, in CUDA graphs.

usage: PYTHONPATH=. python bench/experiments/chain/run.py [layers]      (on a GPU of compute capability 9.0)
"""

import sys

import torch
from decode_linear import DecodeChain, DecodeLinears, DecodeWeight, Scaled
from torch.nn import functional as F  # noqa: N812

from twostroke.bench.timing import graph_seconds
from twostroke.kernels.ops import add_rms_norm, silu_mul

H, INNER, QKV, V, EPS = 4096, 14336, 6144, 128256, 1e-5


def bf16(*shape, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).to(torch.bfloat16)


def error(got, want):
    return float((got.double() - want).norm() / want.norm())


def scaled_of(h, norm):
    squares = torch.zeros(1, 32, device="cuda")
    squares[0, : h.shape[0]] = h.float().square().sum(1)
    return Scaled(h, (h.float() * norm.float()).to(torch.bfloat16), squares)


def normed(h, norm):
    h = h.double()
    return h * torch.rsqrt(h.square().mean(1, keepdim=True) + EPS) * norm.double()


def one(linears, kind, *arguments):
    """A chain of one product."""
    chain = DecodeChain(
        linears, arguments[0][0].shape[0] if isinstance(arguments[0], Scaled) else len(arguments[0]), EPS
    )
    out = getattr(chain, kind)(*arguments)
    chain.launch()
    return out


def layer(linears, attended, s, norm, o, gate_up, down, qkv):
    chain = DecodeChain(linears, len(attended), EPS)
    s = chain.residual(attended, o, s.residual, norm)
    s = chain.residual(chain.gated(s, gate_up), down, s.residual, norm)
    out = chain.scaled(s, qkv)
    chain.launch()
    return s, out


def check(linears):
    for tokens in (1, 7, 32):
        h, norm = bf16(tokens, H), bf16(H)
        x = scaled_of(h, norm)
        for rows in (QKV, 4096, V):
            w = bf16(rows, H, scale=0.02)
            got = one(linears, "scaled", x, DecodeWeight(w))
            print(f"scaled {tokens} x {rows}: {error(got, normed(h, norm) @ w.double().T):.2e}")
        w = bf16(2 * INNER, H, scale=0.02)
        gate, up = (normed(h, norm) @ w.double().T).split(INNER, 1)
        got = one(linears, "gated", x, DecodeWeight(w, gated=True))
        print(f"gated {tokens}: {error(got, F.silu(gate) * up):.2e}")
        a, w = bf16(tokens, INNER), bf16(H, INNER, scale=0.01)
        got = one(linears, "residual", a, DecodeWeight(w), h, norm)
        want = h.double() + a.double() @ w.double().T
        squares = error(got.squares.sum(0)[:tokens], got.residual.double().square().sum(1))
        scaled = error(got.values, got.residual.double() * norm.double())
        print(f"residual {tokens}: {error(got.residual, want):.2e} scaled {scaled:.2e} squares {squares:.2e}")
        attended = bf16(tokens, H)
        ws = [
            bf16(H, H, scale=0.02),
            bf16(2 * INNER, H, scale=0.02),
            bf16(H, INNER, scale=0.01),
            bf16(QKV, H, scale=0.02),
        ]
        fast = [DecodeWeight(w, gated=i == 1) for i, w in enumerate(ws)]
        first = None
        for repeat in range(20):
            s, out = layer(linears, attended, x, norm, *fast)
            first = (s, out) if first is None else first
            assert torch.equal(out, first[1]), repeat
            assert torch.equal(s.residual, first[0].residual), repeat
        r = h.double() + attended.double() @ ws[0].double().T
        gate, up = (normed(r, norm) @ ws[1].double().T).split(INNER, 1)
        r = r + (F.silu(gate) * up) @ ws[2].double().T
        print(f"layer {tokens}: {error(s.residual, r):.2e} {error(out, normed(r, norm) @ ws[3].double().T):.2e}")


def main(layers=32):
    torch.manual_seed(0)
    check(DecodeLinears(torch.device("cuda"), 2048))
    linears = DecodeLinears(torch.device("cuda"), 2048)
    shapes = {"qkv": (QKV, H), "o": (H, H), "gate_up": (2 * INNER, H), "down": (H, INNER)}
    weights = {name: [bf16(*shape, scale=0.02) for _ in range(layers)] for name, shape in shapes.items()}
    fast = {name: [DecodeWeight(w, gated=name == "gate_up") for w in ws] for name, ws in weights.items()}
    h, norm = bf16(32, H), bf16(H)
    x = scaled_of(h, norm)
    attended = bf16(32, H)

    def chain():
        s = x
        for i in range(layers):
            s, _ = layer(linears, attended, s, norm, *(fast[name][i] for name in ("o", "gate_up", "down", "qkv")))

    def plain_chain():
        r, n = h, h
        for i in range(layers):
            n, r = add_rms_norm(F.linear(attended, weights["o"][i]), r, norm, EPS)
            n, r = add_rms_norm(
                F.linear(silu_mul(F.linear(n, weights["gate_up"][i])), weights["down"][i]), r, norm, EPS
            )
            F.linear(n, weights["qkv"][i])

    floor = sum(2 * a * b for a, b in shapes.values()) * layers / 4.33e9
    ours, cublas = 1e3 * graph_seconds(chain), 1e3 * graph_seconds(plain_chain)
    print(f"chain of {layers} layers: ours {ours:.3f} ms, cuBLAS {cublas:.3f} ms, floor {floor:.3f} ms")
    heads = [bf16(V, H, scale=0.02) for _ in range(2)]
    fast_heads = [DecodeWeight(head) for head in heads]

    def ours_heads():
        for head in fast_heads:
            chain = DecodeChain(linears, 32, EPS)
            chain.scaled(x, head)
            chain.launch()

    ours, cublas = (
        1e3 * graph_seconds(ours_heads) / 2,
        1e3 * graph_seconds(lambda: [F.linear(h, head) for head in heads]) / 2,
    )
    print(f"head: ours {ours * 1e3:.1f} us, cuBLAS {cublas * 1e3:.1f} us, floor {2 * V * H / 4.33e6:.1f} us")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
