"""Which tiles of queries the prompt chunks of a step have, longest first, for `streamed_prefill.cuh`.

Written on the device, once a step, since the host does not know how long chunks are.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .paged_prefill import CHUNKS_AT_ONCE, find_tile


class PrefillSchedule(NamedTuple):
    """The tiles of a step.

    Attributes:
        words: int32 [1 + most tiles, 4]: the number of tiles, then of each the row of its chunk, the position of its
            first token, that token's place in the step, and the number of its tokens. Tiles of padding come last and
            see nothing: the position of the first token is as far before 0 as they have tokens.
        tile_tokens: tokens of a tile, at most.
    """

    words: torch.Tensor
    tile_tokens: int


@triton.jit
def _store(words_ptr, record, row, position, token, tokens):
    words_ptr += (1 + record) * 4
    tl.store(words_ptr, row)
    tl.store(words_ptr + 1, position)
    tl.store(words_ptr + 2, token)
    tl.store(words_ptr + 3, tokens)


@triton.jit(
    do_not_specialize=["num_tokens", "num_chunks"],
    do_not_specialize_on_alignment=["chunk_rows_ptr", "chunk_starts_ptr", "chunk_offsets_ptr"],
)
def prefill_schedule_kernel(
    chunk_rows_ptr, chunk_starts_ptr, chunk_offsets_ptr, words_ptr, num_tokens, num_chunks, TOKENS: tl.constexpr
):
    """One program per tile that there may be, numbered as in `paged_prefill`."""
    tile = tl.program_id(0)
    chunk, chunk_begin, chunk_end, tile_token = find_tile(tile, chunk_offsets_ptr, num_tokens, num_chunks, TOKENS)
    real = chunk < num_chunks
    start = tl.load(chunk_starts_ptr + chunk, mask=real, other=0)
    row = tl.load(chunk_rows_ptr + chunk, mask=real, other=0)
    # Where a tile would end if it had all its tokens: what tiles are sorted by.
    reach = start + tile_token + TOKENS
    before = num_chunks * 0
    tiles = num_chunks * 0
    for base in range(0, num_chunks, CHUNKS_AT_ONCE):
        index = base + tl.arange(0, CHUNKS_AT_ONCE)
        inside = index < num_chunks
        begin = tl.load(chunk_offsets_ptr + index, mask=inside, other=0)
        end = tl.load(chunk_offsets_ptr + index + 1, mask=inside, other=0)
        other_start = tl.load(chunk_starts_ptr + index, mask=inside, other=0)
        count = (end - begin + TOKENS - 1) // TOKENS
        # Of equal ones those of the first chunk come first.
        shorter = tl.maximum(reach - other_start - (index < chunk).to(tl.int32), 0) // TOKENS
        before += tl.sum(count - tl.minimum(shorter, count), 0)
        tiles += tl.sum(count, 0)
    last = tl.load(chunk_offsets_ptr + num_chunks)
    if tile == 0:
        tl.store(words_ptr, tiles + (num_tokens - last + TOKENS - 1) // TOKENS)
    if chunk_begin + tile_token >= chunk_end:
        return
    tokens = tl.minimum(TOKENS, chunk_end - chunk_begin - tile_token)
    record = tl.where(real, before, tiles + tile_token // TOKENS)
    position = tl.where(real, start + tile_token, -tokens)
    _store(words_ptr, record, row, position, chunk_begin + tile_token, tokens)


def make_prefill_schedule(
    chunk_rows: torch.Tensor,
    chunk_starts: torch.Tensor,
    chunk_offsets: torch.Tensor,
    *,
    tokens: int,
    tile_tokens: int,
) -> PrefillSchedule:
    """Return the schedule of a step.

    Args:
        chunk_rows, chunk_starts: int32 [C], row and first position of each chunk.
        chunk_offsets: int32 [C + 1], where each chunk begins among the step's tokens; tokens from the last one on are
            padding, those before the first are not the schedule's.
        tokens: of the step.
        tile_tokens: of a tile.
    """
    chunks = chunk_rows.shape[0]
    most = tokens // tile_tokens + chunks + 1
    words = torch.empty(1 + most, 4, dtype=torch.int32, device=chunk_rows.device)
    prefill_schedule_kernel[(most,)](
        chunk_rows, chunk_starts, chunk_offsets, words, tokens, chunks, TOKENS=tile_tokens, num_warps=1
    )  # fmt: skip
    return PrefillSchedule(words, tile_tokens)
