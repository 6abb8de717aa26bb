"""Times prompt attention over tile sizes, as TFLOP/s of the visible half, beside the ceiling of a large product.

usage: python bench/prefill_attention.py [--chosen | --rotated]     (on a GPU; about 45 s, most of it compiling; prints
one JSON object; `--chosen`: only the tiles that the backend takes, beside the kernel in CUDA C++; `--rotated`: that
kernel behind the pass that norms, rotates and stores, which rotates queries, too, or leaves them to it)

Shapes are those of Qwen3-0.6B (16 query heads, 8 kv heads) and Llama-3.1-8B (32, 8), head dimension 128, bf16. A case
is the (first position, tokens) of its chunks; the step's other sizes are those of the captured shape for it.
"""

import argparse
import json

import torch

from twostroke.bench.ceilings import measure_ceilings
from twostroke.bench.timing import graph_seconds
from twostroke.device.shapes import PaddedShapes, StepShape
from twostroke.kernels.ops import Rotary
from twostroke.kernels.paged_prefill import PrefillTiles, prefill_attention, prefill_tiles
from twostroke.kernels.prefill_schedule import make_prefill_schedule
from twostroke.kernels.rotary_write import rotate_and_write
from twostroke.kernels.streamed_prefill import StreamedPrefill, tile_tokens

KV_HEADS, DIM, BLOCK, LAYERS, WIDTH = 8, 128, 16, 4, 512
HEADS = {"0.6B": 16, "8B": 32}
CASES = {
    "1 x 100": [(0, 100)],
    "20 x 100": [(0, 100)] * 20,
    "4 x 512": [(0, 512)] * 4,
    "1 x 2,048": [(0, 2048)],
    "1 x 512 after 1,536": [(1536, 512)],
    "1 x 2,048 after 6,144": [(6144, 2048)],
    "12 x 100-1,024": [(0, 100 + 84 * i) for i in (5, 0, 11, 3, 8, 1, 10, 6, 2, 9, 4, 7)],
}
TILES = [
    PrefillTiles(128, 64, warps=8, stages=3),
    PrefillTiles(128, 64, warps=8, stages=5),
    PrefillTiles(128, 128, warps=8, stages=3),
    PrefillTiles(128, 32, warps=8, stages=7),
    PrefillTiles(64, 64, warps=4, stages=3),
    PrefillTiles(64, 64, warps=4, stages=5),
]


