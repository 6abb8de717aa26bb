"""The batch's operations in Triton: fixed grids, every count read on the device, so that one graph serves all steps."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import batch as layout
from .batch import Batch, view_inputs
from .early import early, wait_for_kernel_ahead
from .sizes import cdiv, next_power_of_2
from .step import StepInputs

_PROGRAMS = 8
_BLOCK = 128

NUM_LANES = tl.constexpr(layout.NUM_LANES)
NUM_CHUNKS = tl.constexpr(layout.NUM_CHUNKS)
NUM_JOINS = tl.constexpr(layout.NUM_JOINS)
NUM_BLOCK_DELTAS = tl.constexpr(layout.NUM_BLOCK_DELTAS)
NUM_LANE_DELTAS = tl.constexpr(layout.NUM_LANE_DELTAS)
JOINS_AT = tl.constexpr(layout.JOINS_AT)
BLOCK_DELTAS_AT = tl.constexpr(layout.BLOCK_DELTAS_AT)
LANE_DELTAS_AT = tl.constexpr(layout.LANE_DELTAS_AT)
CHUNKS_AT = tl.constexpr(layout.CHUNKS_AT)
PROMPT_TOKENS_AT = tl.constexpr(layout.PROMPT_TOKENS_AT)
FLAG_TOKEN = tl.constexpr(layout.FLAG_TOKEN)
FLAG_STOP = tl.constexpr(layout.FLAG_STOP)
FLAG_LENGTH = tl.constexpr(layout.FLAG_LENGTH)
FLAG_ERROR = tl.constexpr(layout.FLAG_ERROR)


@triton.jit
def _apply_deltas(
    words,
    state,
    state_stride,
    lane_to_row,
    tables,
    group_stride,
    row_stride,
    FIELDS: tl.constexpr,
    FIELDS_PADDED: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_kernel_ahead(PDL)
    program = tl.program_id(0)
    field = tl.arange(0, FIELDS_PADDED)
    joins = words + tl.load(words + JOINS_AT)
    for join in range(program, tl.load(words + NUM_JOINS), PROGRAMS):
        record = joins + join * (FIELDS + 1)
        row = tl.load(record)
        value = tl.load(record + 1 + field, mask=field < FIELDS, other=0)
        tl.store(state + field * state_stride + row, value, mask=field < FIELDS)
    count = tl.load(words + NUM_BLOCK_DELTAS)
    deltas = words + tl.load(words + BLOCK_DELTAS_AT)
    for first in range(program * BLOCK, count, PROGRAMS * BLOCK):
        i = first + tl.arange(0, BLOCK)
        ok = i < count
        group = tl.load(deltas + 4 * i, mask=ok, other=0).to(tl.int64)
        row = tl.load(deltas + 4 * i + 1, mask=ok, other=0).to(tl.int64)
        index = tl.load(deltas + 4 * i + 2, mask=ok, other=0)
        block = tl.load(deltas + 4 * i + 3, mask=ok, other=0)
        tl.store(tables + group * group_stride + row * row_stride + index, block, mask=ok)
    count = tl.load(words + NUM_LANE_DELTAS)
    deltas = words + tl.load(words + LANE_DELTAS_AT)
    for first in range(program * BLOCK, count, PROGRAMS * BLOCK):
        i = first + tl.arange(0, BLOCK)
        ok = i < count
        lane = tl.load(deltas + 2 * i, mask=ok, other=0)
        row = tl.load(deltas + 2 * i + 1, mask=ok, other=0)
        tl.store(lane_to_row + lane, row, mask=ok)


@triton.jit
def _prepare_lanes(
    lanes,
    lane_to_row,
    done,
    length,
    last_token,
    tables,
    group_stride,
    row_stride,
    input_ids,
    positions,
    cache_slots,
    slots_stride,
    lane_lengths,
    sample_index,
    sample_rows,
    block_size,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_kernel_ahead(PDL)
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = lane < lanes
    row = tl.load(lane_to_row + lane, mask=ok, other=0)
    alive = ok & (tl.load(done + row, mask=ok, other=1) == 0)
    position = tl.load(length + row, mask=alive, other=0)
    token = tl.load(last_token + row, mask=alive, other=0)  # carry-over; a dead lane keeps the placeholder 0
    for group in tl.static_range(GROUPS):
        entry = tables + group * group_stride + row.to(tl.int64) * row_stride + position // block_size
        block = tl.load(entry, mask=alive, other=0).to(tl.int64)
        slot = tl.where(alive, block * block_size + position % block_size, 0)
        tl.store(cache_slots + group * slots_stride + lane, slot, mask=ok)
    tl.store(input_ids + lane, token.to(tl.int64), mask=ok)
    tl.store(positions + lane, position.to(tl.int64), mask=ok)
    tl.store(lane_lengths + lane, tl.where(alive, position + 1, 0), mask=ok)
    tl.store(length + row, position + 1, mask=alive)
    tl.store(sample_rows + lane, row, mask=ok)
    tl.store(sample_index + lane, lane.to(tl.int64), mask=ok)


@triton.jit
def _pad_step(
    first,
    first_output,
    dummy_row,
    tokens,
    sampled,
    input_ids,
    positions,
    cache_slots,
    slots_stride,
    sample_index,
    sample_rows,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    for begin in range(first, tokens, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        zero = tl.zeros([BLOCK], tl.int64)
        tl.store(input_ids + token, zero, mask=token < tokens)
        tl.store(positions + token, zero, mask=token < tokens)
        for group in tl.static_range(GROUPS):
            tl.store(cache_slots + group * slots_stride + token, zero, mask=token < tokens)
    for begin in range(first_output, sampled, BLOCK):
        output = begin + tl.arange(0, BLOCK)
        tl.store(sample_index + output, tl.zeros([BLOCK], tl.int64), mask=output < sampled)
        tl.store(sample_rows + output, dummy_row, mask=output < sampled)


@triton.jit(do_not_specialize=["num_tokens", "num_sampled"])
def _prepare_chunks(
    words,
    dummy_row,
    num_tokens,
    num_sampled,
    length,
    tables,
    group_stride,
    row_stride,
    input_ids,
    positions,
    cache_slots,
    slots_stride,
    chunk_rows,
    chunk_starts,
    chunk_offsets,
    sample_index,
    sample_rows,
    block_size,
    GROUPS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per chunk that there is room for, and one for the padding behind the tokens and outputs."""
    wait_for_kernel_ahead(PDL)
    chunk = tl.program_id(0)
    last = tl.num_programs(0) - 1
    num_chunks = tl.load(words + NUM_CHUNKS)
    lanes = tl.load(words + NUM_LANES)
    table = words + tl.load(words + CHUNKS_AT)
    tokens = words + tl.load(words + PROMPT_TOKENS_AT)
    index = tl.arange(0, CHUNKS_PADDED)
    earlier = index < tl.minimum(chunk, num_chunks)
    at = tl.sum(tl.load(table + 4 * index + 2, mask=earlier, other=0))
    output = lanes + tl.sum(tl.load(table + 4 * index + 3, mask=earlier, other=0))
    tl.store(chunk_offsets + chunk, lanes + at)
    if chunk < num_chunks:
        row = tl.load(table + 4 * chunk)
        start = tl.load(table + 4 * chunk + 1)
        count = tl.load(table + 4 * chunk + 2)
        for first in range(0, count, BLOCK):
            i = first + tl.arange(0, BLOCK)
            ok = i < count
            position = start + i
            place = lanes + at + i
            token = tl.load(tokens + at + i, mask=ok, other=0)
            tl.store(input_ids + place, token.to(tl.int64), mask=ok)
            tl.store(positions + place, position.to(tl.int64), mask=ok)
            for group in tl.static_range(GROUPS):
                entry = tables + group * group_stride + row.to(tl.int64) * row_stride + position // block_size
                block = tl.load(entry, mask=ok, other=0).to(tl.int64)
                slot = block * block_size + position % block_size
                tl.store(cache_slots + group * slots_stride + place, slot, mask=ok)
        tl.store(length + row, start + count)
        tl.store(chunk_rows + chunk, row)
        tl.store(chunk_starts + chunk, start)
        if tl.load(table + 4 * chunk + 3) != 0:
            tl.store(sample_index + output, (lanes + at + count - 1).to(tl.int64))
            tl.store(sample_rows + output, row)
    elif chunk < last:
        tl.store(chunk_rows + chunk, dummy_row)
        tl.store(chunk_starts + chunk, 0)
    else:
        _pad_step(
            lanes + at,
            output,
            dummy_row,
            num_tokens,
            num_sampled,
            input_ids,
            positions,
            cache_slots,
            slots_stride,
            sample_index,
            sample_rows,
            GROUPS,
            BLOCK,
        )


