"""The ledgers' operations: PyTorch against Python, Triton (interpreted without a GPU) against PyTorch."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from twostroke import SamplingParams
from twostroke.device import layout
from twostroke.device.batch_state import BatchState
from twostroke.device.cpu import CpuDevice
from twostroke.device.ledgers import Ledgers
from twostroke.kernels import batch as batch_layout
from twostroke.kernels import ledger as kernel_layout
from twostroke.kernels.batch import TorchBatchOps
from twostroke.kernels.ledger import TorchLedgerOps
from twostroke.limits import Limits
from twostroke.plan import LEDGER_HEADER, NO_LEDGER, Plan
from twostroke.request import Request, Sample
from twostroke.scheduler.joins import Join, row_records
from twostroke.scheduler.ledgers import ledger_record

R, VOCAB, LENGTH = 6, 37, 64
LIMITS = Limits(VOCAB, LENGTH, 4, 99)

# NOTE: numpy's, under the interpreter: masked lanes compute with whatever is there.
pytestmark = pytest.mark.filterwarnings("ignore::Warning:triton.runtime.interpreter")


class Row(NamedTuple):
    """A row that joins with tokens and parameters; without `ledger`, its number is kept from the device."""

    row: int
    prompt: list[int]
    output: list[int]
    params: dict[str, Any]
    ledger: int = NO_LEDGER


class Bench:
    """Rows, ledgers and their operations."""

    def __init__(self, kind: str, ledgers: int = R) -> None:
        device = CpuDevice()
        self.rows = BatchState(
            device, max_rows=R, max_lanes=R, max_tokens=64, table_width=16, block_size=4, num_groups=1
        )
        device.close()
        self.ledgers = Ledgers(ledgers, VOCAB, LENGTH, torch.device("cpu"))
        for tensor in vars(self.ledgers).values():
            tensor.fill_(3)  # what was there before must not matter
        self.ops: Any = TorchLedgerOps(self.ledgers, self.rows)
        if kind == "triton":
            pytest.importorskip("triton")
            from twostroke.kernels.ledger_triton import TritonLedgerOps

            self.ops = TritonLedgerOps(self.ledgers, self.rows)

    def join(self, *rows: Row) -> None:
        joins, ledgers = [], []
        for row in rows:
            sample = make_sample(row)
            joins.append(Join.of(row.row, sample, len(sample.tokens), 0, row.ledger))
            if row.ledger != NO_LEDGER:
                ledgers.append(ledger_record(row.ledger, sample))
        words = make_words(row_records(joins), np.concatenate([np.zeros(0, np.int32), *ledgers]))
        TorchBatchOps().apply_deltas(words, self.rows)
        if ledgers:
            self.ops.open(words, len(ledgers))
        for row in rows:
            self.rows.length[row.row] = len(row.prompt) + len(row.output)

    def edited(self, operation: str, logits: torch.Tensor, row_ids: list[int]) -> torch.Tensor:
        logits = logits.clone()
        getattr(self.ops, operation)(logits, torch.tensor(row_ids, dtype=torch.int32))
        return logits


def make_sample(row: Row) -> Sample:
    sample = Sample(Request.create("a", row.prompt, SamplingParams(max_tokens=16, **row.params), 0, LIMITS))
    sample.tokens = np.array([*row.prompt, *row.output], np.int32)
    return sample


def make_words(joins: np.ndarray, ledgers: np.ndarray) -> torch.Tensor:
    none = np.zeros(0, np.int32)
    plan = Plan(0, none, none.reshape(0, 4), none, joins, none.reshape(0, 4), none.reshape(0, 2), ledgers)
    words = np.full(4000, -99, np.int32)
    layout.pack(plan, words)
    return torch.from_numpy(words)


@pytest.fixture(params=["torch", "triton"])
def kind(request):
    return request.param


def make_logits(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def test_the_two_statements_of_a_record_agree():
    for place, name in enumerate(LEDGER_HEADER.names):
        assert getattr(kernel_layout, {"words": "WORDS", "ledger": "LEDGER"}.get(name, name.upper())) == place
    assert LEDGER_HEADER.itemsize == 4 * kernel_layout.LEDGER_HEADER_WORDS
    assert batch_layout.LEDGERS_AT == layout.Header.LEDGERS_AT


ROWS = [
    Row(0, [1, 2, 1], [2, 2, 5], dict(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.5), 3),
    Row(1, [1, 2], [], dict(temperature=0.5)),
    Row(2, [7], [8, 9, 8], dict(logit_bias={4: 1.5, 8: -2.0}, frequency_penalty=-1.0), 0),
    Row(4, [7, 9, 9], [], dict(allowed_token_ids=[4, 5], logit_bias={4: 1.0, 6: 1.0}, repetition_penalty=0.5), 5),
    Row(5, [3], [3, 3], dict(bad_words=[[6], [3, 4], [3, 3, 7], [9, 3, 1]], no_repeat_ngram_size=2), 1),
]


def test_biases_are_added_and_what_is_not_allowed_is_barred(kind):
    """C40, C43: rows without the parameter, and rows without a ledger, keep their logits."""
    bench, logits = Bench(kind), make_logits(6)
    bench.join(*ROWS)
    edited = bench.edited("add_biases", logits, [4, R, 2, 1, 0, 5])
    assert torch.equal(edited[[1, 3, 4]], logits[[1, 3, 4]])
    assert edited[0].isfinite().nonzero().squeeze(1).tolist() == [4, 5]
    assert edited[0, 4] == logits[0, 4] + 1
    assert edited[0, 5] == logits[0, 5]
    changed = {4: 1.5, 8: -2.0}
    assert edited[2].tolist() == [float(logits[2, i] + changed.get(i, 0.0)) for i in range(VOCAB)]
    assert (~edited[5].isfinite()).nonzero().squeeze(1).tolist() == [6]


def test_penalties_count_the_output_and_see_the_prompt(kind):
    """A35: prompt tokens are never counted as output."""
    bench, logits = Bench(kind), make_logits(3)
    bench.join(*ROWS)
    edited = bench.edited("penalize", logits, [0, 1, 2]).tolist()

    def expected(place, counts, prompt, repetition, frequency, presence):
        found = []
        for token in range(VOCAB):
            x, count = float(logits[place, token]), counts.get(token, 0)
            if count or token in prompt:
                x = x / repetition if x > 0 else x * repetition
            found.append(x - frequency * count - (presence if count else 0.0))
        return found

    assert edited[0] == pytest.approx(expected(0, {2: 2, 5: 1}, {1, 2}, 1.5, 0.25, 0.5), abs=1e-5)
    assert edited[1] == logits[1].tolist()
    assert edited[2] == pytest.approx(expected(2, {8: 2, 9: 1}, {7}, 1.0, -1.0, 0.0), abs=1e-5)


@pytest.mark.parametrize(
    ("tokens", "size", "barred"),
    [
        ([1, 2, 3, 1, 2], 3, [3]),
        ([1, 2, 3, 1, 2], 2, [3]),
        ([1, 2, 1, 3, 1], 2, [2, 3]),
        ([1, 2, 1, 3, 1], 1, [1, 2, 3]),
        ([4, 4, 4], 2, [4]),
        ([4, 4, 4], 3, [4]),
        ([4, 4, 4], 4, []),
        ([4], 2, []),
        ([4, 5], 2, []),
        ([4], 1, [4]),
        ([4, 4, 4], 10**12, []),
    ],
)
def test_ngrams(kind, tokens, size, barred):
    bench = Bench(kind)
    bench.join(Row(3, tokens[:1], tokens[1:], dict(no_repeat_ngram_size=size), 2))
    edited = bench.edited("bar_ngrams", torch.zeros(2, VOCAB), [1, 3])
    assert edited[0].isfinite().all()
    assert (~edited[1].isfinite()).nonzero().squeeze(1).tolist() == barred


@pytest.mark.parametrize(
    ("tokens", "words", "barred"),
    [
        ([1, 2], [[2, 3]], [3]),
        ([1, 2], [[1, 3]], []),
        ([1, 2], [[1, 2, 3], [2, 4], [5, 2, 6], [2, 3]], [3, 4]),
        ([2], [[1, 2, 3], [2, 2]], [2]),
        ([1, 1], [[1, 1, 1]], [1]),
        ([9, 1, 2], [[9, 1, 2, 3], [8, 1, 2, 4]], [3]),
        ([5], [[5, number] for number in range(6, 26)], list(range(6, 26))),
    ],
)
def test_bad_words_of_several_tokens(kind, tokens, words, barred):
    bench = Bench(kind)
    bench.join(Row(3, tokens[:1], tokens[1:], dict(bad_words=words), 2))
    edited = bench.edited("bar_sequences", torch.zeros(2, VOCAB), [1, 3])
    assert edited[0].isfinite().all()
    assert (~edited[1].isfinite()).nonzero().squeeze(1).tolist() == barred


def test_barring_does_not_hide_bad_logits(kind):
    """C04: a NaN or +inf at a barred token still ends the sample with an error."""
    bench = Bench(kind)
    bench.join(Row(0, [1], [1], dict(no_repeat_ngram_size=1, bad_words=[[2], [1, 3]], allowed_token_ids=[5, 6]), 0))
    for operation, token in (("bar_ngrams", 1), ("bar_sequences", 3), ("add_biases", 2), ("add_biases", 30)):
        for bad in (math.nan, math.inf):
            logits = torch.zeros(1, VOCAB)
            logits[0, token] = bad
            assert bench.edited(operation, logits, [0])[0, token].isnan()


def test_a_token_is_entered_behind_the_row_s_tokens(kind):
    """A35: the newest token counts before the next one is sampled. Rows without a ledger, and the dummy row, do not."""
    bench = Bench(kind)
    bench.join(*ROWS)
    before = bench.ledgers.counts.clone()
    row_ids = torch.tensor([5, 1, R, 0], dtype=torch.int32)
    bench.ops.enter(torch.tensor([4, 9, 9, 2], dtype=torch.int32), row_ids)
    assert bench.ledgers.history[1, :4].tolist() == [3, 3, 3, 4]
    assert bench.ledgers.history[3, :7].tolist() == [1, 2, 1, 2, 2, 5, 2]
    assert (bench.ledgers.counts - before).nonzero().tolist() == [[1, 4], [3, 2]]
    assert bench.ledgers.counts[3, [1, 2, 5]].tolist() == [1, 7, 2]


def test_a_ledger_opens_as_if_nobody_had_it_before(kind):
    """C40: what the last row left in it is gone."""
    bench = Bench(kind, ledgers=1)
    bench.join(Row(0, [1, 1], [2], dict(allowed_token_ids=[1], bad_words=[[1, 2]], frequency_penalty=1.0), 0))
    bench.join(Row(3, [5], [6], dict(frequency_penalty=1.0), 0))
    logits = make_logits(1)
    assert torch.equal(bench.edited("add_biases", logits, [3]), logits)
    assert torch.equal(bench.edited("bar_sequences", logits, [3]), logits)
    difference = (logits - bench.edited("penalize", logits, [3]))[0]
    assert difference.nonzero().squeeze(1).tolist() == [6]


def random_row(rng: np.random.Generator, row: int) -> Row:
    def ids(count: int) -> list[int]:
        return rng.integers(0, VOCAB, count).tolist()

    params: dict[str, Any] = dict(
        presence_penalty=float(rng.normal()),
        frequency_penalty=float(rng.normal()),
        repetition_penalty=float(rng.uniform(0.5, 2)),
        no_repeat_ngram_size=int(rng.integers(1, 4)),
        logit_bias={token: float(rng.normal()) for token in ids(5)},
        bad_words=[ids(int(rng.integers(1, 4))) for _ in range(50)],
    )
    if rng.random() < 0.5:
        params["allowed_token_ids"] = list(range(VOCAB // 2))
    return Row(row, ids(int(rng.integers(1, 30))), ids(int(rng.integers(0, 15))), params, row)


def test_triton_equals_torch_on_random_rows():
    rng = np.random.default_rng(0)
    benches, changed = [Bench("torch"), Bench("triton")], set()
    for round_ in range(4):
        rows = [random_row(rng, int(row)) for row in rng.permutation(R)[:3]]
        row_ids = [*(row.row for row in rows), R]
        logits, tokens = make_logits(4, seed=round_), torch.from_numpy(rng.integers(0, VOCAB, 4)).int()
        for bench in benches:
            bench.join(*rows)
            bench.ops.enter(tokens, torch.tensor(row_ids, dtype=torch.int32))
            for row in rows:
                bench.rows.length[row.row] += 1
        for operation in ("add_biases", "penalize", "bar_ngrams", "bar_sequences"):
            one, two = (bench.edited(operation, logits, row_ids) for bench in benches)
            assert torch.equal(one, two), operation
            changed |= {operation} if not torch.equal(one, logits) else set()
    assert len(changed) == 4
