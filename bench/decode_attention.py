"""Times decode attention, rotation and cache write included, in CUDA graphs over several layers' caches.

Against the three launches that one kernel replaced, alone and between a layer's q/k/v and output products, with and
without programmatic dependent launch; then a sweep over tiles and shares. A measurement that fails is kept as its
error. Microseconds are per layer; shares are those of the read ceiling, read first.

usage: PYTHONPATH=. python bench/decode_attention.py [--json FILE] [--no-sweep]      (on a GPU; some minutes)
"""

import argparse
import json
import sys
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parent / "experiments"))
import three_launches

from twostroke.bench.ceilings import measure_ceilings
from twostroke.bench.offline_workloads import small
from twostroke.bench.timing import graph_seconds
from twostroke.kernels import ops
from twostroke.kernels.decode_schedule import DecodeSchedule, make_schedule
from twostroke.kernels.ops import Rotary
from twostroke.kernels.paged_decode import DecodeWorkspace, decode_attention, decode_tiles, extra_programs, is_crowded
from twostroke.kernels.rotary_write import rotate_and_write
from twostroke.kernels.streamed_decode import StreamedDecode, streamed_tiles

BLOCK, LAYERS = 16, 6


class Shape(NamedTuple):
    name: str
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    norms: bool


def lengths_of_small(outputs):
    """Positions of the requests of `small` that decode when each has so many output tokens."""
    workload = small()
    rows = zip(workload.prompts, workload.outputs, strict=True)
    return [len(prompt) + outputs for prompt, wanted in rows if wanted > outputs]


SMALL_CASES = {f"small, {outputs} out": lengths_of_small(outputs) for outputs in (100, 450, 600, 700, 850)}
SHAPES = [Shape("8b", 32, 8, 128, 4096, norms=False), Shape("0.6b", 16, 8, 128, 1024, norms=True)]
CASES = {
    "32 x 448": [448] * 32,
    "32 x 4224": [4224] * 32,
    "32 x 8192": [8192] * 32,
    "256 x 100..2000": torch.randint(100, 2001, (256,), generator=torch.Generator().manual_seed(0)).tolist(),
    "128 x 200..1600": torch.randint(200, 1601, (128,), generator=torch.Generator().manual_seed(2)).tolist(),
    "1024 x 222": [222] * 1024,
    "1024 x 100..350": torch.randint(100, 351, (1024,), generator=torch.Generator().manual_seed(1)).tolist(),
    "8 x 16384": [16_384] * 8,
    "31 x 200, 1 x 32768": [200] * 31 + [32_768],
    **SMALL_CASES,
}
PRODUCT_CASES = ["32 x 448", "32 x 4224", "256 x 100..2000", "128 x 200..1600", "1024 x 222", *SMALL_CASES]
SWEEP_CASES = ["32 x 448", "32 x 4224", "256 x 100..2000", "1024 x 222", "8 x 16384", "31 x 200, 1 x 32768"]
KERNELS = [(64, 4, 3), (64, 4, 5), (64, 4, 7), (64, 8, 5), (64, 2, 5), (32, 4, 5), (32, 4, 7), (128, 8, 5)]
"""Positions of a tile, warps, stages."""


def bf16(*shape, scale=1.0):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


