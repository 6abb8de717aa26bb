"""What a token must be: the sampler's PyTorch path against sorting in float64, transformers, and chance itself.

Names like c01 or r05 are faults that other engines have had.
"""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from sampling_case import (
    NUM_STOPS,
    SPLIT,
    Row,
    every_combination,
    expected_token,
    kept_tokens,
    make_state,
    random_logits,
    run,
    typical_rows,
)

from twostroke.sampling.sampler import sample
from twostroke.sampling.torch_sampler import keep_radius

INF, NAN = math.inf, math.nan
GREEDY = Row(temperature=0.0)


def tokens_of(logits: torch.Tensor, rows: list[Row], order: list[int] | None = None) -> list[int]:
    tokens, errors = run(sample, logits, order or range(len(rows)), make_state(rows))
    assert not any(errors)
    return tokens


def draws(logits: list[float], row: Row, count: int) -> list[int]:
    """`count` draws of one row, at the output indices 0, 1, 2 and so on."""
    rows = [replace(row, outputs=index) for index in range(count)]
    return tokens_of(torch.tensor(logits).expand(count, -1).contiguous(), rows)


@pytest.mark.parametrize("vocab", [5, 63, 260])
def test_tokens_are_those_of_the_definition(vocab: int) -> None:
    """Every combination of parameters, with ties and forbidden tokens, against an independent sampler."""
    rows = every_combination(vocab)
    logits = random_logits(len(rows), vocab, seed=vocab)
    expected = [expected_token(x, row) for x, row in zip(logits.numpy(), rows, strict=True)]
    assert run(sample, logits, range(len(rows)), make_state(rows)) == tuple(map(list, zip(*expected, strict=True)))


@pytest.mark.parametrize("vocab", [SPLIT, SPLIT + 1, 2 * SPLIT + 809])
def test_tokens_of_several_splits_are_those_of_the_definition(vocab: int) -> None:
    rows = [
        *(Row(seed=seed) for seed in range(6)),
        *(Row(seed=seed, top_k=50 * seed, top_p=0.8) for seed in range(3)),
        *(Row(seed=seed, temperature=5.0, min_p=0.3, outputs=seed) for seed in range(3)),
    ]
    logits = random_logits(len(rows), vocab, seed=22)
    expected = [expected_token(x, row)[0] for x, row in zip(logits.numpy(), rows, strict=True)]
    assert tokens_of(logits, rows) == expected
    assert vocab < 2 * SPLIT or {token // SPLIT for token in expected} == {0, 1, 2}


@pytest.mark.parametrize("vocab", [6, 63, 260])
def test_typical_tokens_are_those_of_the_definition(vocab: int) -> None:
    rows = typical_rows(vocab)
    logits = random_logits(len(rows), vocab, seed=vocab)
    expected = [expected_token(x, row) for x, row in zip(logits.numpy(), rows, strict=True)]
    found = run(partial(sample, typical=True), logits, range(len(rows)), make_state(rows))
    assert found == tuple(map(list, zip(*expected, strict=True)))


def test_typical_p_can_drop_the_most_likely_token() -> None:
    """What is left of a flat crowd beside one peak: the surprise of the crowd is nearer to the entropy."""
    logits = torch.tensor([[3.0] + [0.0] * 200]).repeat(20, 1)
    rows = [Row(typical_p=0.5, seed=seed) for seed in range(20)]
    tokens, errors = run(partial(sample, typical=True), logits, range(20), make_state(rows))
    assert not any(errors)
    assert 0 not in tokens


@pytest.mark.parametrize("typical_p", [0.2, 0.7, 0.99])
def test_typical_sets_are_those_of_transformers(typical_p: float) -> None:
    warpers = pytest.importorskip("transformers.generation.logits_process")
    logits = torch.randn(20, 1000, generator=torch.Generator().manual_seed(3)) * 2
    scores = warpers.TypicalLogitsWarper(typical_p)(None, warpers.TopPLogitsWarper(0.95)(None, logits / 0.8))
    row = Row(temperature=0.8, top_p=0.95, typical_p=typical_p)
    for got, x in zip(scores, logits, strict=True):
        assert np.array_equal(got.isfinite().numpy(), kept_tokens(x.numpy(), row))


def test_typical_draws_follow_the_probabilities() -> None:
    """Chi-squared over the tokens that typical_p keeps, with 5 degrees of freedom: above 20.5 once in 1,000 seeds, had
    the seed not been fixed."""
    logits = [0.0, 1.0, -1.0, 2.0, 0.5, 0.5, -2.0, 1.5]
    row, count = Row(typical_p=0.9, temperature=1.3, seed=4), 8_000
    state = make_state([replace(row, outputs=index) for index in range(count)])
    tokens, _ = run(partial(sample, typical=True), torch.tensor(logits).repeat(count, 1), range(count), state)
    kept = torch.from_numpy(kept_tokens(np.array(logits, np.float32), row)).nonzero().squeeze(1)
    seen = torch.bincount(torch.tensor(tokens), minlength=8)
    assert len(kept) == 6
    assert seen[kept].sum() == count
    expected = (torch.tensor(logits, dtype=torch.float64)[kept] / 1.3).softmax(0) * count
    assert ((seen[kept] - expected) ** 2 / expected).sum() < 20.5


@pytest.mark.parametrize("vocab", [5, 1000, 4099])
def test_kept_sets_are_those_of_sorting(vocab: int) -> None:
    rows = [row for row in every_combination(vocab) if row.temperature > 0]
    logits = random_logits(len(rows), vocab, seed=vocab + 1)
    temperature = torch.tensor([row.temperature for row in rows])[:, None]
    distance = (logits.amax(1, keepdim=True) - logits) / temperature
    state = make_state(rows)
    radius = keep_radius(distance.clone(), type(state)(*(column[..., :-1] for column in state)))
    kept = (distance <= radius[:, None]) & distance.isfinite()
    for number, row in enumerate(rows):
        assert np.array_equal(kept[number].numpy(), kept_tokens(logits[number].numpy(), row)), row


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(7, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.05), (20, 0.7, 0.02), (500, 0.999, 0.001)]
)
def test_kept_sets_are_those_of_transformers(top_k: int, top_p: float, min_p: float) -> None:
    warpers = pytest.importorskip("transformers.generation.logits_process")
    logits = torch.randn(20, 1000, generator=torch.Generator().manual_seed(3)) * 2
    scores = logits / 0.8
    for warper in (warpers.TopKLogitsWarper(top_k or 1000), warpers.TopPLogitsWarper(top_p)):
        scores = warper(None, scores)
    if min_p:
        scores = warpers.MinPLogitsWarper(min_p)(None, scores)
    row = Row(temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p)
    for got, x in zip(scores, logits, strict=True):
        assert np.array_equal(got.isfinite().numpy(), kept_tokens(x.numpy(), row))


