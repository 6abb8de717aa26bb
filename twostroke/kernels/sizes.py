"""Arithmetic of grids, on the host: triton's own functions serve kernels too, and cost a launch some microseconds."""


def cdiv(x: int, y: int) -> int:
    """Return x / y, rounded up."""
    return -(-x // y)


def next_power_of_2(x: int) -> int:
    """Return the smallest power of two that is not below x >= 1."""
    return 1 << (x - 1).bit_length()
