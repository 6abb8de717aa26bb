"""Brackets and bands: that the search for a radius finds all it needs in the band, and notices where it does not."""

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from sampling_case import SPLIT, Row, make_state, run

from twostroke.sampling.sampler import sample
from twostroke.sampling.state import SamplingState
from twostroke.sampling.torch_sampler import keep_radius

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from twostroke.kernels import sample as kernels  # noqa: E402
from twostroke.kernels.band import CAPACITY  # noqa: E402
from twostroke.kernels.radius import find_radius  # noqa: E402
from twostroke.kernels.splits import load_splits  # noqa: E402

INF = math.inf
Case = Callable[[], tuple[torch.Tensor, Row]]

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the launches are those of the interpreter"),
    pytest.mark.filterwarnings("ignore::Warning:triton.runtime.interpreter"),
]


POINTERS = (
    *("logits", "stop_ids", "bests", "temperatures", "top_ks", "top_ps", "min_ps", "fars"),
    *("split_values", "split_weights", "inner_weights", "band_counts", "band"),
)


@triton.jit
def _radius_kernel(
    logits,
    stop_ids,
    best,
    temperature,
    top_k,
    top_p,
    min_p,
    far,
    values,
    weights,
    inner,
    counts,
    band,
    vocab,
    num_splits,
    radius,
    banded,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
):
    found, by_band = find_radius(
        logits,
        vocab,
        stop_ids,
        1,
        0,
        tl.load(best),
        tl.load(temperature),
        tl.load(top_k),
        tl.load(top_p),
        tl.load(min_p),
        tl.load(far),
        values,
        weights,
        load_splits(inner, 0, num_splits, 0.0, SPLITS),
        load_splits(counts, 0, num_splits, 0, SPLITS),
        tl.program_id(0),
        num_splits,
        band,
        SPLIT,
        SPLITS,
    )
    tl.store(radius, found)
    tl.store(banded, by_band.to(tl.int32))


class Found:
    """In the place of the kernel `draw`: the radius of a single row, and whether it comes from the band."""

    names = kernels.draw.arg_names

    def __getitem__(self, grid):
        return self

    def __call__(self, *arguments, SPLIT, SPLITS, **_):
        given = dict(zip(self.names, arguments, strict=False))
        self.counts = given["band_counts"][0]
        radius, banded = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
        pointers = (given[name] for name in POINTERS)
        _radius_kernel[(1,)](*pointers, given["vocab"], given["num_splits"], radius, banded, SPLIT=SPLIT, SPLITS=SPLITS)
        self.radius, self.banded = radius.item(), bool(banded)


def find(monkeypatch: pytest.MonkeyPatch, logits: torch.Tensor, row: Row) -> Found:
    """Also asserts that the radius is that of the plain sampler."""
    found = Found()
    monkeypatch.setattr(kernels, "draw", found)
    state = make_state([row])
    kernels.sample_rows(logits[None], torch.zeros(1, dtype=torch.int32), *state, *torch.zeros(2, 1, dtype=torch.int32))
    distance = (logits.max() - logits.float()) / row.temperature
    expected = keep_radius(distance[None], type(state)(*(column[..., :1] for column in state))).item()
    # NOTE: without a farthest token to snap to, infinity and the farthest that occurs keep the same.
    kept = [(distance <= radius) & distance.isfinite() for radius in (expected, found.radius)]
    assert torch.equal(*kept)
    return found