def test_draws_follow_the_probabilities() -> None:
    """Chi-squared with 7 degrees of freedom: above 24.3 once in 1,000 seeds, had the seed not been fixed."""
    logits = [0.0, 1.0, -1.0, 2.0, 0.5, 0.5, -2.0, 1.5]
    count = 20_000
    seen = torch.bincount(torch.tensor(draws(logits, Row(temperature=1.3, seed=12345), count)), minlength=8)
    expected = (torch.tensor(logits, dtype=torch.float64) / 1.3).softmax(0) * count
    assert ((seen - expected) ** 2 / expected).sum() < 24.3


def test_draws_follow_the_probabilities_across_splits() -> None:
    """Chi-squared with 19 degrees of freedom (43.8) over ranges of tokens, of nearly equal probability, in three
    splits; and 3.3 sigma for the 100 likeliest tokens together."""
    vocab, count = 9_500, 3_000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(5)) * 2
    chances = (logits.double() / 0.9).softmax(0)
    seen = torch.zeros(vocab, dtype=torch.int64)
    for first in range(0, count, 500):
        rows = [Row(temperature=0.9, seed=77, outputs=index) for index in range(first, first + 500)]
        seen += torch.bincount(torch.tensor(tokens_of(logits.repeat(500, 1), rows)), minlength=vocab)
    group = (chances.cumsum(0) * 20).long().clamp(max=19)
    expected = torch.zeros(20, dtype=torch.float64).index_add(0, group, chances) * count
    found = torch.zeros(20, dtype=torch.int64).index_add(0, group, seen)
    assert ((found - expected) ** 2 / expected).sum() < 43.8
    likely = chances.argsort(descending=True)[:100]
    mean = chances[likely].sum() * count
    assert abs(seen[likely].sum() - mean) < 3.3 * mean.sqrt()


