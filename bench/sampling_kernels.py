"""Times the sampler in CUDA graphs, per kind of rows, beside a bare argmax of the same logits.

Logits are random, bf16: flat, as a model with random weights gives them, and peaked, a few of each row far above the
others. Warps of the programs of a split and of a row are the sampler's own choice first, then others.

usage: PYTHONPATH=. python bench/sampling_kernels.py [--json FILE]      (on a GPU; about a minute)
"""

import argparse
import json
from functools import partial
from pathlib import Path

import torch

from twostroke.bench.timing import graph_seconds
from twostroke.kernels import sample as kernels
from twostroke.sampling.state import SamplingState

SHAPES = ((32, 128_256), (256, 128_256), (238, 151_936), (1024, 128_256))
KINDS = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "min_p": {"min_p": 0.05},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9},
    "top_k, top_p": {"top_k": 50, "top_p": 0.9},
}
WARPS = ((4, 16), (8, 16), (2, 16), (4, 8))
LAUNCHES = 4


def make_logits(rows, vocab, peaked):
    logits = torch.randn(rows, vocab, device="cuda")
    if peaked:
        logits += 12 * (torch.rand(rows, vocab, device="cuda") < 1e-4)
    return logits.bfloat16()


def make_state(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    def column(value, dtype=torch.int32):
        return torch.full((rows,), value, dtype=dtype, device="cuda")

    return SamplingState(
        temperature=column(temperature, torch.float32),
        top_k=column(top_k),
        top_p=column(top_p, torch.float32),
        min_p=column(min_p, torch.float32),
        typical_p=column(1.0, torch.float32),
        seed_low=torch.arange(rows, dtype=torch.int32, device="cuda"),
        seed_high=column(0),
        outputs=column(7),
        min_outputs=column(0),
        stop_ids=torch.full((8, rows), -1, dtype=torch.int32, device="cuda"),
    )


def measure(work, **what):
    entry = {**what, "us": round(1e6 * graph_seconds(lambda: [work() for _ in range(LAUNCHES)]) / LAUNCHES, 2)}
    print(json.dumps(entry), flush=True)
    return entry


def measure_shape(rows, vocab, peaked):
    logits = make_logits(rows, vocab, peaked)
    common = {"rows": rows, "vocab": vocab, "logits": "peaked" if peaked else "flat"}
    positions = torch.arange(rows, dtype=torch.int32, device="cuda")
    tokens, errors = torch.zeros(2, rows, dtype=torch.int32, device="cuda")
    entries = [measure(lambda: logits.argmax(-1), kind="argmax", **common)]
    for split_warps, row_warps in WARPS:
        kernels._SPLIT_WARPS, kernels._ROW_WARPS = split_warps, row_warps
        for kind, parameters in KINDS.items():
            work = partial(kernels.sample_rows, logits, positions, *make_state(rows, **parameters), tokens, errors)
            entries.append(measure(work, kind=kind, **common, split_warps=split_warps, row_warps=row_warps))
    return entries


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    entries = [entry for shape in SHAPES for peaked in (False, True) for entry in measure_shape(*shape, peaked)]
    if options.json:
        options.json.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "kernels": entries}, indent=1) + "\n")


if __name__ == "__main__":
    main()
