"""Times decode attention over tile and split sizes, as bytes per second of the KV cache, in CUDA graphs.

usage: python bench/decode_attention.py [lengths ...]     (on a GPU; 32 lanes, 8 kv heads, head dimension 128)
"""

import sys

import torch

from twostroke.bench.timing import graph_seconds
from twostroke.kernels.paged_decode import DecodeTiles, decode_attention, workspace_size

LANES, HEADS, KV_HEADS, DIM, BLOCK, LAYERS = 32, 32, 8, 128, 16, 6


def main(lengths):
    blocks = LANES * max(lengths) // BLOCK + 1
    shape = (blocks, KV_HEADS, BLOCK, DIM)
    caches = [[torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)] for _ in range(LAYERS)]
    table = (1 + torch.randperm(blocks - 1, device="cuda")).int().view(LANES, -1).contiguous()
    rows = torch.arange(LANES, device="cuda", dtype=torch.int32)
    q = torch.randn(LANES, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)
    workspace = torch.empty(workspace_size(LANES, HEADS, DIM, 16), device="cuda")
    for positions, warps, stages in (
        (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 2, 3), (128, 4, 2), (128, 8, 2), (128, 4, 3), (32, 4, 4), (32, 2, 4),
    ):  # fmt: skip
        for splits in (2, 4, 8):
            tiles = DecodeTiles(positions, warps, stages, waves=4, min_splits=2, min_share=2)
            line = f"tile {positions:4} warps {warps} stages {stages} splits {splits}:"
            for length in lengths:
                lens = torch.full((LANES,), length, device="cuda", dtype=torch.int32)

                def work(lens=lens, splits=splits, tiles=tiles):
                    for keys, values in caches:
                        decode_attention(
                            q, keys, values, table, rows, lens, out, workspace,
                            scale=0.088, window=0, splits=splits, tiles=tiles,
                        )  # fmt: skip

                ms = 1e3 * graph_seconds(work) / LAYERS
                line += f"  {length}: {ms * 1e3:6.1f} us {2 * LANES * length * KV_HEADS * DIM * 2 / ms / 1e9:5.2f} TB/s"
            print(line, flush=True)


if __name__ == "__main__":
    main([int(length) for length in sys.argv[1:]] or [448, 4224, 8192])
