"""The sampler's Triton kernels against its PyTorch path: in the interpreter without a GPU, compiled with one."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from sampling_case import (
    DUMMY,
    SPLIT,
    Row,
    every_combination,
    kept_tokens,
    make_state,
    noise,
    random_logits,
    run,
    typical_rows,
)

from twostroke.kernels.philox import MAX_GUMBEL, MIN_GUMBEL, gumbel, philox
from twostroke.sampling.sampler import sample
from twostroke.sampling.state import SamplingState

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from twostroke.kernels import philox_triton  # noqa: E402
from twostroke.kernels.sample import sample_rows  # noqa: E402

INF = math.inf

# NOTE: numpy's, under the interpreter: a filter that is off is log(0), and the extreme logits overflow as they should.
pytestmark = pytest.mark.filterwarnings("ignore::Warning:triton.runtime.interpreter")


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels need CUDA")),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def sample_in_triton(
    logits: torch.Tensor,
    rows: torch.Tensor,
    state: SamplingState,
    tokens: torch.Tensor,
    errors: torch.Tensor,
    typical: bool = False,
) -> None:
    sample_rows(logits, rows, *state, tokens, errors, typical)


def assert_same(
    logits: torch.Tensor, rows: list[Row], device: str, lanes: list[int] | None = None, typical: bool = False
) -> None:
    lanes = lanes or list(range(len(rows)))
    expected = run(partial(sample, typical=typical), logits, lanes, make_state(rows))
    found = run(partial(sample_in_triton, typical=typical), logits.to(device), lanes, make_state(rows, device))
    tokens, errors = found
    assert errors == expected[1]
    wrong = [number for number, token in enumerate(tokens) if token != expected[0][number]]
    if device == "cpu":
        assert not wrong
    for number in wrong:
        # NOTE: two libraries' logarithms differ in the last place, so on CUDA the two best may change places if near.
        assert near_tie(logits[number], rows[lanes[number]], tokens[number], expected[0][number])
    assert len(wrong) <= len(tokens) / 100


def near_tie(logits: torch.Tensor, row: Row, *tokens: int) -> bool:
    """Of two tokens of one split their scores, of others those of their splits lie close together."""
    x = logits.float().numpy()
    kept = np.where(kept_tokens(x, row), (x - x.max()).astype(np.float64) / row.temperature, -np.inf)
    splits = [token // SPLIT for token in tokens]
    if splits[0] == splits[1]:
        scores = [kept[token] + noise(row, token - token % 4, 4, purpose=0)[token % 4] for token in tokens]
    else:
        weights = [np.log(np.exp(kept[split * SPLIT : (split + 1) * SPLIT]).sum()) for split in splits]
        scores = [weights[i] + noise(row, 0, splits[i] + 1, purpose=1)[-1] for i in range(2)]
    return abs(scores[0] - scores[1]) < 1e-4


@triton.jit
def _noise_kernel(seeds, outputs, words, noise, PURPOSE: tl.constexpr, QUADS: tl.constexpr):
    bits = philox_triton.numbered_words(
        tl.load(seeds), tl.load(seeds + 1), tl.load(outputs), tl.arange(0, QUADS), PURPOSE
    )
    ids = tl.arange(0, 4 * QUADS)
    tl.store(words + ids, bits.to(tl.int32, bitcast=True))
    tl.store(noise + ids, philox_triton.gumbel(bits))


@triton.jit
def _gumbel_kernel(words, noise, COUNT: tl.constexpr):
    ids = tl.arange(0, COUNT)
    tl.store(noise + ids, philox_triton.gumbel(tl.load(words + ids).to(tl.uint32, bitcast=True)))


def signed(words: torch.Tensor) -> torch.Tensor:
    """int64 in [0, 2**32) as the int32 of the same bits."""
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


@pytest.mark.parametrize(
    ("seed", "output", "purpose"),
    [(0, 0, 0), (2**64 - 1, 2**31 - 1, 0), (0x299F31D0A4093822, 77, 0), (0x8000000000000001, 5, 3)],
)
def test_words_are_bit_equal_and_noise_agrees(seed: int, output: int, purpose: int, device: str) -> None:
    count = 1024
    key = seed & 0xFFFFFFFF, seed >> 32
    expected = torch.stack(philox(key, (output, 0, torch.arange(count // 4), purpose)), 1).flatten()
    words = torch.zeros(count, dtype=torch.int32, device=device)
    noise = torch.zeros(count, device=device)
    outputs = torch.tensor([output], dtype=torch.int32, device=device)
    _noise_kernel[(1,)](signed(torch.tensor(key)).to(device), outputs, words, noise, PURPOSE=purpose, QUADS=count // 4)
    assert torch.equal(words.cpu(), signed(expected))
    assert (noise.cpu() - gumbel(expected)).abs().max() < 4e-6


def test_noise_is_finite_ordered_and_accurate_at_the_ends(device: str) -> None:
    ends = [0, 0xFF, 0x100, 0x7FFFFEFF, 0x7FFFFFFF, 0x80000000, 0x80000100, 0xFFFF0000]
    words = torch.tensor([*ends, *(0xFFFFFFFF - 0x100 * step for step in reversed(range(8)))])
    noise = torch.zeros(16, device=device)
    _gumbel_kernel[(1,)](signed(words).to(device), noise, COUNT=16)
    assert noise.isfinite().all()
    assert (noise.diff() >= 0).all()
    assert (noise.cpu() - gumbel(words)).abs().max() < 4e-6


def test_noise_is_accurate_where_its_logarithms_change_their_scale(device: str) -> None:
    """Around powers of two, 2/3 and 4/3 of them, and where minus the logarithm has one of these."""
    edges = [edge * 2.0**-n for n in range(5) for edge in (1.0, 2 / 3)]
    edges += [1 - edge for edge in edges] + [math.exp(-edge * scale) for edge in edges for scale in (1.0, 16.0)]
    words = torch.tensor([int(edge * 2**24) + step for edge in edges for step in range(-8, 8)]).clamp(0, 2**24 - 1) << 8
    words = words[torch.arange(1024) % len(words)]
    noise = torch.zeros(1024, device=device)
    _gumbel_kernel[(1,)](signed(words).to(device), noise, COUNT=1024)
    exact = -torch.log(-torch.log(((words >> 8).double() + 0.5) * 2.0**-24))
    assert (noise.cpu() - exact).abs().max() < 2e-6
    assert MIN_GUMBEL <= noise.min() <= noise.max() <= MAX_GUMBEL


@pytest.mark.parametrize("vocab", [5, 1000, 4099])
def test_every_combination_of_parameters(vocab: int, device: str) -> None:
    """With ties and forbidden tokens; a third of the rows have stop ids barred."""
    rows = every_combination(vocab)
    rows = [
        replace(row, min_outputs=row.outputs + number % 3 // 2, stop_ids=(1, vocab - 1))
        for number, row in enumerate(rows)
    ]
    # NOTE: a quarter of them for the large vocabularies, since the interpreter is slow.
    picked = rows if vocab == 5 else rows[vocab % 4 :: 4]
    assert_same(random_logits(len(picked), vocab, seed=vocab), picked, device)


def test_a_vocabulary_of_several_splits(device: str) -> None:
    """Filters that keep tokens in all splits, in some, and in one; barred ids and typical_p among them."""
    filters: list[dict] = [
        {},
        {"temperature": 0.2},
        {"temperature": 9.0},
        {"top_k": 2},
        {"top_k": 40},
        {"top_p": 0.9},
        {"top_k": 900, "top_p": 0.5},
        {"min_p": 0.02},
        {"typical_p": 0.3},
        {"typical_p": 0.8, "top_k": 5},
        {"min_outputs": 9, "stop_ids": (4_100, 20_010)},
    ]
    rows = [DUMMY, *(Row(seed=seed, **kept) for seed, kept in enumerate(filters))]
    assert_same(random_logits(len(rows), 20_011, seed=13), rows, device, typical=True)


def test_splits_without_a_token(device: str) -> None:
    """Forbidden from end to end, or so far from the largest logit that their weight is 0."""
    logits = random_logits(6, 9_000, seed=21)
    logits[:3, :4096] = -INF
    logits[3:, 4096:8192] -= 1e30
    logits[2:4, 8192:] = -INF
    rows = [Row(seed=seed, top_p=1.0 - seed % 2 / 4) for seed in range(6)]
    assert_same(logits, rows, device)


def test_kept_sets_show_in_many_flat_draws(device: str) -> None:
    """At a high temperature every kept token is drawn soon, so a kept set that is off by one token shows."""
    filters = [{"top_k": 3}, {"top_p": 0.4}, {"min_p": 0.96}, {"top_k": 6, "top_p": 0.7, "min_p": 0.97}]
    rows = [Row(temperature=50.0, seed=seed, **kept) for kept in filters for seed in range(15)]
    assert_same(random_logits(1, 9, seed=14).expand(len(rows), -1).contiguous(), rows, device)


@pytest.mark.parametrize("row", [DUMMY, Row(seed=3), Row(seed=3, top_k=3, top_p=0.5, min_p=0.1)], ids=str)
def test_c04_c05_poison_and_single_tokens(row: Row, device: str) -> None:
    logits = torch.zeros(6, 4100)
    logits[0, 4099] = math.nan
    logits[1, 0] = INF
    logits[2] = -INF
    logits[3] = -INF
    logits[3, 4098] = -2.0
    logits[4, 7] = math.nan
    row = replace(row, min_outputs=1, stop_ids=(7,))
    assert_same(logits, [row], device, [0] * 6)
    assert run(sample_in_triton, logits.to(device), [0] * 6, make_state([row], device))[1] == [1, 1, 1, 0, 1, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("row", [DUMMY, Row(seed=3), Row(temperature=0.6, seed=4, top_p=0.8)], ids=str)
def test_poison_shows_wherever_it_lies(row: Row, dtype: torch.dtype, device: str) -> None:
    """Beside larger tokens, barred, alone in a split without tokens, in the last split; not what is only forbidden."""
    places = 0, 8, 4_096, 9_000
    logits = random_logits(1, 9_001, seed=23).repeat(12, 1)
    logits[:, 11] = 50.0
    logits[:, 4_096:8_192] = -INF
    for lane, place in enumerate(places):
        logits[lane, place] = math.nan
        logits[4 + lane, place] = INF
    logits[8, 4_096:] = math.nan
    logits[9] = -INF
    logits[10] = math.nan
    row = replace(row, min_outputs=1, stop_ids=(8, 9_000, 4_097))
    assert_same(logits.to(dtype), [row], device, [0] * 12)
    assert run(sample_in_triton, logits.to(dtype).to(device), [0] * 12, make_state([row], device))[1] == [1] * 11 + [0]


@pytest.mark.parametrize("vocab", [13, 4_095, 8_195])
def test_barred_ids_lie_anywhere(vocab: int, device: str) -> None:
    """The largest logits are those of barred ids: first and last ones, neighbours, on both sides of a split's edge."""
    stops = [(0, 1, 7, 8), (vocab - 1, vocab - 2, 4_095, 4_096), (9, 9, 2, 3), (vocab - 1,)]
    stops = [tuple(min(stop, vocab - 1) for stop in ids) for ids in stops]
    logits = random_logits(8, vocab, seed=25).double()
    for lane in range(8):
        logits[lane, list(stops[lane % 4])] += 30
    rows = [Row(temperature=lane // 4, seed=lane, min_outputs=lane % 3, stop_ids=stops[lane % 4]) for lane in range(8)]
    assert_same(logits.float(), rows, device)


def test_c13_all_tokens_barred_is_an_error(device: str) -> None:
    rows = [Row(temperature=t, min_outputs=1, stop_ids=(0, 2, 3)) for t in (0.0, 1.0)]
    logits = torch.tensor([[0.0, -INF, 1.0, 2.0]] * 2, device=device)
    assert run(sample_in_triton, logits, [0, 1], make_state(rows, device)) == ([0, 0], [1, 1])


def test_c06_a_row_does_not_depend_on_its_mates_order_or_count(device: str) -> None:
    rows = [Row(), Row(seed=5, top_p=0.8), DUMMY, Row(seed=6, top_k=9, temperature=1.3)]
    logits = random_logits(4, 300, seed=15).to(device)
    state = make_state(rows, device)
    together, _ = run(sample_in_triton, logits, [0, 1, 2, 3], state)
    assert run(sample_in_triton, logits[[3, 1, 0]], [3, 1, 0], state)[0] == [together[n] for n in (3, 1, 0)]
    assert run(sample_in_triton, logits[1:2], [1], state)[0] == together[1:2]


def test_the_dummy_row_and_a_stride(device: str) -> None:
    rows = [Row(seed=1), Row(seed=2, top_k=2)]
    logits = torch.full((3, 130), 99.0)
    logits[:, :101] = random_logits(3, 101, seed=16)
    assert_same(logits[:, :101], [*rows, DUMMY], device, [0, 2, 1])


def test_no_rows_are_no_work(device: str) -> None:
    assert run(sample_in_triton, torch.zeros(0, 8, device=device), [], make_state([], device)) == ([], [])


def test_extreme_temperatures_and_logits(device: str) -> None:
    logits = torch.tensor([[-3e38, 1e30, 1e30 * 1.001, 0.0], [0.0, 1.0, 2.0, 3.0]])
    rows = [Row(temperature=1e-5, top_p=0.9, top_k=3), Row(temperature=3e38, top_p=0.6, seed=8)]
    assert_same(logits, rows, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocab", [1000, 49_152, 128_256])
def test_dtypes_and_real_vocabularies(dtype: torch.dtype, vocab: int) -> None:
    rows = [replace(row, min_outputs=3, stop_ids=(2, vocab - 5)) for row in every_combination(vocab)]
    assert_same(random_logits(len(rows), vocab, seed=17).to(dtype), rows, "cuda")


@pytest.mark.gpu
def test_the_dispatch_captures_in_a_graph_and_follows_the_state() -> None:
    """A captured call reads parameters and logits anew at each replay."""
    rows = [DUMMY, Row(seed=1), Row(seed=2, top_k=50, top_p=0.9)]
    state = make_state(rows, "cuda")
    lanes = torch.arange(3, dtype=torch.int32, device="cuda")
    tokens, errors = torch.zeros(2, 3, dtype=torch.int32, device="cuda")
    logits = random_logits(3, 32_000, seed=18).cuda()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        sample(logits, lanes, state, tokens, errors)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            sample(logits, lanes, state, tokens, errors)
        for seed in (19, 20):
            logits.copy_(random_logits(3, 32_000, seed=seed))
            state.outputs.add_(1)
            graph.replay()
            stream.synchronize()
            assert tokens.tolist() == eager_tokens(sample_in_triton, logits, state)
            assert errors.tolist() == [0, 0, 0]


def eager_tokens(sampler: Callable, logits: torch.Tensor, state: SamplingState) -> list[int]:
    return run(sampler, logits, range(len(logits)), state)[0]


@pytest.mark.parametrize("vocab", [7, 300])
def test_typical_tokens_are_those_of_the_torch_path(vocab: int, device: str) -> None:
    rows = typical_rows(vocab)[:: 5 if vocab > 100 else 2]
    rows = [replace(row, min_outputs=3, stop_ids=(1, 4)) for row in rows]
    assert_same(random_logits(len(rows), vocab, seed=vocab), rows, device, typical=True)
