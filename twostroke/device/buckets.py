"""Buckets: the padded sizes of decode steps."""

from __future__ import annotations

from bisect import bisect_left


class Buckets:
    """A few sizes of decode steps, so that one CUDA graph serves many batches.

    The steps between sizes grow with the size, so that padding stays below a quarter from 8 lanes on.
    """

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sorted(sizes)

    @classmethod
    def padded(cls, max_lanes: int) -> Buckets:
        """1, 2, 4, then multiples of 8 to 64, of 16 to 256, of 32 to 512, and of 64 beyond, up to `max_lanes`."""
        sizes = [1, 2, 4]
        for step, top in ((8, 64), (16, 256), (32, 512), (64, max_lanes)):
            sizes += range(sizes[-1] // step * step + step, top + 1, step)
        return cls([size for size in sizes if size < max_lanes] + [max_lanes])

    @classmethod
    def exact(cls, max_lanes: int) -> Buckets:
        """Every size: no padding."""
        return cls(list(range(1, max_lanes + 1)))

    def fit(self, lanes: int) -> int:
        """Return the smallest size that holds `lanes`; 0 for 0."""
        return self.sizes[bisect_left(self.sizes, lanes)] if lanes else 0
