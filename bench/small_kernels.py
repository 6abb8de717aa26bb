"""Times the norm and the gated activation in CUDA graphs, and their share of the copy that their bytes take.

Each of 24 launches has tensors of its own: with few rows all of them lie in the L2 cache, as in a model, with many they
come from memory. Warps of the norm are the kernel's own choice and half and twice of it.

usage: PYTHONPATH=. python bench/small_kernels.py [--json FILE]      (on a GPU; some 15 s)
"""

import argparse
import json
from pathlib import Path

import torch

from twostroke.bench.timing import graph_seconds
from twostroke.kernels import activation, norm

ROWS = (32, 256, 1024)
HIDDEN, INNER = (4096, 1024), (14336, 3072)
COPY_BYTES_PER_S = 4.26e12
LAUNCHES = 24


def bf16(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def measure(kernel, rows, width, moved, work, **more):
    us = 1e6 * graph_seconds(lambda: [work(i) for i in range(LAUNCHES)]) / LAUNCHES
    share = moved / us * 1e6 / COPY_BYTES_PER_S
    entry = {"kernel": kernel, "rows": rows, "width": width, **more, "us": round(us, 3), "share": round(share, 4)}
    print(json.dumps(entry), flush=True)
    return entry


def measure_norm(rows, width):
    x = [bf16(rows, width) for _ in range(LAUNCHES)]
    weight, own = bf16(width), norm.norm_warps(width)
    entries = []
    for warps in sorted({max(1, own // 2), own, min(16, 2 * own)}):
        norm.norm_warps = lambda width, warps=warps: warps
        moved = rows * width * 2
        entries.append(
            measure(
                "rms_norm", rows, width, 2 * moved, lambda i: norm.rms_norm(x[i], weight, 1e-5), warps=warps,
            )
        )  # fmt: skip
    return entries


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    entries, choose = [], norm.norm_warps
    for rows in ROWS:
        for width in HIDDEN:
            entries += measure_norm(rows, width)
            norm.norm_warps = choose
        for width in INNER:
            gate_up = [bf16(rows, 2 * width) for _ in range(LAUNCHES)]
            moved = 3 * rows * width * 2
            entries.append(measure("silu_mul", rows, width, moved, lambda i, g=gate_up: activation.silu_mul(g[i])))
    if options.json:
        options.json.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "kernels": entries}, indent=1) + "\n")


if __name__ == "__main__":
    main()
