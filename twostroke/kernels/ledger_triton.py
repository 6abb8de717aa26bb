"""The ledgers' operations in Triton. Grids depend on sizes that the host knows; a program without work ends at once."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import ledger as layout
from .batch import LEDGERS_AT as _LEDGERS_AT
from .ledger import Ledgers, Rows
from .sizes import cdiv

_BLOCK = 1024
_FILL_PROGRAMS = 16

LEDGERS_AT = tl.constexpr(_LEDGERS_AT)
HEADER_WORDS = tl.constexpr(layout.LEDGER_HEADER_WORDS)
WORDS = tl.constexpr(layout.WORDS)
LEDGER = tl.constexpr(layout.LEDGER)
TOKENS = tl.constexpr(layout.TOKENS)
PROMPT_TOKENS = tl.constexpr(layout.PROMPT_TOKENS)
RESTRICTED = tl.constexpr(layout.RESTRICTED)
BIASES = tl.constexpr(layout.BIASES)
SEQUENCES = tl.constexpr(layout.SEQUENCES)
SEQUENCE_TOKENS = tl.constexpr(layout.SEQUENCE_TOKENS)
SEEN = tl.constexpr(layout.SEEN)
OUTPUT = tl.constexpr(layout.OUTPUT)
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _find_record(words, number):
    """The record of the ledger that opens as number `number`: each says how long it is."""
    record = words + tl.load(words + LEDGERS_AT)
    for _ in range(0, number):
        record += tl.load(record + WORDS)
    return record


@triton.jit
def _clear(words, counts, biases, vocab, BLOCK: tl.constexpr):
    """Clears the counts, and makes every bias 0, or -inf in a restricted ledger."""
    record = _find_record(words, tl.program_id(0))
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(record + LEDGER).to(tl.int64) * vocab + ids
    bias = tl.where(tl.load(record + RESTRICTED) != 0, -_INFINITY, 0.0)
    tl.store(counts + place, tl.zeros([BLOCK], tl.int32), mask=ids < vocab)
    tl.store(biases + place, tl.zeros([BLOCK], tl.float32) + bias, mask=ids < vocab)


@triton.jit
def _copy(source, target, count, program, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    for first in range(program * BLOCK, count, PROGRAMS * BLOCK):
        i = first + tl.arange(0, BLOCK)
        tl.store(target + i, tl.load(source + i, mask=i < count), mask=i < count)


@triton.jit
def _fill(
    words,
    counts,
    biases,
    vocab,
    history,
    history_stride,
    num_sequences,
    ends,
    ends_stride,
    sequence_tokens,
    tokens_stride,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes what a cleared ledger holds: each program takes its share of every section."""
    record = _find_record(words, tl.program_id(0))
    program = tl.program_id(1)
    ledger = tl.load(record + LEDGER).to(tl.int64)
    num_tokens = tl.load(record + TOKENS)
    prompt_tokens = tl.load(record + PROMPT_TOKENS)
    tokens = record + HEADER_WORDS
    for first in range(program * BLOCK, num_tokens, PROGRAMS * BLOCK):
        i = first + tl.arange(0, BLOCK)
        token = tl.load(tokens + i, mask=i < num_tokens, other=0)
        tl.store(history + ledger * history_stride + i, token, mask=i < num_tokens)
        count = counts + ledger * vocab + token
        tl.atomic_or(count, SEEN, mask=i < prompt_tokens)
        tl.atomic_add(count, OUTPUT, mask=(i >= prompt_tokens) & (i < num_tokens))
    num_biases = tl.load(record + BIASES)
    bias_ids = tokens + num_tokens
    for first in range(program * BLOCK, num_biases, PROGRAMS * BLOCK):
        i = first + tl.arange(0, BLOCK)
        token = tl.load(bias_ids + i, mask=i < num_biases, other=0)
        bits = tl.load(bias_ids + num_biases + i, mask=i < num_biases, other=0)
        tl.store(biases + ledger * vocab + token, bits.to(tl.float32, bitcast=True), mask=i < num_biases)
    sequences = tl.load(record + SEQUENCES)
    section = bias_ids + 2 * num_biases
    _copy(section, ends + ledger * ends_stride, sequences, program, PROGRAMS, BLOCK)
    count = tl.load(record + SEQUENCE_TOKENS)
    _copy(section + sequences, sequence_tokens + ledger * tokens_stride, count, program, PROGRAMS, BLOCK)
    tl.store(num_sequences + ledger, sequences)


