"""Random problems of paged attention, and their answer by dense attention in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from twostroke.attention.interface import Attention, LayerSpec
from twostroke.kernels.step import StepInputs

DUMMY_BLOCK = 0


@dataclass
class Case:
    """One step over sequences that have a past in the cache.

    Attributes:
        step: the step.
        sequences: row -> keys and values of all its positions, [positions, kv_heads, head_dim] each.
        q, k, v: inputs of the step; strided views of one merged matrix.
        answer: [T, heads, head_dim], NaN where nobody reads (dead lanes, padding).
    """

    step: StepInputs
    sequences: dict[int, tuple[torch.Tensor, torch.Tensor]]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    answer: torch.Tensor

    def fill(self, attention: Attention, layer: int = 0) -> None:
        """Poison the layer's cache with NaN, the dummy block too, then store the past that every sequence sees."""
        spec = attention.layers[layer]
        table = self.step.block_tables[spec.group]
        for cache, which in ((attention.keys[layer], 0), (attention.values[layer], 1)):
            cache.fill_(float("nan"))
            for row, past in self.past().items():
                position = torch.arange(max(0, past + 1 - spec.window) if spec.window else 0, past, device=table.device)
                blocks = table[row, position // attention.block_size].long()
                cache[blocks, :, position % attention.block_size] = self.sequences[row][which][position.cpu()].to(cache)

    def past(self) -> dict[int, int]:
        """Row -> positions before the step."""
        step = self.step
        rows = zip(step.lane_rows.tolist(), step.lane_lengths.tolist(), strict=True)
        lanes = {row: length - 1 for row, length in rows if length}
        return lanes | dict(zip(step.chunk_rows.tolist(), step.chunk_starts.tolist(), strict=True))


def make_case(
    spec: LayerSpec,
    *,
    lengths: list[int],
    chunks: list[tuple[int, int]],
    block_size: int,
    padding: int = 0,
    max_length: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> tuple[Case, int]:
    """Return a case and the number of blocks that its cache needs.

    Args:
        lengths: positions that each lane sees; 0 is a dead lane.
        chunks: (start, tokens) of each prompt chunk.
        padding: tokens behind the chunks that belong to none.
        max_length: the host's bound; None: the longest lane.
    """
    generator = torch.Generator().manual_seed(seed)
    totals = lengths + [start + tokens for start, tokens in chunks]
    rows = torch.randperm(len(totals) + 2, generator=generator)[: len(totals)].tolist()
    dummy_row = len(totals) + 2
    table, num_blocks = _shuffled_table(totals, rows, dummy_row + 1, spec.group, block_size, generator)
    sequences = {
        row: tuple(torch.randn(2, total, spec.kv_heads, spec.head_dim, generator=generator).to(dtype))
        for row, total in zip(rows, totals, strict=True)
    }
    # A dead lane points at the dummy row, or still at the row that it had.
    lane_rows = [dummy_row if not length and lane % 2 else rows[lane] for lane, length in enumerate(lengths)]
    spans = [(row, max(length - 1, 0), min(length, 1)) for row, length in zip(rows, lengths, strict=False)]
    spans += [(row, start, tokens) for row, (start, tokens) in zip(rows[len(lengths) :], chunks, strict=True)]
    tokens = len(lengths) + sum(count for _, count in chunks) + padding
    heads = spec.heads + 2 * spec.kv_heads
    merged = torch.randn(tokens, heads * spec.head_dim, generator=generator).to(dtype).view(tokens, heads, -1)
    q, k, v = merged.split([spec.heads, spec.kv_heads, spec.kv_heads], 1)
    slots = torch.full((spec.group + 1, tokens), -1)
    slots[spec.group] = torch.arange(tokens) % block_size
    answer = torch.full((tokens, spec.heads, spec.head_dim), float("nan"), dtype=torch.float64)
    place = 0
    for lane, (row, start, count) in enumerate(spans):
        keys, values = sequences[row]
        here, span = slice(place, place + count), slice(start, start + count)
        k[here], v[here] = keys[span], values[span]
        position = torch.arange(start, start + count)
        slots[spec.group, here] = table[spec.group, row, position // block_size] * block_size + position % block_size
        answer[here] = dense_attention(spec, q[here], keys, values)
        place += count if lane >= len(lengths) else 1
    offsets = torch.tensor([len(lengths)] + [count for _, count in chunks]).cumsum(0)
    step = StepInputs(
        input_ids=torch.zeros(tokens, dtype=torch.int64),
        positions=torch.zeros(tokens, dtype=torch.int64),
        cache_slots=slots,
        lane_rows=torch.tensor(lane_rows, dtype=torch.int32),
        lane_lengths=torch.tensor(lengths, dtype=torch.int32),
        chunk_rows=torch.tensor(rows[len(lengths) :], dtype=torch.int32),
        chunk_starts=torch.tensor([start for start, _ in chunks], dtype=torch.int32),
        chunk_offsets=offsets.int(),
        block_tables=table.int(),
        sample_index=None,
        max_length=max(lengths, default=0) if max_length is None else max_length,
        max_chunk=max((count for _, count in chunks), default=0),
    )
    step = StepInputs(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in step))
    merged = merged.to(device)
    q, k, v = merged.split([spec.heads, spec.kv_heads, spec.kv_heads], 1)
    return Case(step, sequences, q, k, v, answer.to(device)), num_blocks


def _shuffled_table(
    totals: list[int], rows: list[int], num_rows: int, group: int, block_size: int, generator: torch.Generator
) -> tuple[torch.Tensor, int]:
    """Return a block table [group + 1, num_rows, M] of shuffled blocks, and the number of blocks.

    Entries that no sequence owns point at a block full of NaN; those of other rows are the dummy block.
    """
    counts = [-(-total // block_size) for total in totals]
    num_blocks = sum(counts) + 2
    free = (torch.randperm(num_blocks - 2, generator=generator) + 1).tolist()
    table = torch.full((group + 1, num_rows, max(counts) + 1), DUMMY_BLOCK)
    for row, count in zip(rows, counts, strict=True):
        table[group, row] = num_blocks - 1
        table[group, row, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int64)
    return table, num_blocks


def dense_attention(spec: LayerSpec, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return float64 [queries, heads, head_dim]: the queries are the last of the positions of one sequence.

    Here the mask is written out and the softmax is PyTorch's, so nothing is shared with what is tested.
    """
    group = spec.heads // spec.kv_heads
    keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * spec.scale
    position = torch.arange(len(keys))
    query = position[len(keys) - len(q) :, None]
    hidden = position > query
    if spec.window:
        hidden |= position <= query - spec.window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)