VOCAB = 24_000
IN_SAMPLE = torch.arange(VOCAB) % (16 * (VOCAB // 4096)) < 16


def flat(deviation: float, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(7)) * deviation


@pytest.mark.parametrize(
    ("deviation", "row"),
    [
        (0.1, Row(top_p=0.9)),
        (0.5, Row(top_p=0.5, temperature=1.5)),
        (2.0, Row(top_p=0.99, temperature=0.7)),
        (2.0, Row(top_k=50)),
        (1.0, Row(top_k=200, top_p=0.8)),
        (1.0, Row(min_p=0.05)),
        (1.0, Row(min_p=0.05, top_p=0.9)),
        (1.0, Row(min_p=0.2, top_k=40)),
    ],
    ids=str,
)
def test_a_band_holds_the_radius(monkeypatch: pytest.MonkeyPatch, deviation: float, row: Row) -> None:
    found = find(monkeypatch, flat(deviation), row)
    assert found.banded
    assert found.counts.sum() < VOCAB / 8


def test_a_band_of_bf16_logits_of_a_real_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    found = find(monkeypatch, flat(0.5, 128_256).bfloat16(), Row(top_p=0.9))
    assert found.banded
    assert found.counts.sum() < 128_256 / 12


@pytest.mark.parametrize("top_p", [0.5, 0.99])
@pytest.mark.parametrize("sampled", [0, 2])
def test_a_band_holds_the_radius_of_a_peaked_row(monkeypatch: pytest.MonkeyPatch, top_p: float, sampled: int) -> None:
    """Ten tokens have nearly all the weight, whether some of them are in the sample or none."""
    logits = flat(1.0)
    logits[IN_SAMPLE.nonzero().squeeze(1)[: 300 * sampled : 300]] += 12
    logits[(~IN_SAMPLE).nonzero().squeeze(1)[: 1_000 * (10 - sampled) : 1_000]] += 12
    assert find(monkeypatch, logits, Row(top_p=top_p)).banded


def test_few_allowed_tokens_lie_in_the_band_however_many_top_k_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = flat(1.0).where(torch.arange(VOCAB) % 999 == 7, -INF)
    for row in (Row(top_k=50), Row(top_k=50, top_p=0.7), Row(top_p=0.7)):
        assert find(monkeypatch, logits, row).banded


def too_many_ties() -> tuple[torch.Tensor, Row]:
    return flat(1.0).round(), Row(top_p=0.7)


def too_large_a_k() -> tuple[torch.Tensor, Row]:
    return flat(1.0), Row(top_k=2 * SPLIT, top_p=0.9)


def a_sample_below_the_others() -> tuple[torch.Tensor, Row]:
    return flat(0.5) - IN_SAMPLE.float(), Row(top_p=0.8)


def a_sample_above_the_others() -> tuple[torch.Tensor, Row]:
    return flat(0.5) + IN_SAMPLE.float(), Row(top_p=0.5)


@pytest.mark.parametrize("case", [too_many_ties, too_large_a_k, a_sample_below_the_others, a_sample_above_the_others])
def test_what_a_band_does_not_hold_is_found_in_the_row(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    logits, row = case()
    found = find(monkeypatch, logits, row)
    assert not found.banded
    assert ("sample" in case.__name__) == (found.counts.max() <= CAPACITY)
    monkeypatch.undo()
    assert tokens_in_triton(logits[None], [row]) == run(sample, logits[None], [0], make_state([row]))


def tokens_in_triton(logits: torch.Tensor, rows: list[Row]) -> tuple[list, list]:
    def sampler(logits: torch.Tensor, rows: torch.Tensor, state: SamplingState, *out: torch.Tensor) -> None:
        kernels.sample_rows(logits, rows, *state, *out)

    return run(sampler, logits, range(len(rows)), make_state(rows))


def test_c06_a_row_does_not_depend_on_how_its_splits_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number of programs depends on the number of rows."""
    rows = [Row(seed=seed, top_p=0.9, min_outputs=seed % 2, stop_ids=(3, 9_000)) for seed in range(2)]
    logits = torch.stack([flat(0.5), flat(2.0)])
    expected = tokens_in_triton(logits, rows)
    assert expected == run(sample, logits, [0, 1], make_state(rows))
    monkeypatch.setattr(kernels, "PROGRAMS", 4)
    assert tokens_in_triton(logits, rows) == expected


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from twostroke.kernels import sample

words = {"rows", "outputs", "min_outputs", "stop_ids", "split_ids", "top_ks", "seeds_low", "seeds_high", "tokens",
         "errors", "counts", "band_counts"}
numbers = {"logits_stride", "vocab", "stop_stride", "num_splits"}
kind = lambda name: "*i32" if name in words else "i32" if name in numbers else "*fp32"
for kernel, warps in ((sample.find_bracket, 8), (sample.collect_band, 4), (sample.find_typical, 16), (sample.draw, 16)):
    sizes = dict(NUM_STOPS=8, SPLIT=4096, SPLITS=32, TYPICAL=False, CHANCES=True)
    sizes = {name: size for name, size in sizes.items() if name in kernel.arg_names}
    signature = {name: "constexpr" if name in sizes else kind(name) for name in kernel.arg_names}
    signature |= {name: "*bf16" for name in ("logits", "band") if name in signature}
    constants = {(kernel.arg_names.index(name),): size for name, size in sizes.items()}
    compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
"""


def test_what_the_interpreter_cannot_run_compiles_for_hopper() -> None:
    """The compiler alone minds types that change in a loop or a branch."""
    code = "import os; del os.environ['TRITON_INTERPRET']\n" + COMPILE
    subprocess.run([sys.executable, "-c", code], check=True)
