"""What the device-resident batch does in a step: apply deltas, make the inputs (with carry-over), advance.

`BatchOps` is the interface; the plain PyTorch form, for the CPU, is here, the Triton one in `batch_triton.py`.
"""

from __future__ import annotations

from typing import Protocol

import torch

from .step import StepInputs

# Places of the words of a slot's input header. A section's AT word is its offset in the input, in words.
NUM_LANES, NUM_CHUNKS, NUM_PROMPT_TOKENS, NUM_JOINS, NUM_BLOCK_DELTAS, NUM_LANE_DELTAS = range(6)
JOINS_AT, BLOCK_DELTAS_AT, LANE_DELTAS_AT, CHUNKS_AT, PROMPT_TOKENS_AT = range(6, 11)
LEDGERS_AT = 12
HEADER_WORDS = 16

FLAG_TOKEN, FLAG_STOP, FLAG_LENGTH, FLAG_ERROR = 1, 2, 4, 8


class Batch(Protocol):
    """The tensors of the device-resident batch; shapes and dtypes as at `device.batch_state.BatchState`."""

    max_rows: int
    block_size: int
    words: torch.Tensor
    done: torch.Tensor
    last_token: torch.Tensor
    length: torch.Tensor
    outputs: torch.Tensor
    max_outputs: torch.Tensor
    stop_ids: torch.Tensor
    lane_to_row: torch.Tensor
    block_tables: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    cache_slots: torch.Tensor
    lane_lengths: torch.Tensor
    chunk_rows: torch.Tensor
    chunk_starts: torch.Tensor
    chunk_offsets: torch.Tensor
    sample_index: torch.Tensor
    sample_rows: torch.Tensor
    tokens: torch.Tensor
    errors: torch.Tensor


class BatchOps(Protocol):
    """The three things that happen to the batch in a step, in this order, on the compute stream."""

    def apply_deltas(self, words: torch.Tensor, batch: Batch) -> None:
        """Write the joins, block and lane deltas of a slot's input (`words`, int32) into the batch."""

    def prepare(
        self, words: torch.Tensor, batch: Batch, lanes: int, chunks: int, tokens: int, sampled: int
    ) -> StepInputs:
        """Make the inputs of the step, and count its positions as launched.

        Input ids start from the placeholder 0; prompt tokens come from `words`; carry-over adds the last token of the
        row behind each living lane. All sizes include padding, without chunks `tokens` and `sampled` equal `lanes`; how
        many lanes, chunks and tokens are in use stands in `words`. Padding writes to the dummy block, at position 0;
        sampled positions behind those in use belong to the dummy row.
        """
        ...

    def advance(self, batch: Batch, sampled: int, output: torch.Tensor) -> None:
        """Take the sampler's tokens into the row state, and write (token, flags) to `output` [>= sampled, 2]."""


def view_inputs(batch: Batch, lanes: int, chunks: int, tokens: int, sampled: int, **bounds: int) -> StepInputs:
    """Return the step's inputs as views of the batch's working buffers."""
    return StepInputs(
        input_ids=batch.input_ids[:tokens],
        positions=batch.positions[:tokens],
        cache_slots=batch.cache_slots[:, :tokens],
        lane_rows=batch.lane_to_row[:lanes],
        lane_lengths=batch.lane_lengths[:lanes],
        chunk_rows=batch.chunk_rows[:chunks],
        chunk_starts=batch.chunk_starts[:chunks],
        chunk_offsets=batch.chunk_offsets[: chunks + 1],
        block_tables=batch.block_tables,
        sample_index=batch.sample_index[:sampled] if chunks else None,
        **bounds,
    )


