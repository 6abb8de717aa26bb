"""The random numbers: the published stream, and noise that is finite, ordered and truly Gumbel."""

import math

import pytest
import torch
from sampling_case import expected_gumbel, philox_words

from twostroke.kernels.philox import MAX_GUMBEL, MIN_GUMBEL, gumbel, philox

KNOWN = [
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
"""The known-answer vectors published with Random123: key, counter, words."""

EDGES = [0, 0xFF, 0x100, 0x7FFFFEFF, 0x7FFFFFFF, 0x80000000, 0x80000100, 0xFFFFFE00, 0xFFFFFEFF, 0xFFFFFF00, 0xFFFFFFFF]
"""Words at both ends and on both sides of the half where the formula changes, in order."""


def words_of(key: tuple, counter: tuple) -> list[int]:
    tensors = [torch.tensor([part]) for part in counter]
    return [int(word) for word in philox(tuple(torch.tensor([part]) for part in key), tuple(tensors))]


@pytest.mark.parametrize(("key", "counter", "words"), KNOWN)
def test_published_vectors(key: tuple, counter: tuple, words: tuple) -> None:
    assert words_of(key, counter) == list(words)
    assert philox_words(key, counter) == list(words)


def test_many_counters_at_once_are_the_same_stream() -> None:
    """Sign bits in the 64-bit products would show in some of a few hundred random counters."""
    parts = torch.randint(2**32, (6, 300), generator=torch.Generator().manual_seed(1))
    got = torch.stack(philox((parts[0], parts[1]), tuple(parts[2:])), 1)
    for column, words in zip(parts.T.tolist(), got.tolist(), strict=True):
        assert words == philox_words(column[:2], column[2:])


def test_constant_parts_may_be_plain_ints() -> None:
    quads = torch.arange(5)
    got = torch.stack(philox((7, 8), (9, 0, quads, 3)), 1).tolist()
    assert got == [philox_words((7, 8), (9, 0, quad, 3)) for quad in range(5)]


def test_noise_is_accurate_at_the_ends_and_everywhere() -> None:
    """u rounded to 1 in float32 would give infinity once in 2**24 draws."""
    random = torch.randint(2**32, (2000,), generator=torch.Generator().manual_seed(2)).tolist()
    words = EDGES + random
    noise = gumbel(torch.tensor(words))
    assert noise.dtype == torch.float32
    exact = torch.tensor([expected_gumbel(word) for word in words], dtype=torch.float64)
    assert (noise - exact).abs().max() < 2e-6


def test_noise_is_ordered_and_within_its_bounds() -> None:
    noise = gumbel(torch.tensor(EDGES))
    assert (noise.diff() >= 0).all()
    assert noise[0] < noise[3] < noise[-4] < noise[-1]
    assert noise[0] == pytest.approx(MIN_GUMBEL, abs=1e-3)
    assert noise[-1] == pytest.approx(MAX_GUMBEL, abs=1e-3)
    assert noise[0] > MIN_GUMBEL
    assert noise[-1] < MAX_GUMBEL


def test_noise_is_gumbel_distributed() -> None:
    """Kolmogorov-Smirnov at a false-alarm rate of 0.001, had the seed not been fixed; mean and variance at 4 sigma."""
    count = 200_000
    noise = gumbel(torch.stack(philox((5, 6), (0, 0, torch.arange(count // 4), 0)), 1)).flatten().double()
    cdf = (-(-noise.sort().values).exp()).exp()
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    distance = max((cdf - steps[:-1]).max(), (steps[1:] - cdf).max())
    assert distance < 1.95 / math.sqrt(count)
    variance = math.pi**2 / 6
    assert abs(noise.mean() - 0.5772156649) < 4 * math.sqrt(variance / count)
    assert abs(noise.var() - variance) < 4 * variance * math.sqrt(4.4 / count)