class Problem:
    """One shape's caches, for all cases, and the inputs of one case."""

    def __init__(self, shape):
        self.shape = shape
        self.blocks = 1 + max(sum(-(-n // BLOCK) for n in lengths) for lengths in CASES.values())
        size = (self.blocks, shape.kv_heads, BLOCK, shape.head_dim)
        self.caches = [(bf16(*size), bf16(*size)) for _ in range(LAYERS)]
        qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.qkv = [bf16(qkv, shape.hidden, scale=0.02) for _ in range(LAYERS)]
        self.output = [bf16(shape.hidden, shape.heads * shape.head_dim, scale=0.02) for _ in range(LAYERS)]

    def set_case(self, lengths):
        shape, lanes = self.shape, len(lengths)
        processors = torch.cuda.get_device_properties().multi_processor_count
        crowded = is_crowded(lanes, shape.kv_heads, processors)
        capability = torch.cuda.get_device_capability()
        self.tiles = decode_tiles(capability, shape.head_dim, torch.bfloat16, crowded=crowded)
        self.streamed_tiles = streamed_tiles(lanes, shape.kv_heads, processors)
        counts = [-(-n // BLOCK) for n in lengths]
        free = (1 + torch.randperm(self.blocks - 1)).int()
        table = torch.zeros(lanes, max(counts), dtype=torch.int32)
        at = 0
        for lane, count in enumerate(counts):
            table[lane, :count] = free[at : at + count]
            at += count
        last = torch.tensor(lengths) - 1
        slots = table[torch.arange(lanes), last // BLOCK].long() * BLOCK + last % BLOCK
        self.table, self.slots = table.cuda(), slots.cuda()
        self.rows = torch.arange(lanes, device="cuda", dtype=torch.int32)
        self.lengths = torch.tensor(lengths, device="cuda", dtype=torch.int32)
        self.bytes = 2 * sum(lengths) * shape.kv_heads * shape.head_dim * 2
        self.merged = bf16(lanes, shape.heads + 2 * shape.kv_heads, shape.head_dim)
        self.hidden = bf16(lanes, shape.hidden)
        inv_freq = 500_000.0 ** (-torch.arange(shape.head_dim // 2, device="cuda") / (shape.head_dim // 2))
        norm = torch.ones(shape.head_dim, device="cuda", dtype=torch.bfloat16) if shape.norms else None
        self.rotary = Rotary(*ops.rotary_tables(last.cuda(), inv_freq, 1.0), norm, norm, 1e-6)
        self.scale = shape.head_dim**-0.5

    def split(self, merged):
        shape = self.shape
        heads = merged.view(-1, shape.heads + 2 * shape.kv_heads, shape.head_dim)
        return heads.split((shape.heads, shape.kv_heads, shape.kv_heads), 1)

    def old(self):
        """Return the work of one layer by three launches: a function of (layer, merged) -> output."""
        shape, lanes = self.shape, len(self.rows)
        tiles = three_launches.decode_tiles(torch.cuda.get_device_capability(), shape.head_dim, torch.bfloat16)
        processors = torch.cuda.get_device_properties().multi_processor_count
        splits = three_launches.decode_splits(lanes, shape.kv_heads, processors, tiles)
        size = three_launches.workspace_size(lanes, shape.heads, shape.head_dim, splits)
        workspace = torch.empty(size, device="cuda")
        first = torch.zeros(1, device="cuda", dtype=torch.int32)

        def work(layer, merged):
            (q, k, v), (keys, values) = self.split(merged), self.caches[layer]
            out = torch.empty(q.shape, device="cuda", dtype=q.dtype)
            rotate_and_write(q, k, v, *self.rotary, keys, values, self.slots, first)
            three_launches.decode_attention(
                q, keys, values, self.table, self.rows, self.lengths, out, workspace,
                scale=self.scale, window=0, splits=splits, tiles=tiles,
            )  # fmt: skip
            return out

        return work

    def schedule(self, tiles):
        """Return a schedule, and what writes it."""
        processors = torch.cuda.get_device_properties().multi_processor_count
        extra = extra_programs(self.shape.kv_heads, processors, tiles)
        schedule = DecodeSchedule.empty(len(self.rows), extra, torch.device("cuda"))
        cut = {"window": 0, "tile": tiles.positions, "min_share": tiles.min_share, "rounds": tiles.rounds}
        return schedule, partial(make_schedule, schedule, self.rows, self.lengths, **cut)

    def streamed(self, early):
        """Return the same by the kernel in CUDA C++."""
        return self.new(self.streamed_tiles, early, StreamedDecode(torch.device("cuda")))

    def new(self, tiles, early, attend=decode_attention):
        """Return the same by one kernel, its schedule made."""
        shape = self.shape
        schedule, write = self.schedule(tiles)
        write()
        workspace = DecodeWorkspace.zeros(2 * schedule.extra * shape.heads, shape.head_dim, torch.device("cuda"))
        torch.cuda.synchronize()

        def work(layer, merged):
            (q, k, v), (keys, values) = self.split(merged), self.caches[layer]
            out = torch.empty(q.shape, device="cuda", dtype=q.dtype)
            attend(
                q, k, v, self.rotary, keys, values, self.table, self.slots, schedule, out, workspace,
                scale=self.scale, tiles=tiles, early=early,
            )  # fmt: skip
            return out

        return work

    def alone_us(self, work):
        return 1e6 * graph_seconds(lambda: [work(layer, self.merged) for layer in range(LAYERS)]) / LAYERS

    def products_us(self, work):
        """The products before and after attention, each on the result of the one before it."""

        def chain():
            x = self.hidden
            for layer in range(LAYERS):
                merged = functional.linear(x, self.qkv[layer])
                mixed = merged if work is None else work(layer, merged).flatten(1)
                x = functional.linear(mixed[:, : self.output[layer].shape[1]], self.output[layer])

        return 1e6 * graph_seconds(chain) / LAYERS

    def schedule_us(self):
        (_, write), launches = self.schedule(self.streamed_tiles), range(8)
        return 1e6 * graph_seconds(lambda: [write() for _ in launches]) / len(launches)

    def error(self, work):
        """Norm of the difference to the three launches, over the norm."""
        expected = self.old()(0, self.merged.clone()).double()
        got = work(0, self.merged.clone()).double()
        return float((got - expected).norm() / expected.norm())


def attempt(measure, *arguments):
    """Return what `measure` returns, or the error as text: one that fails costs no other."""
    try:
        return round(measure(*arguments), 6)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]


def measure_case(problem, name, ceiling):
    problem.set_case(CASES[name])
    ways = {
        "old": problem.old(),
        "one": problem.new(problem.tiles, early=False),
        "one early": problem.new(problem.tiles, early=True),
        "streamed": problem.streamed(early=False),
        "streamed early": problem.streamed(early=True),
    }
    entry = {
        "shape": problem.shape.name,
        "case": name,
        "lanes": len(problem.rows),
        "error": {way: attempt(problem.error, ways[way]) for way in ("one", "streamed")},
        "us": {},
        "share": {},
    }
    for way, work in ways.items():
        entry["us"][way] = us = attempt(problem.alone_us, work)
        entry["share"][way] = us if isinstance(us, str) else round(problem.bytes / us * 1e6 / ceiling, 4)
    if name in PRODUCT_CASES:
        entry["with_products_us"] = {way: attempt(problem.products_us, work) for way, work in ways.items()}
        entry["with_products_us"]["products alone"] = attempt(problem.products_us, None)
    entry["schedule_us"] = attempt(problem.schedule_us)
    return entry


def sweep_tiles(problem, ceiling, entries):
    """Append what each choice of tiles takes."""
    base = problem.tiles
    kernels = [base._replace(positions=p, warps=w, stages=s) for p, w, s in KERNELS]
    options = [
        tiles._replace(programs=programs)
        for tiles in [base, base._replace(ahead=0), *kernels]
        for programs in (2, 3, 4, 6)
    ]
    options += [base._replace(min_share=share) for share in (2, 8)]
    for name in SWEEP_CASES:
        problem.set_case(CASES[name])
        for tiles in options:
            us = attempt(lambda tiles=tiles: problem.alone_us(problem.new(tiles, early=True)))
            share = us if isinstance(us, str) else round(problem.bytes / us * 1e6 / ceiling, 4)
            entries.append({"case": name, "tiles": tiles._asdict(), "us": us, "share": share})
        best = sorted((e for e in entries if e["case"] == name and isinstance(e["us"], float)), key=lambda e: e["us"])
        for entry in best[:3]:
            print("sweep", name, entry["tiles"], entry["us"], entry["share"], flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-sweep", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    ceiling = measure_ceilings().read_bytes_per_s
    result = {
        "benchmark": "decode-attention", "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(), "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "read_bytes_per_s": ceiling, "cases": [], "sweep": [],
    }  # fmt: skip

    def keep():
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n")

    for shape in SHAPES:
        problem = Problem(shape)
        for name in CASES:
            result["cases"].append(measure_case(problem, name, ceiling))
            print(json.dumps(result["cases"][-1]), flush=True)
            keep()
        if shape is SHAPES[0] and not options.no_sweep:
            sweep_tiles(problem, ceiling, result["sweep"])
            keep()
        del problem


if __name__ == "__main__":
    main()