def flop(chunks, heads):
    """Two products over the positions that each query sees."""
    seen = sum(tokens * start + tokens * (tokens + 1) // 2 for start, tokens in chunks)
    return 4 * DIM * heads * seen


def inputs_of(chunks, heads):
    """Queries in the padded size, a table of shuffled blocks, and the chunks with those not in use behind them."""
    needed = StepShape(0, len(chunks), sum(tokens for _, tokens in chunks), len(chunks))
    shape = PaddedShapes(256, 256, 2048 if needed.tokens <= 2048 else 8192).fit(needed)
    blocks = len(chunks) * WIDTH + 1
    table = 1 + torch.randperm(blocks - 1, device="cuda").int().view(len(chunks), WIDTH)
    table = torch.cat([table, torch.zeros_like(table[:1])])
    unused = shape.chunks - len(chunks)

    def ints(values):
        return torch.tensor(values, device="cuda", dtype=torch.int32)

    rows = ints([*range(len(chunks)), *[len(chunks)] * unused])
    starts = ints([*(start for start, _ in chunks), *[0] * unused])
    offsets = ints([*(sum(tokens for _, tokens in chunks[:i]) for i in range(len(chunks) + 1))])
    offsets = torch.cat([offsets, offsets[-1:].expand(unused)])
    q = torch.randn(shape.tokens, heads, DIM, device="cuda", dtype=torch.bfloat16)
    return q, table, rows, starts, offsets, blocks


def schedule_of(inputs, heads):
    q, _, *chunks, _ = inputs
    return make_prefill_schedule(*chunks, tokens=len(q), tile_tokens=tile_tokens(heads, KV_HEADS))


def seconds_of(chunks, heads, tiles=None):
    """Of a layer; without tiles, by the kernel in CUDA C++, whose schedule is made beforehand."""
    inputs = inputs_of(chunks, heads)
    q, table, rows, starts, offsets, blocks = inputs
    caches = torch.randn(LAYERS, 2, blocks, KV_HEADS, BLOCK, DIM, device="cuda", dtype=torch.bfloat16)
    out, scale = torch.empty_like(q), DIM**-0.5
    streamed, schedule = (None, None) if tiles else (StreamedPrefill(q.device), schedule_of(inputs, heads))

    torch.cuda.synchronize()  # the work runs on a stream that does not wait for the default one

    def work():
        for keys, values in caches:
            if tiles:
                prefill_attention(
                    q, keys, values, table, rows, starts, offsets, out, scale=scale, window=0, tiles=tiles
                )
            else:
                streamed(q, keys, values, table, schedule, out, scale=scale, early=True)

    return graph_seconds(work) / LAYERS


def rotated_seconds_of(chunks, heads, on_their_way):
    """Of a layer with norms of queries and keys, from the end of its q/k/v product to that of attention."""
    inputs = inputs_of(chunks, heads)
    q, table, *_, offsets, blocks = inputs
    caches = torch.randn(LAYERS, 2, blocks, KV_HEADS, BLOCK, DIM, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, len(q), KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(DIM, device="cuda", dtype=torch.bfloat16)
    rotary = Rotary(*torch.randn(2, len(q), DIM // 2, device="cuda"), weight, weight, 1e-6)
    slots = BLOCK + torch.arange(len(q), device="cuda")
    out, scale = torch.empty_like(q), DIM**-0.5
    attend, schedule = StreamedPrefill(q.device), schedule_of(inputs, heads)
    torch.cuda.synchronize()

    def work():
        for keys, values in caches:
            rotate_and_write(q, k, v, *rotary, keys, values, slots, offsets, rotate_queries=not on_their_way)
            queries = rotary if on_their_way else None
            attend(q, keys, values, table, schedule, out, scale=scale, rotary=queries, early=True)

    return graph_seconds(work) / LAYERS


def schedule_seconds_of(chunks, heads):
    inputs = inputs_of(chunks, heads)
    torch.cuda.synchronize()
    return graph_seconds(lambda: [schedule_of(inputs, heads) for _ in range(LAYERS)]) / LAYERS


def in_us(times):
    return {name: round(1e6 * seconds, 1) for name, seconds in times.items()}


def rates_of(times, heads, ceiling):
    rates = {name: flop(CASES[name], heads) / seconds for name, seconds in times.items()}
    return {
        "us": in_us(times),
        "tflop_per_s": {name: round(rate * 1e-12, 1) for name, rate in rates.items()},
        "share_of_ceiling": {name: round(rate / ceiling, 3) for name, rate in rates.items()},
    }


def over_tiles(model, heads, ceiling):
    chosen = prefill_tiles((9, 0), heads // KV_HEADS, DIM, torch.bfloat16)
    for tiles in TILES:
        times = {name: seconds_of(chunks, heads, tiles) for name, chunks in CASES.items()}
        yield {"model": model, "tiles": tiles._asdict(), "chosen": tiles == chosen} | rates_of(times, heads, ceiling)


def as_chosen(model, heads, ceiling):
    """The kernel in Triton with its tiles, and the one in CUDA C++, case by case."""
    chosen = prefill_tiles((9, 0), heads // KV_HEADS, DIM, torch.bfloat16)
    tiled, streamed, schedules = {}, {}, {}
    for name, chunks in CASES.items():
        tiled[name], streamed[name] = seconds_of(chunks, heads, chosen), seconds_of(chunks, heads)
        schedules[name] = schedule_seconds_of(chunks, heads)
    yield {"model": model, "kernel": "Triton"} | rates_of(tiled, heads, ceiling)
    yield (
        {"model": model, "kernel": "CUDA C++"}
        | rates_of(streamed, heads, ceiling)
        | {
            "schedule_us": in_us(schedules),
            "times_as_fast": {name: round(tiled[name] / streamed[name], 2) for name in CASES},
        }
    )


def rotated(model, heads, ceiling):
    """Queries rotated by a pass of its own, and on their way, case by case."""
    ways = ["by a pass", "on their way"]
    times = {way: {name: rotated_seconds_of(CASES[name], heads, way == ways[1]) for name in CASES} for way in ways}
    backend = StreamedPrefill(torch.device("cuda"))
    taken = {name: backend.rotates(len(inputs_of(chunks, heads)[0]), heads, KV_HEADS) for name, chunks in CASES.items()}
    yield {"model": model} | {way: in_us(times[way]) for way in ways} | {"on their way in models": taken}


def main():
    parser = argparse.ArgumentParser()
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--chosen", dest="way", action="store_const", const=as_chosen, default=over_tiles)
    group.add_argument("--rotated", dest="way", action="store_const", const=rotated)
    way = parser.parse_args().way
    ceiling = measure_ceilings().flop_per_s
    found = [line for model, heads in HEADS.items() for line in way(model, heads, ceiling)]
    report = {"gpu": torch.cuda.get_device_name(), "ceiling_tflop_per_s": round(ceiling * 1e-12, 1), "found": found}
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
