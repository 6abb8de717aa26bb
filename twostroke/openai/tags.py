"""Tags in a text that comes piece by piece."""

from __future__ import annotations


def overlap(text: str, tag: str) -> int:
    """The length of the longest end of `text` that `tag` begins with."""
    return next(n for n in range(min(len(text), len(tag)), -1, -1) if text.endswith(tag[:n]))