def test_draws_follow_the_probabilities_of_the_kept_tokens() -> None:
    """As above with 2 degrees of freedom (13.8): what the filters leave is renormalised, the rest never comes."""
    logits = [0.0, 1.0, -1.0, 2.0, 0.5, 0.5, -2.0, 1.5]
    count = 5_000
    seen = torch.bincount(torch.tensor(draws(logits, Row(top_k=5, top_p=0.85, min_p=0.3, seed=9), count)), minlength=8)
    kept = torch.tensor([1, 3, 7])
    assert seen.sum() == seen[kept].sum() == count
    expected = torch.tensor(logits, dtype=torch.float64)[kept].softmax(0) * count
    assert ((seen[kept] - expected) ** 2 / expected).sum() < 13.8


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.0},
        {"temperature": 0.3},
        {"top_k": 2},
        {"top_p": 0.3},
        {"min_p": 0.7},
        {"seed": 2},
        {"seed": 1 + 2**32},
        {"seed": 1 + 2**63},
        {"min_outputs": 100, "stop_ids": (3, 7)},
    ],
    ids=str,
)
def test_every_parameter_changes_the_tokens(change: dict) -> None:
    logits = [0.0, 1.0, -1.0, 2.0, 0.5, 0.5, -2.0, 1.5]
    assert draws(logits, Row(seed=1), 30) != draws(logits, replace(Row(seed=1), **change), 30)


def test_c01_r05_greedy_is_the_lowest_of_the_largest_and_never_divides() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -INF], [-INF, -INF, -2.0, -2.0], [0.0, 0.0, 0.0, 0.0]])
    assert tokens_of(logits, [GREEDY, replace(GREEDY, top_k=1, top_p=0.5, min_p=0.5), GREEDY]) == [1, 2, 0]


def test_c04_poisoned_rows_are_errors_and_their_mates_are_not() -> None:
    logits = random_logits(9, 50, seed=4)
    alone = tokens_of(logits, [GREEDY, Row(seed=5, top_k=9), Row(seed=6)] * 3)
    for place, poison in ((0, NAN), (4, INF), (8, NAN)):
        logits[place, 7 * place % 50] = poison
    logits[4, 3] = -INF
    rows = [GREEDY, Row(seed=5, top_k=9), Row(seed=6)] * 3
    tokens, errors = run(sample, logits, range(9), make_state(rows))
    assert errors == [1, 0, 0, 0, 1, 0, 0, 0, 1]
    assert tokens == [0 if error else token for token, error in zip(alone, errors, strict=True)]


def test_c04_a_poisoned_stop_id_is_an_error_also_while_it_is_barred() -> None:
    rows = [Row(temperature=t, min_outputs=1, stop_ids=(2,)) for t in (0.0, 1.0)]
    logits = torch.tensor([[0.0, 1.0, NAN, 0.0], [0.0, 1.0, INF, 0.0]])
    assert run(sample, logits, [0, 1], make_state(rows)) == ([0, 0], [1, 1])


@pytest.mark.parametrize("row", [GREEDY, Row(), Row(top_k=3), Row(top_p=0.5), Row(min_p=0.5), Row(min_p=1.0, top_k=1)])
def test_c05_one_allowed_token_is_drawn_and_none_is_an_error(row: Row) -> None:
    logits = torch.full((2, 9), -INF)
    logits[0, 6] = -3.0
    assert run(sample, logits, [0, 0], make_state([row])) == ([6, 0], [0, 1])


@pytest.mark.parametrize("top_k", [8, 9, 2**31 - 1, 0, -1])
def test_r06_top_k_beyond_the_vocabulary_is_no_top_k(top_k: int) -> None:
    logits = random_logits(1, 8, seed=6)[0].tolist()
    assert draws(logits, Row(top_k=top_k, seed=3), 40) == draws(logits, Row(seed=3), 40)


def test_c13_every_stop_id_is_barred_until_min_outputs() -> None:
    logits = torch.tensor([[0.0, 9.0, 1.0, 9.0, 8.0]]).repeat(4, 1)
    rows = [replace(GREEDY, outputs=outputs, min_outputs=3, stop_ids=(3, 1)) for outputs in (0, 2, 3)]
    assert tokens_of(logits, [*rows, replace(GREEDY, stop_ids=(3, 1))]) == [4, 4, 1, 1]


def test_a_row_whose_every_token_is_barred_is_an_error() -> None:
    rows = [Row(temperature=t, min_outputs=1, stop_ids=(0, 2, 3)) for t in (0.0, 1.0)]
    assert run(sample, torch.tensor([[0.0, -INF, 1.0, 2.0]] * 2), [0, 1], make_state(rows)) == ([0, 0], [1, 1])


