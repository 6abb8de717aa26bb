"""Short prompts first."""

from __future__ import annotations

from ...request import Sample

_TOKENS = 1000


class ShortestPrompt:
    """A prompt ranks as if it had come later, by `patience` seconds for each 1,000 tokens.

    A prompt of n tokens that has waited for patience * n / 1,000 seconds goes before all that come from then on. Who
    has a row keeps it: what was computed of a long prompt is not thrown away for a short one.
    """

    takes_rows = False

    def __init__(self, patience: float) -> None:
        self._patience = patience

    def rank(self, sample: Sample) -> float:
        return sample.timings.submitted + self._patience * sample.prompt_len / _TOKENS