@triton.jit
def _add_biases(logits, stride, vocab, rows, ledgers, biases, BLOCK: tl.constexpr):
    position = tl.program_id(0)
    ledger = tl.load(ledgers + tl.load(rows + position)).to(tl.int64)
    if ledger >= 0:
        ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        place = logits + position.to(tl.int64) * stride + ids
        bias = tl.load(biases + ledger * vocab + ids, mask=ids < vocab, other=0.0)
        tl.store(place, tl.load(place, mask=ids < vocab, other=0.0) + bias, mask=ids < vocab)


@triton.jit
def _penalize(logits, stride, vocab, rows, ledgers, presences, frequencies, repetitions, counts, BLOCK: tl.constexpr):
    position = tl.program_id(0)
    row = tl.load(rows + position)
    ledger = tl.load(ledgers + row).to(tl.int64)
    if ledger >= 0:
        presence = tl.load(presences + row)
        frequency = tl.load(frequencies + row)
        repetition = tl.load(repetitions + row)
        ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        place = logits + position.to(tl.int64) * stride + ids
        x = tl.load(place, mask=ids < vocab, other=0.0)
        count = tl.load(counts + ledger * vocab + ids, mask=ids < vocab, other=0)
        x = tl.where(count > 0, tl.where(x < 0.0, x * repetition, tl.div_rn(x, repetition)), x)
        x = x - frequency * (count // OUTPUT).to(tl.float32)
        x = x - tl.where(count >= OUTPUT, presence, 0.0)
        tl.store(place, x, mask=ids < vocab)


@triton.jit
def _bar(row_logits, token, mask):
    """Adds -inf: a NaN or +inf stays an error."""
    tl.store(row_logits + token, tl.load(row_logits + token, mask=mask, other=0.0) - _INFINITY, mask=mask)


@triton.jit
def _bar_ngrams(
    logits,
    stride,
    rows,
    ledgers,
    lengths,
    ngram_sizes,
    history,
    history_stride,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    position = tl.program_id(0)
    row = tl.load(rows + position)
    ledger = tl.load(ledgers + row).to(tl.int64)
    size = tl.load(ngram_sizes + row)
    if (ledger >= 0) & (size > 0):
        tokens = history + ledger * history_stride
        length = tl.load(lengths + row)
        last = tokens + length - size + 1  # the n - 1 tokens that the next one completes
        for first in range(tl.program_id(1) * BLOCK, length - size + 1, PROGRAMS * BLOCK):
            i = first + tl.arange(0, BLOCK)
            repeated = i <= length - size
            for j in range(0, size - 1):
                repeated = repeated & (tl.load(tokens + i + j, mask=repeated, other=-1) == tl.load(last + j))
            token = tl.load(tokens + i + size - 1, mask=repeated, other=0)
            _bar(logits + position.to(tl.int64) * stride, token, repeated)


@triton.jit
def _bar_sequences(
    logits,
    stride,
    rows,
    ledgers,
    lengths,
    history,
    history_stride,
    num_sequences,
    ends,
    ends_stride,
    sequence_tokens,
    tokens_stride,
    BLOCK: tl.constexpr,
):
    position = tl.program_id(0)
    row = tl.load(rows + position)
    ledger = tl.load(ledgers + row).to(tl.int64)
    if ledger >= 0:
        length = tl.load(lengths + row)
        i = tl.arange(0, BLOCK)
        ok = i < tl.load(num_sequences + ledger)
        end = tl.load(ends + ledger * ends_stride + i, mask=ok, other=0)
        start = tl.load(ends + ledger * ends_stride + i - 1, mask=ok & (i > 0), other=0)
        before = end - start - 1
        words = sequence_tokens + ledger * tokens_stride
        last = history + ledger * history_stride + length - before
        matched = ok & (before <= length)
        for j in range(0, tl.max(tl.where(matched, before, 0), 0)):
            inside = matched & (j < before)
            same = tl.load(words + start + j, mask=inside, other=0) == tl.load(last + j, mask=inside, other=-1)
            matched = matched & (same | (j >= before))
        token = tl.load(words + end - 1, mask=matched, other=0)
        _bar(logits + position.to(tl.int64) * stride, token, matched)


@triton.jit(do_not_specialize=["sampled"])
def _enter(sampled, tokens, rows, ledgers, lengths, history, history_stride, counts, vocab, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + i, mask=i < sampled, other=0)
    ledger = tl.load(ledgers + row, mask=i < sampled, other=-1).to(tl.int64)
    held = ledger >= 0
    token = tl.load(tokens + i, mask=held, other=0)
    length = tl.load(lengths + row, mask=held, other=0)
    tl.store(history + ledger * history_stride + length, token, mask=held)
    count = counts + ledger * vocab + token
    tl.store(count, tl.load(count, mask=held, other=0) + OUTPUT, mask=held)


class TritonLedgerOps:
    """The operations on CUDA (or, in tests, in Triton's interpreter)."""

    def __init__(self, ledgers: Ledgers, rows: Rows) -> None:
        self.ledgers = ledgers
        self.rows = rows
        self.vocab = ledgers.counts.shape[1]
        self._history = (ledgers.history, ledgers.history.stride(0))
        self._sequences = (
            ledgers.num_sequences,
            *(ledgers.sequence_ends, ledgers.sequence_ends.stride(0)),
            *(ledgers.sequence_tokens, ledgers.sequence_tokens.stride(0)),
        )

    def open(self, words: torch.Tensor, count: int) -> None:
        counts, biases = self.ledgers.counts, self.ledgers.biases
        _clear[(count, cdiv(self.vocab, _BLOCK))](words, counts, biases, self.vocab, BLOCK=_BLOCK)
        _fill[(count, _FILL_PROGRAMS)](
            words, counts, biases, self.vocab, *self._history, *self._sequences, PROGRAMS=_FILL_PROGRAMS, BLOCK=_BLOCK
        )

    def add_biases(self, logits: torch.Tensor, row_ids: torch.Tensor) -> None:
        grid = len(row_ids), cdiv(self.vocab, _BLOCK)
        common = (logits, logits.stride(0), self.vocab, row_ids, self.rows.ledger)
        _add_biases[grid](*common, self.ledgers.biases, BLOCK=_BLOCK)

    def penalize(self, logits: torch.Tensor, row_ids: torch.Tensor) -> None:
        rows = self.rows
        grid = len(row_ids), cdiv(self.vocab, _BLOCK)
        common = (logits, logits.stride(0), self.vocab, row_ids, rows.ledger)
        _penalize[grid](*common, rows.presence, rows.frequency, rows.repetition, self.ledgers.counts, BLOCK=_BLOCK)

    def bar_ngrams(self, logits: torch.Tensor, row_ids: torch.Tensor) -> None:
        rows = self.rows
        common = (logits, logits.stride(0), row_ids, rows.ledger, rows.length)
        _bar_ngrams[(len(row_ids), _FILL_PROGRAMS)](
            *common, rows.ngram_size, *self._history, PROGRAMS=_FILL_PROGRAMS, BLOCK=_BLOCK
        )

    def bar_sequences(self, logits: torch.Tensor, row_ids: torch.Tensor) -> None:
        common = (logits, logits.stride(0), row_ids, self.rows.ledger, self.rows.length)
        width = self.ledgers.sequence_ends.shape[1]
        _bar_sequences[(len(row_ids),)](*common, *self._history, *self._sequences, BLOCK=width)

    def enter(self, tokens: torch.Tensor, row_ids: torch.Tensor) -> None:
        block = 128
        common = (len(row_ids), tokens, row_ids, self.rows.ledger, self.rows.length)
        _enter[(cdiv(len(row_ids), block),)](*common, *self._history, self.ledgers.counts, self.vocab, BLOCK=block)