def test_barring_leaves_the_callers_logits_alone() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    tokens_of(logits, [Row(min_outputs=1, stop_ids=(3,))])
    assert logits.tolist() == [[0.0, 1.0, 2.0, 3.0]]


def test_c06_a_row_does_not_depend_on_its_mates_order_or_count() -> None:
    rows = [row for row in every_combination(200) if row.outputs % 2][:40]
    logits = random_logits(len(rows), 200, seed=7)
    together = tokens_of(logits, rows)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(8)).tolist()
    assert tokens_of(logits[order], rows, order) == [together[number] for number in order]
    for number in (0, 13, 39):
        assert tokens_of(logits[number : number + 1], [rows[number]]) == [together[number]]
        assert tokens_of(logits[number : number + 1], rows, [number]) == [together[number]]


def test_c06_a_row_of_several_splits_does_not_depend_on_its_mates() -> None:
    """The weights of splits are sums: their order must not depend on how many rows there are."""
    rows = [Row(seed=seed, top_p=1.0 - seed % 2 / 10) for seed in range(7)]
    logits = random_logits(7, 9_001, seed=23)
    chances = torch.zeros(7)
    together, _ = run(partial(sample, chances=chances), logits, range(7), make_state(rows))
    for number in range(7):
        alone = torch.zeros(1)
        tokens, _ = run(partial(sample, chances=alone), logits[number : number + 1], [number], make_state(rows))
        assert tokens == together[number : number + 1]
        assert torch.equal(alone, chances[number : number + 1])


def test_c09_equal_seeds_give_equal_tokens_and_c11_others_differ() -> None:
    logits = random_logits(1, 1000, seed=9).expand(12, -1)
    tokens = tokens_of(logits, [Row(seed=seed) for seed in [77, 77, *range(10)]])
    assert tokens[0] == tokens[1]
    assert len(set(tokens[1:])) > 5


def test_consecutive_output_indices_are_fresh_draws() -> None:
    assert len(set(draws([0.0] * 1000, Row(seed=4), 50))) > 40


def test_the_dummy_row_may_hold_any_lane() -> None:
    rows = [Row(seed=1), Row(seed=2)]
    logits = random_logits(4, 64, seed=10)
    logits[3] = NAN
    tokens, errors = run(sample, logits, [0, 2, 1, 2], make_state(rows))
    assert tokens[0::2] == tokens_of(logits[[0, 2]], rows)
    assert tokens[1] == logits[1].argmax()
    assert errors == [0, 0, 0, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_raised_to_float32(dtype: torch.dtype) -> None:
    rows = every_combination(300)
    logits = random_logits(len(rows), 300, seed=11).to(dtype)
    rows = [replace(row, min_outputs=9, stop_ids=(5, 250)) for row in rows]
    assert tokens_of(logits, rows) == tokens_of(logits.float(), rows)


def test_padded_rows_of_logits_are_read_by_their_stride() -> None:
    logits = torch.full((6, 130), 99.0)
    logits[:, :101] = random_logits(6, 101, seed=12)
    rows = every_combination(101)[:90:15]
    assert tokens_of(logits[:, :101], rows) == tokens_of(logits[:, :101].contiguous(), rows)


def test_extreme_temperatures_and_logits_stay_in_their_senses() -> None:
    """The coldest allowed temperature is greedy but for ties, the hottest is uniform, and neither overflows."""
    logits = [-3e38, 1e30, 1e30 * 1.001, 0.0]
    assert set(draws(logits, Row(temperature=1e-5, top_p=0.9, top_k=3, seed=1), 50)) == {2}
    assert set(draws([0.0, 1.0, 2.0, 3.0], Row(temperature=3e38, seed=1), 50)) == {0, 1, 2, 3}


def test_stop_columns_hold_all_their_ids() -> None:
    stops = tuple(range(10, 10 + NUM_STOPS))
    logits = torch.zeros(1, 20)
    logits[0, 10 : 10 + NUM_STOPS] = 5.0
    assert tokens_of(logits, [replace(GREEDY, min_outputs=1, stop_ids=stops)]) == [0]


def test_no_rows_are_no_work() -> None:
    assert run(sample, torch.zeros(0, 8), [], make_state([])) == ([], [])
