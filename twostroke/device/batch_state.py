"""The device-resident batch: what a decode step reads, and advances, without hearing from the CPU."""

from __future__ import annotations

import torch

from ..logprob_record import MAX_SCORES
from ..plan import NO_LEDGER, ROW_RECORD
from .streams import Device

_FIELDS = [name for name in ROW_RECORD.names or () if name != "row"]


def _field_places() -> dict[str, slice]:
    """Return the words of the row state that each field of a row record fills."""
    places = {}
    for name in _FIELDS:
        dtype, offset = ROW_RECORD.fields[name][:2]  # type: ignore[index]
        first = offset // 4 - 1  # the record's first word is the row number, which the state does not hold
        places[name] = slice(first, first + dtype.itemsize // 4)
    return places


class BatchState:
    """Row state, tables, lanes, and the working buffers of the step that runs.

    Everything is allocated once, before any capture; graphs write into it. Only the compute stream touches it. Rows are
    numbered 0 .. R - 1; row R is the dummy row, done for ever, whose table holds the dummy block.

    Attributes:
        words: int32 [fields, R + 1], the row state, one line per word of `ROW_RECORD` behind the row number. Each field
            is also an attribute: int32 or float32 [R + 1] (`stop_ids`: [MAX_STOP_IDS, R + 1]).
        lane_to_row: int32 [max_lanes]; lanes not in use point at the dummy row.
        block_tables: int32 [groups, R + 1, M].
        input_ids, positions: int64 [max tokens]. cache_slots: int64 [groups, max tokens].
        lane_lengths: int32 [max_lanes].
        chunk_rows, chunk_starts: int32 [R]. chunk_offsets: int32 [R + 1].
        sample_index: int64 [max_lanes + MAX_SCORES], int32 sample_rows as many: the sampled positions, then the scored.
        tokens, errors: int32 [max_lanes], what the sampler found. chances: float32 [max_lanes], see `sampler.sample`.
    """

    done: torch.Tensor
    last_token: torch.Tensor
    length: torch.Tensor
    outputs: torch.Tensor
    min_outputs: torch.Tensor
    max_outputs: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed_low: torch.Tensor
    seed_high: torch.Tensor
    typical_p: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    repetition: torch.Tensor
    ngram_size: torch.Tensor
    ledger: torch.Tensor
    logprobs: torch.Tensor
    prompt_logprobs: torch.Tensor
    stop_ids: torch.Tensor

    def __init__(
        self,
        device: Device,
        *,
        max_rows: int,
        max_lanes: int,
        max_tokens: int,
        table_width: int,
        block_size: int,
        num_groups: int = 1,
    ) -> None:
        self.max_rows = max_rows
        self.block_size = block_size
        places = _field_places()
        self.words = device.buffer(max(place.stop for place in places.values()), max_rows + 1)
        for name, place in places.items():
            view = self.words[place] if name == "stop_ids" else self.words[place.start]
            floating = ROW_RECORD.fields[name][0] == "float32"  # type: ignore[index]
            setattr(self, name, view.view(torch.float32) if floating else view)
        self.done.fill_(1)
        self.stop_ids.fill_(-1)
        self.top_p.fill_(1.0)
        self.typical_p.fill_(1.0)
        self.repetition.fill_(1.0)
        self.ledger.fill_(NO_LEDGER)
        self.lane_to_row = device.buffer(max_lanes).fill_(max_rows)
        self.block_tables = device.buffer(num_groups, max_rows + 1, table_width)

        def long(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device.torch_device)

        self.input_ids = long(max_tokens)
        self.positions = long(max_tokens)
        self.cache_slots = long(num_groups, max_tokens)
        self.lane_lengths = device.buffer(max_lanes)
        self.chunk_rows = device.buffer(max_rows)
        self.chunk_starts = device.buffer(max_rows)
        self.chunk_offsets = device.buffer(max_rows + 1)
        self.sample_index = long(max_lanes + MAX_SCORES)
        self.sample_rows = device.buffer(max_lanes + MAX_SCORES)
        self.tokens = device.buffer(max_lanes)
        self.errors = device.buffer(max_lanes)
        self.chances = device.buffer(max_lanes).view(torch.float32)
