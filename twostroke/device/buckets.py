"""Buckets: the padded sizes of what a step has a number of."""

from __future__ import annotations

from bisect import bisect_left


class Buckets:
    """A few sizes, so that one CUDA graph serves many steps."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sorted(sizes)

    @classmethod
    def padded(cls, most: int) -> Buckets:
        """1, 2, 4, then multiples of 8 to 64, of 16 to 256, of 32 to 512, and of 64 beyond, up to `most`.

        The steps between sizes grow with the size, so that padding stays below a quarter from 8 on.
        """
        sizes = [1, 2, 4]
        for step, top in ((8, 64), (16, 256), (32, 512), (64, most)):
            sizes += range(sizes[-1] // step * step + step, top + 1, step)
        return cls._up_to(most, sizes)

    @classmethod
    def eighths(cls, most: int) -> Buckets:
        """Multiples of 64 to 1,024, then of an eighth of the power of two below, up to `most`.

        From 512 on padding is below an eighth, and 4% in the mean.
        """
        sizes = [64]
        while sizes[-1] < most:
            sizes.append(sizes[-1] + max(64, 1 << sizes[-1].bit_length() - 4))
        return cls._up_to(most, sizes)

    @classmethod
    def doubling(cls, most: int, first: int, widest: int | None = None) -> Buckets:
        """`first`, twice that, and so on, up to `most`; no two sizes are farther apart than `widest`."""
        sizes = [first]
        while sizes[-1] < most:
            sizes.append(sizes[-1] + min(sizes[-1], widest or most))
        return cls._up_to(most, sizes)

    @classmethod
    def _up_to(cls, most: int, sizes: list[int]) -> Buckets:
        return cls([size for size in sizes if size < most] + [most])

    def fit(self, size: int) -> int:
        """Return the smallest bucket that holds `size`; 0 for 0."""
        return self.sizes[bisect_left(self.sizes, size)] if size else 0