class TorchBatchOps:
    """The batch's operations in plain PyTorch, for tensors on the CPU."""

    def apply_deltas(self, words: torch.Tensor, batch: Batch) -> None:
        header = words[:HEADER_WORDS].tolist()
        if n := header[NUM_JOINS]:
            records = _section(words, header[JOINS_AT], n, batch.words.shape[0] + 1)
            batch.words[:, records[:, 0].long()] = records[:, 1:].T
        if n := header[NUM_BLOCK_DELTAS]:
            group, row, index, block = _section(words, header[BLOCK_DELTAS_AT], n, 4).long().T
            batch.block_tables[group, row, index] = block.int()
        if n := header[NUM_LANE_DELTAS]:
            deltas = _section(words, header[LANE_DELTAS_AT], n, 2)
            batch.lane_to_row[deltas[:, 0].long()] = deltas[:, 1]

    def prepare(
        self, words: torch.Tensor, batch: Batch, lanes: int, chunks: int, tokens: int, sampled: int
    ) -> StepInputs:
        batch.input_ids[:tokens] = 0
        longest = self._prepare_lanes(batch, lanes) if lanes else 0
        longest_chunk = self._prepare_chunks(words, batch, chunks, tokens, sampled) if chunks else 0
        return view_inputs(batch, lanes, chunks, tokens, sampled, max_length=longest, max_chunk=longest_chunk)

    def _prepare_lanes(self, batch: Batch, lanes: int) -> int:
        """Return the longest lane."""
        rows = batch.lane_to_row[:lanes].long()
        alive = batch.done[rows] == 0
        position = torch.where(alive, batch.length[rows], 0).long()
        block = batch.block_tables[:, rows, position // batch.block_size].long()
        # NOTE: tables of dead rows may name blocks that others own by now; only the dummy block is theirs to write.
        offset = position % batch.block_size
        batch.cache_slots[:, :lanes] = torch.where(alive, block * batch.block_size + offset, 0)
        batch.positions[:lanes] = position
        batch.input_ids[:lanes] += torch.where(alive, batch.last_token[rows], 0)
        batch.lane_lengths[:lanes] = torch.where(alive, position + 1, 0)
        batch.length[rows] += alive.int()
        batch.sample_rows[:lanes] = batch.lane_to_row[:lanes]
        batch.sample_index[:lanes] = torch.arange(lanes)
        return int(batch.lane_lengths[:lanes].max())

    def _prepare_chunks(self, words: torch.Tensor, batch: Batch, chunks: int, tokens: int, sampled: int) -> int:
        """Return the longest chunk."""
        header = words[:HEADER_WORDS].tolist()
        at = outputs = header[NUM_LANES]
        table = _section(words, header[CHUNKS_AT], header[NUM_CHUNKS], 4)
        prompts = words[header[PROMPT_TOKENS_AT] :][: header[NUM_PROMPT_TOKENS]]
        batch.input_ids[at : at + len(prompts)] = prompts
        batch.chunk_rows[: len(table)] = table[:, 0]
        batch.chunk_starts[: len(table)] = table[:, 1]
        for chunk, (row, start, count, samples) in enumerate(table.tolist()):
            position = torch.arange(start, start + count)
            block = batch.block_tables[:, row, position // batch.block_size].long()
            place = slice(at, at + count)
            batch.positions[place] = position
            batch.cache_slots[:, place] = block * batch.block_size + position % batch.block_size
            batch.length[row] = start + count
            batch.chunk_offsets[chunk] = at
            at += count
            if samples:
                batch.sample_index[outputs] = at - 1
                batch.sample_rows[outputs] = row
                outputs += 1
        self._pad(batch, slice(len(table), chunks), slice(at, tokens), slice(outputs, sampled))
        return int(table[:, 2].max())

    def _pad(self, batch: Batch, chunks: slice, tokens: slice, sampled: slice) -> None:
        batch.chunk_rows[chunks] = batch.max_rows
        batch.chunk_starts[chunks] = 0
        batch.chunk_offsets[chunks.start : chunks.stop + 1] = tokens.start
        batch.input_ids[tokens] = 0
        batch.positions[tokens] = 0
        batch.cache_slots[:, tokens] = 0
        batch.sample_index[sampled] = 0
        batch.sample_rows[sampled] = batch.max_rows

    def advance(self, batch: Batch, sampled: int, output: torch.Tensor) -> None:
        rows = batch.sample_rows[:sampled].long()
        tokens = batch.tokens[:sampled]
        alive = batch.done[rows] == 0
        error = alive & (batch.errors[:sampled] != 0)
        good = alive & ~error
        outputs = batch.outputs[rows] + good.int()
        stop = good & (batch.stop_ids[:, rows] == tokens).any(0)
        length = good & (outputs == batch.max_outputs[rows])
        batch.outputs[rows] = outputs
        batch.last_token[rows] = torch.where(good, tokens, batch.last_token[rows])
        batch.done[rows] = torch.where(stop | length | error, 1, batch.done[rows])
        output[:sampled, 0] = torch.where(good, tokens, 0)
        output[:sampled, 1] = (
            good.int() * FLAG_TOKEN + stop.int() * FLAG_STOP + length.int() * FLAG_LENGTH + error.int() * FLAG_ERROR
        )


def _section(words: torch.Tensor, at: int, count: int, width: int) -> torch.Tensor:
    return words[at : at + count * width].view(count, width)
