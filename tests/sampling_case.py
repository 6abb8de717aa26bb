"""Inputs for the sampler's tests, and what it must answer, spelled out in Python integers and float64."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from twostroke.sampling.state import SamplingState

NUM_STOPS = 4
SPLIT = 4096
"""Tokens of a split: the draw is of a split first, then of a token in it."""


@dataclass(frozen=True)
class Row:
    """The sampling parameters of one row."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    outputs: int = 0
    min_outputs: int = 0
    stop_ids: tuple[int, ...] = ()
    typical_p: float = 1.0


DUMMY = Row(temperature=0.0)


def make_state(rows: Sequence[Row], device: str = "cpu") -> SamplingState:
    """One column per row, then the dummy row's."""
    rows = [*rows, DUMMY]

    def column(values: list, dtype: type = np.int32) -> torch.Tensor:
        return torch.from_numpy(np.array(values).astype(dtype)).to(device)

    return SamplingState(
        temperature=column([row.temperature for row in rows], np.float32),
        top_k=column([row.top_k for row in rows]),
        top_p=column([row.top_p for row in rows], np.float32),
        min_p=column([row.min_p for row in rows], np.float32),
        typical_p=column([row.typical_p for row in rows], np.float32),
        seed_low=column([row.seed & 0xFFFFFFFF for row in rows], np.uint32).view(torch.int32),
        seed_high=column([row.seed >> 32 for row in rows], np.uint32).view(torch.int32),
        outputs=column([row.outputs for row in rows]),
        min_outputs=column([row.min_outputs for row in rows]),
        stop_ids=column([(*row.stop_ids, *[-1] * NUM_STOPS)[:NUM_STOPS] for row in rows]).T.contiguous(),
    )


def run(sampler: Callable, logits: torch.Tensor, rows: Sequence[int], state: SamplingState) -> tuple[list, list]:
    """The tokens and errors that `sampler` (with the arguments of `sample`) writes, over what none would write."""
    rows = torch.tensor(rows, dtype=torch.int32, device=logits.device)
    tokens, errors = torch.full((2, len(rows)), -7, dtype=torch.int32, device=logits.device)
    sampler(logits, rows, state, tokens, errors)
    return tokens.tolist(), errors.tolist()


def philox_words(key: Sequence[int], counter: Sequence[int]) -> list[int]:
    """Philox4x32-10 in Python integers, which have no width to go wrong with."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        even, odd = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [odd >> 32 ^ c[1] ^ k0, odd % 2**32, even >> 32 ^ c[3] ^ k1, even % 2**32]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c


def expected_gumbel(word: int) -> float:
    """-log(-log u) in float64, which holds every u exactly."""
    return -math.log(-math.log(((word >> 8) + 0.5) * 2.0**-24))


def kept_tokens(logits: np.ndarray, row: Row) -> np.ndarray:
    """Mask of the tokens that the filters keep, by sorting, in float64 after the scaling in float32."""
    scaled = ((logits - logits.max()) / np.float32(row.temperature)).astype(np.float64)
    kept = np.isfinite(scaled)
    if 0 < row.top_k < len(logits):
        kept &= scaled >= np.sort(scaled)[-row.top_k]
    mass = np.where(kept, np.exp(scaled), 0.0)
    if row.top_p < 1.0:
        order = np.argsort(-mass, kind="stable")
        reached = np.cumsum(mass[order]) >= np.float32(row.top_p) * mass.sum()
        kept &= scaled >= scaled[order[np.argmax(reached)]]
    if row.min_p > 0.0:
        kept &= scaled >= math.log(np.float32(row.min_p))
    return kept & typical_tokens(scaled, kept, row.typical_p)


def typical_tokens(scaled: np.ndarray, kept: np.ndarray, typical_p: float) -> np.ndarray:
    """Mask of the tokens whose surprise is nearest to the entropy, by sorting, in float64."""
    if typical_p >= 1.0:
        return kept
    mass = np.where(kept, np.exp(scaled), 0.0) / np.exp(scaled[kept]).sum()
    surprise = -np.log(mass, where=mass > 0, out=np.full(len(mass), -np.inf))
    shift = np.where(mass > 0, np.abs(surprise - (mass * np.where(mass > 0, surprise, 0.0)).sum()), np.inf)
    order = np.argsort(shift, kind="stable")
    reached = np.cumsum(mass[order]) >= np.float32(typical_p)
    # NOTE: ties in exact arithmetic may differ by rounding here.
    return shift <= shift[order[np.argmax(reached)]] + 1e-9


def expected_token(logits: np.ndarray, row: Row) -> tuple[int, int]:
    """(token, error) of one row of float32 logits."""
    if np.isnan(logits).any() or (logits == np.inf).any():
        return 0, 1
    logits = logits.copy()
    if row.outputs < row.min_outputs:
        logits[list(row.stop_ids)] = -np.inf
    if not np.isfinite(logits).any():
        return 0, 1
    if row.temperature == 0:
        return int(np.argmax(logits)), 0
    scaled = (logits - logits.max()) / np.float32(row.temperature)
    return drawn_token(np.where(kept_tokens(logits, row), scaled, -np.inf), row), 0


def drawn_token(kept: np.ndarray, row: Row) -> int:
    """The token that a row draws from what is kept: logits over temperature, the largest one 0, -inf for the others."""
    with np.errstate(divide="ignore"):
        weights = np.log(np.add.reduceat(np.exp(kept.astype(np.float64)), range(0, len(kept), SPLIT)))
    start = int(np.argmax(weights + noise(row, 0, len(weights), purpose=1))) * SPLIT
    within = kept[start : start + SPLIT]
    return start + int(np.argmax(within + noise(row, start, len(within), purpose=0)))


def noise(row: Row, first: int, count: int, purpose: int) -> np.ndarray:
    """The noise of the tokens or splits `first` (a multiple of four), first + 1 and so on: float64 [count]."""
    key = row.seed & 0xFFFFFFFF, row.seed >> 32
    quads = range(first // 4, -(-(first + count) // 4))
    words = [word for quad in quads for word in philox_words(key, (row.outputs, 0, quad, purpose))]
    return np.array([expected_gumbel(word) for word in words[:count]])


def every_combination(vocab: int) -> list[Row]:
    """Each choice of the filters with each kind of temperature, every row with its own seed and output index."""
    choices = product((0.0, 0.7, 1.5), (-1, 1, 3, vocab, vocab + 9), (1e-6, 0.9, 1.0), (0.0, 0.1, 1.0))
    return [
        Row(*choice, seed=number * 0x9E3779B97F4A7C15 % 2**64, outputs=number % 7)
        for number, choice in enumerate(choices)
    ]


def typical_rows(vocab: int) -> list[Row]:
    """typical_p with each kind of temperature, alone and behind the other filters; and rows without it."""
    choices = product((0.0, 0.7, 1.5), (0, vocab // 2), (0.9, 1.0), (0.0, 0.05), (0.1, 0.5, 0.95, 1.0))
    return [
        Row(*choice[:4], typical_p=choice[4], seed=number * 0x9E3779B97F4A7C15 % 2**64, outputs=number % 7)
        for number, choice in enumerate(choices)
    ]


def random_logits(count: int, vocab: int, seed: int) -> torch.Tensor:
    """float32 [count, vocab]: in turn plain, full of ties, and with forbidden tokens."""
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * 2
    logits[1::3] = logits[1::3].round()
    logits[2::3] = logits[2::3].masked_fill(logits[2::3] < -1, -math.inf)
    logits[2::3, vocab // 2] = 0.5
    return logits
