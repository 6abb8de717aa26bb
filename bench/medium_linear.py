"""Checks and times the products of decode steps of 65 to 256 lanes of a small model, beside cuBLAS, in CUDA graphs.

usage: PYTHONPATH=. python bench/medium_linear.py [--layers N] [--buckets]      (on a GPU of compute capability 9.0)

Prints, for the shape of Qwen3-0.6B: errors against float64 and runs that differ; a sweep over tiles for each product
alone; times of a layer's four products with norms, residual and activation, with the tiles that the engine uses, with
the best of the sweep, and with the best that leave half the shared memory. A choice that fails prints why, and is left
out. With --buckets, only a layer's time for each number of lanes that steps are padded to, thin products below 33.
"""

import argparse
import sys
import time

import torch
from plain_layers import PlainLayers, bf16, error, makers
from torch.nn import functional as F  # noqa: N812

import twostroke.kernels.medium_linear as medium_linear
from twostroke.bench.ceilings import measure_ceilings
from twostroke.bench.timing import graph_seconds
from twostroke.device.buckets import Buckets
from twostroke.kernels.announced import Written
from twostroke.kernels.medium_linear import LANES as TAKEN
from twostroke.kernels.medium_linear import MediumLinears, MediumTiles, medium_tiles
from twostroke.kernels.ops import rms_norm
from twostroke.kernels.thin_linear import Scaled, ThinLinears

H, Q, INNER, QKV, V, EPS = 1024, 2048, 3072, 4096, 151936, 1e-6
SHAPES = {"o": (H, Q), "gate_up": (2 * INNER, H), "down": (H, INNER), "qkv": (QKV, H)}
NAMES = {shape: name for name, shape in SHAPES.items()}
LANES = (96, 128, 192, 240, 256)
SWEPT = (128, 256)
HALF = 113 << 10
"""Of a multiprocessor's shared memory: programs of two products that follow each other fit beside each other."""

# tokens, rows, inputs, warps, stages; a gated tile has twice as many rows
NARROW = [
    (64, 32, 128, 4, 4), (64, 32, 128, 4, 8), (64, 32, 256, 4, 4), (64, 32, 64, 4, 8),
    (64, 64, 64, 4, 6), (64, 64, 128, 4, 3), (64, 64, 128, 4, 6), (64, 64, 256, 4, 3),
    (128, 32, 128, 4, 5), (128, 32, 64, 8, 5), (128, 64, 64, 8, 4), (128, 64, 128, 8, 4),
]  # fmt: skip
CHOICES = {
    "o": NARROW,
    "down": NARROW,
    "qkv": [
        (64, 64, 64, 4, 6), (64, 64, 128, 4, 3), (64, 64, 128, 4, 6), (64, 128, 64, 4, 4),
        (128, 32, 128, 4, 5), (128, 64, 64, 4, 4), (128, 64, 64, 8, 4), (128, 64, 128, 8, 4),
        (128, 128, 64, 8, 3), (128, 128, 64, 8, 6), (128, 128, 128, 8, 3), (256, 64, 64, 8, 5),
    ],
    "gate_up": [
        (64, 32, 64, 4, 6), (64, 32, 128, 4, 3), (64, 32, 128, 4, 6), (64, 64, 64, 4, 4),
        (128, 32, 64, 4, 4), (128, 32, 64, 8, 4), (128, 32, 128, 8, 4), (128, 64, 64, 8, 3),
        (128, 64, 64, 8, 6), (128, 64, 128, 8, 3), (256, 32, 64, 8, 5), (256, 64, 64, 8, 4),
    ],
}  # fmt: skip
HEAD_CHOICES = [(128, 128, 64, 8, 3), (128, 128, 64, 8, 6), (128, 256, 64, 8, 4), (256, 128, 64, 8, 4)]


def linears_of(tiles):
    """Linears whose products have the tiles of a mapping from their names."""
    return MediumLinears(torch.device("cuda"), EPS, lambda weight, _: tiles[NAMES[tuple(weight.weight.shape)]])


class Layers(PlainLayers):
    """Random layers, and what runs them."""

    def inputs(self, tokens):
        super().inputs(tokens)
        squares = self.h.float().square().reshape(tokens, 16, -1).sum(2).T.contiguous()
        self.x = Scaled(self.h, self.scaled_input(), squares)

    def made(self, linears, name):
        make = makers(linears)
        return [make[name](weight) for weight in self.weights[name]]

    def chain(self, linears):
        made = [self.made(linears, name) for name in SHAPES]

        def run():
            linears.begin()
            x, out = self.x, None
            for o, gate_up, down, qkv in zip(*made, strict=True):
                x = linears.residual(Written(self.seen), o, x.residual, self.norm)
                x = linears.residual(linears.gated(x, gate_up), down, x.residual, self.norm)
                out = linears.scaled(x, qkv)
            return x.residual, out

        return run

    def alone(self, linears, name):
        made = self.made(linears, name)
        return lambda: [self.fused(linears, name, weight) for weight in made]

    def alone_by_cublas(self, name):
        x = {"o": self.seen, "gate_up": self.h, "down": self.wide, "qkv": self.h}[name]
        return lambda: [F.linear(x, weight) for weight in self.weights[name]]


def shown(failure):
    return f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0][:200]}"


def microseconds(what, work, count):
    """Time of one of `count`; infinite if it fails, and the reason is printed."""
    try:
        return 1e6 * graph_seconds(work) / count
    except Exception as failure:
        print(f"{what}: {shown(failure)}")
        return float("inf")


