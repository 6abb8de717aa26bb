"""What a step's device code works on."""

from __future__ import annotations

from typing import NamedTuple

import torch


class StepInputs(NamedTuple):
    """The device tensors that describe one step to the model and to attention.

    T tokens: first one per lane in use, then those of the prompt chunks, then padding. There are L lanes and C chunks,
    padding included: lanes that are not in use are dead, and share their places with chunk tokens; a chunk that is not
    in use has no tokens. S positions are sampled. Rows are numbered 0 .. R-1; row R is the dummy row.

    Attributes:
        input_ids: int64 [T].
        positions: int64 [T], position of each token within its sequence.
        cache_slots: int64 [T], block * block_size + offset where the token's K and V are written; positions of dead
            and padded lanes lie in the dummy block. One row per cache group: [G, T].
        lane_rows: int32 [L], the row behind each lane.
        lane_lengths: int32 [L], KV positions that the lane's query sees, its own included; 0 for a dead lane.
        chunk_rows: int32 [C], the row of each chunk.
        chunk_starts: int32 [C], position of the chunk's first token: the KV positions before it.
        chunk_offsets: int32 [C + 1], the token at which each chunk begins, and at which the padding behind them does.
        block_tables: int32 [G, R + 1, M].
        sample_index: int64 [S], the tokens whose logits are needed; None means all T, in order.
        max_length: an upper bound of lane_lengths on the host, or 0 if it is not known (inside a CUDA graph).
        max_chunk: an upper bound of a chunk's tokens on the host; 0 without chunks.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    cache_slots: torch.Tensor
    lane_rows: torch.Tensor
    lane_lengths: torch.Tensor
    chunk_rows: torch.Tensor
    chunk_starts: torch.Tensor
    chunk_offsets: torch.Tensor
    block_tables: torch.Tensor
    sample_index: torch.Tensor | None
    max_length: int
    max_chunk: int

    @property
    def num_lanes(self) -> int:
        return self.lane_rows.shape[0]

    @property
    def num_chunks(self) -> int:
        return self.chunk_rows.shape[0]
