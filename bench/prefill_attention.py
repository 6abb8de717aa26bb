"""Times prompt attention over tile sizes, as TFLOP/s of the visible half, beside the ceiling of a large product.

usage: python bench/prefill_attention.py     (on a GPU; about 45 s, most of it compiling; prints one JSON object)

Shapes are those of Qwen3-0.6B (16 query heads, 8 kv heads) and Llama-3.1-8B (32, 8), head dimension 128, bf16. A case
is the (first position, tokens) of its chunks; the step's other sizes are those of the captured shape for it.
"""

import json

import torch

from twostroke.bench.ceilings import measure_ceilings
from twostroke.bench.timing import graph_seconds
from twostroke.device.shapes import PaddedShapes, StepShape
from twostroke.kernels.paged_prefill import PrefillTiles, prefill_attention, prefill_tiles

KV_HEADS, DIM, BLOCK, LAYERS, WIDTH = 8, 128, 16, 4, 512
HEADS = {"0.6B": 16, "8B": 32}
CASES = {
    "1 x 100": [(0, 100)],
    "20 x 100": [(0, 100)] * 20,
    "4 x 512": [(0, 512)] * 4,
    "1 x 2,048": [(0, 2048)],
    "1 x 512 after 1,536": [(1536, 512)],
    "1 x 2,048 after 6,144": [(6144, 2048)],
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
    shape = PaddedShapes(256, 256, 2048).fit(needed)
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


def seconds_of(chunks, heads, tiles):
    q, table, rows, starts, offsets, blocks = inputs_of(chunks, heads)
    caches = torch.randn(LAYERS, 2, blocks, KV_HEADS, BLOCK, DIM, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)

    def work():
        for keys, values in caches:
            prefill_attention(
                q, keys, values, table, rows, starts, offsets, out, scale=DIM**-0.5, window=0, tiles=tiles
            )

    return graph_seconds(work) / LAYERS


def main():
    ceiling = measure_ceilings().flop_per_s
    found = []
    for model, heads in HEADS.items():
        chosen = prefill_tiles((9, 0), heads // KV_HEADS, DIM, torch.bfloat16)
        for tiles in TILES:
            times = {name: seconds_of(chunks, heads, tiles) for name, chunks in CASES.items()}
            rates = {name: flop(CASES[name], heads) / seconds for name, seconds in times.items()}
            found.append(
                {
                    "model": model,
                    "tiles": tiles._asdict(),
                    "chosen": tiles == chosen,
                    "us": {name: round(1e6 * seconds, 1) for name, seconds in times.items()},
                    "tflop_per_s": {name: round(rate * 1e-12, 1) for name, rate in rates.items()},
                    "share_of_ceiling": {name: round(rate / ceiling, 3) for name, rate in rates.items()},
                }
            )
    report = {"gpu": torch.cuda.get_device_name(), "ceiling_tflop_per_s": round(ceiling * 1e-12, 1), "found": found}
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
