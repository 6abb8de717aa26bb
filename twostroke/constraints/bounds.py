"""Bounds of numbers in JSON schemas: those that the library of grammars would not keep are refused."""

from __future__ import annotations

import math
from typing import Any

_LIMITS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_EXCLUSIVE = {"exclusiveMinimum": ("maximum", "exclusiveMaximum"), "exclusiveMaximum": ("minimum", "exclusiveMinimum")}
"""Each with the names that the other end can have."""


def check_bounds(schema: Any) -> None:
    """Raise `ValueError` for a bound, anywhere in `schema` (parsed JSON), that would not be kept.

    An exclusive bound that is a whole number is taken for an inclusive one where the other end has the same whole part,
    as in 0 < x <= 0.2.
    """
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        elif isinstance(part, dict):
            parts += part.values()
            _check(part)


def _check(part: dict[str, Any]) -> None:
    limits = {name: part[name] for name in _LIMITS if isinstance(part.get(name), int | float)}
    for name, others in _EXCLUSIVE.items():
        for other in others:
            if name in limits and other in limits and _is_lost(limits[name], limits[other]):
                raise ValueError(
                    f"{name}={limits[name]} with {other}={limits[other]} is not supported: {limits[name]} itself would "
                    "be allowed"
                )


def _is_lost(bound: float, other: float) -> bool:
    return math.isfinite(other) and math.trunc(other) == bound != other
