"""Times the sampler in CUDA graphs, per kind of rows, beside a bare argmax of the same logits; and each of its kernels.

Logits are random, bf16: flat, as a model with random weights gives them (their deviation is 0.5), and peaked, a few of
each row far above the others. With top_p also float32, which penalties and biases make of them, and many equal logits,
whose bands are too full, so that rows are searched. Warps of the programs of a split and of a row, and registers of the
draw, are the sampler's own choice first, then others. The kernels' times are a profiler's, which adds to each.

usage: PYTHONPATH=. python bench/sampling_kernels.py [--json FILE]      (on a GPU; about two minutes)
       ... --shape ROWS VOCAB      this one alone: rows without filters, with every choice of warps and registers
"""

import argparse
import json
from functools import partial
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from twostroke.bench.kernels import Interval, KernelTimes
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
CHOICES = ((4, 16, 64), (8, 16, 64), (2, 16, 64), (4, 16, 128), (4, 8, 128))
"""Warps of a split's program, of a row's, registers of the draw."""
LAUNCHES = 4


def make_logits(rows, vocab, kind):
    logits = torch.randn(rows, vocab, device="cuda")
    if kind == "peaked":
        logits += 12 * (torch.rand(rows, vocab, device="cuda") < 1e-4)
    elif kind == "ties":
        logits = logits.round()
    else:
        logits *= 0.5
    return logits if kind == "float32" else logits.bfloat16()


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
    entry = {
        **what,
        "us": round(1e6 * graph_seconds(lambda: [work() for _ in range(LAUNCHES)]) / LAUNCHES, 2),
        "us by kernel": kernel_times(work),
    }
    print(json.dumps(entry), flush=True)
    return entry


def kernel_times(work, repetitions=10):
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repetitions):
            work()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    times = KernelTimes.of((Interval(e.name, e.time_range.start, e.time_range.end) for e in events), repetitions)
    return {name[:40]: round(us, 2) for name, us in times.us.items()}


def measure_shape(rows, vocab, logits_kind, kinds, choices):
    logits = make_logits(rows, vocab, logits_kind)
    common = {"rows": rows, "vocab": vocab, "logits": logits_kind}
    positions = torch.arange(rows, dtype=torch.int32, device="cuda")
    tokens, errors = torch.zeros(2, rows, dtype=torch.int32, device="cuda")
    entries = [measure(lambda: logits.argmax(-1), kind="argmax", **common)]
    for split_warps, row_warps, registers in choices:
        kernels._SPLIT_WARPS, kernels._ROW_WARPS, kernels._DRAW_REGISTERS = split_warps, row_warps, registers
        chosen = {"split_warps": split_warps, "row_warps": row_warps, "draw_registers": registers}
        for kind in kinds:
            state = make_state(rows, **KINDS[kind])
            work = partial(kernels.sample_rows, logits, positions, *state, tokens, errors)
            entries.append(measure(work, kind=kind, **common, **chosen))
    return entries


def measure_all(shape):
    if shape:
        yield from measure_shape(*shape, "flat", ["greedy", "temperature"], CHOICES)
        return
    for shape in SHAPES:
        for logits_kind in ("flat", "peaked"):
            yield from measure_shape(*shape, logits_kind, KINDS, CHOICES[:1])
        for logits_kind in ("float32", "ties"):
            yield from measure_shape(*shape, logits_kind, ["top_p"], CHOICES[:1])
    yield from measure_shape(*SHAPES[1], "flat", KINDS, CHOICES[1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shape", type=int, nargs=2, metavar=("ROWS", "VOCAB"))
    options = parser.parse_args()
    entries = list(measure_all(options.shape))
    if options.json:
        options.json.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "kernels": entries}, indent=1) + "\n")


if __name__ == "__main__":
    main()