@triton.jit
def _advance(
    sampled,
    sample_rows,
    tokens,
    errors,
    done,
    outputs,
    max_outputs,
    last_token,
    stop_ids,
    stop_stride,
    output,
    STOP_IDS: tl.constexpr,
    STOP_IDS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = i < sampled
    # What the sampler does not write is read while it still runs.
    row = tl.load(sample_rows + i, mask=ok, other=0)
    alive = ok & (tl.load(done + row, mask=ok, other=1) == 0)
    count = tl.load(outputs + row, mask=alive, other=0) + 1
    most = tl.load(max_outputs + row, mask=alive, other=0)
    place = tl.arange(0, STOP_IDS_PADDED)[:, None]
    stops = tl.load(stop_ids + place * stop_stride + row[None, :], alive[None, :] & (place < STOP_IDS), -1)
    wait_for_kernel_ahead(PDL)
    error = alive & (tl.load(errors + i, mask=ok, other=0) != 0)
    good = alive & (error == 0)
    token = tl.load(tokens + i, mask=good, other=0)
    at_length = good & (count == most)
    at_stop = good & (tl.max((stops == token[None, :]).to(tl.int32), 0) != 0)
    flags = tl.where(good, FLAG_TOKEN, 0) + tl.where(at_stop, FLAG_STOP, 0)
    flags += tl.where(at_length, FLAG_LENGTH, 0) + tl.where(error, FLAG_ERROR, 0)
    tl.store(outputs + row, count, mask=good)
    tl.store(last_token + row, token, mask=good)
    tl.store(done + row, 1, mask=at_stop | at_length | error)
    tl.store(output + 2 * i, token, mask=ok)
    tl.store(output + 2 * i + 1, flags, mask=ok)


class TritonBatchOps:
    """The batch's operations on CUDA (or, in tests, in Triton's interpreter)."""

    def apply_deltas(self, words: torch.Tensor, batch: Batch) -> None:
        fields = batch.words.shape[0]
        # NOTE: a step's first kernel; it lets the next one start early, but starts behind all that is ahead itself.
        _apply_deltas[(_PROGRAMS,)](
            words,
            batch.words,
            batch.words.stride(0),
            batch.lane_to_row,
            batch.block_tables,
            batch.block_tables.stride(0),
            batch.block_tables.stride(1),
            FIELDS=fields,
            FIELDS_PADDED=next_power_of_2(fields),
            PROGRAMS=_PROGRAMS,
            BLOCK=_BLOCK,
            PDL=early(words.device)["PDL"],
        )

    def prepare(
        self, words: torch.Tensor, batch: Batch, lanes: int, chunks: int, tokens: int, sampled: int
    ) -> StepInputs:
        tables = (batch.block_tables, batch.block_tables.stride(0), batch.block_tables.stride(1))
        places = (batch.input_ids, batch.positions, batch.cache_slots, batch.cache_slots.stride(0))
        groups = batch.block_tables.shape[0]
        if lanes:
            _prepare_lanes[(cdiv(lanes, _BLOCK),)](
                lanes,
                batch.lane_to_row,
                batch.done,
                batch.length,
                batch.last_token,
                *tables,
                *places,
                batch.lane_lengths,
                batch.sample_index,
                batch.sample_rows,
                batch.block_size,
                GROUPS=groups,
                BLOCK=_BLOCK,
                **early(words.device),
            )
        if chunks:
            _prepare_chunks[(chunks + 1,)](
                words,
                batch.max_rows,
                tokens,
                sampled,
                batch.length,
                *tables,
                *places,
                batch.chunk_rows,
                batch.chunk_starts,
                batch.chunk_offsets,
                batch.sample_index,
                batch.sample_rows,
                batch.block_size,
                GROUPS=groups,
                CHUNKS_PADDED=next_power_of_2(batch.max_rows),
                BLOCK=_BLOCK,
                **early(words.device),
            )
        longest = batch.block_tables.shape[2] * batch.block_size
        longest_chunk = tokens if chunks else 0
        return view_inputs(batch, lanes, chunks, tokens, sampled, max_length=longest, max_chunk=longest_chunk)

    def advance(self, batch: Batch, sampled: int, output: torch.Tensor) -> None:
        _advance[(cdiv(sampled, _BLOCK),)](
            sampled,
            batch.sample_rows,
            batch.tokens,
            batch.errors,
            batch.done,
            batch.outputs,
            batch.max_outputs,
            batch.last_token,
            batch.stop_ids,
            batch.stop_ids.stride(0),
            output,
            STOP_IDS=batch.stop_ids.shape[0],
            STOP_IDS_PADDED=next_power_of_2(batch.stop_ids.shape[0]),
            BLOCK=_BLOCK,
            **early(output.device),
        )