def check(what, linears, tokens):
    layers = Layers(SHAPES, EPS, 1)
    layers.inputs(tokens)
    run = layers.chain(linears)
    try:
        first, cublas, exact = run(), layers.cublas(), layers.exact()
        pairs = zip(first, cublas, exact, strict=True)
        figures = [f"{error(got, want):.1e}, cuBLAS {error(other, want):.1e}" for got, other, want in pairs]
        different = sum(not all(torch.equal(a, b) for a, b in zip(run(), first, strict=True)) for _ in range(100))
        print(f"{what}, {tokens} lanes: norm ratios of residual and qkv {figures}; {different} of 100 runs differ")
    except Exception as failure:
        print(f"{what}, {tokens} lanes: {shown(failure)}")
    sys.stdout.flush()


def shared_bytes(name, tiles):
    return 2 * tiles.stages * tiles.inputs * (tiles.tokens + tiles.rows * (2 if name == "gate_up" else 1))


def sweep(layers, tokens):
    """Return the best tiles of each product alone: of all choices, and of those that leave half the shared memory."""
    best, lean = {}, {}
    count = len(layers.weights["o"])
    layers.inputs(tokens)
    for name, choices in CHOICES.items():
        times = {}
        for choice in choices:
            tiles = MediumTiles(*choice)
            work = layers.alone(linears_of({name: tiles}), name)
            times[tiles] = microseconds(f"{name} {choice}", work, count)
        best[name] = min(times, key=times.get)
        lean[name] = min((tiles for tiles in times if shared_bytes(name, tiles) <= HALF), key=times.get)
        blas = microseconds("cuBLAS", layers.alone_by_cublas(name), count)
        print(f"{tokens} lanes, {name}: cuBLAS {blas:.2f}; best {times[best[name]]:.2f} {tuple(map(int, best[name]))}")
        print("   ", "; ".join(f"{time:.2f} {'x'.join(map(str, map(int, tiles)))}" for tiles, time in times.items()))
        sys.stdout.flush()
    return best, lean


def compare(layers, tokens, best, lean):
    count = len(layers.weights["o"])
    layers.inputs(tokens)
    linears = {"engine": MediumLinears(torch.device("cuda"), EPS), "best": linears_of(best)}
    linears["best that leave half"] = linears_of(lean)
    times = {"cuBLAS": microseconds("cuBLAS", layers.cublas, count)}
    times |= {label: microseconds(label, layers.chain(made), count) for label, made in linears.items()}
    print(f"{tokens} lanes, us a layer:", ", ".join(f"{label} {time:.1f}" for label, time in times.items()))
    blas = {name: f"{microseconds(name, layers.alone_by_cublas(name), count):.2f}" for name in SHAPES}
    mine = {name: f"{microseconds(name, layers.alone(linears['engine'], name), count):.2f}" for name in SHAPES}
    print(f"    alone: cuBLAS {blas}; engine {mine}", flush=True)


def compare_heads(layers):
    """An output head's products, which the engine leaves to the library."""
    medium_linear.MAX_BYTES = 1 << 40
    heads = [bf16(V, H, scale=0.02) for _ in range(2)]
    for tokens in SWEPT:
        layers.inputs(tokens)
        blas = microseconds("cuBLAS", lambda: [F.linear(rms_norm(layers.h, layers.norm, EPS), w) for w in heads], 2)
        times = []
        for choice in HEAD_CHOICES:
            linears = MediumLinears(torch.device("cuda"), EPS, lambda *_, choice=choice: MediumTiles(*choice))
            made = [linears.scaling(head) for head in heads]
            time = microseconds(
                f"head {choice}", lambda made=made, linears=linears: [linears.scaled(layers.x, w) for w in made], 2
            )
            times.append(f"{time:.1f} {'x'.join(map(str, map(int, choice)))}")
        print(f"{tokens} lanes, head: cuBLAS with its norm {blas:.1f}; {'; '.join(times)}", flush=True)


def compare_buckets(layers):
    count = len(layers.weights["o"])
    thin, medium = (kind(torch.device("cuda"), EPS) for kind in (ThinLinears, MediumLinears))
    for tokens in Buckets.padded(256).sizes:
        layers.inputs(tokens)
        blas = microseconds("cuBLAS", layers.cublas, count)
        fused = microseconds("engine", layers.chain(medium if tokens in TAKEN else thin), count)
        print(f"{tokens} lanes, us a layer: cuBLAS {blas:.1f}, engine {fused:.1f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--buckets", action="store_true")
    options = parser.parse_args()
    start = time.perf_counter()
    torch.manual_seed(0)
    layers = Layers(SHAPES, EPS, options.layers)
    if options.buckets:
        return compare_buckets(layers)
    engine = MediumLinears(torch.device("cuda"), EPS)
    for tokens in (65, *LANES):
        check("engine", engine, tokens)
    bandwidth = measure_ceilings().read_bytes_per_s
    floor = {name: 1e6 * weights[0].nbytes / bandwidth for name, weights in layers.weights.items()}
    print(f"us to read weights: {sum(floor.values()):.1f}", {name: f"{value:.2f}" for name, value in floor.items()})
    for tokens in SWEPT:
        tiles = {name: medium_tiles(layers.made(engine, name)[0], tokens) for name in SHAPES}
        print(
            f"engine's tiles at {tokens} lanes: { {name: tuple(map(int, chosen)) for name, chosen in tiles.items()} }"
        )
    swept = {}
    for tokens in SWEPT:
        swept[tokens] = sweep(layers, tokens)
        check("best of the sweep", linears_of(swept[tokens][0]), tokens)
    for tokens in LANES:
        compare(layers, tokens, *swept[min(size for size in SWEPT if size >= tokens)])
    compare_heads(layers)
    print(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
