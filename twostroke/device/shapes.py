"""Shapes: the sizes of a step's tensors, and what they are padded to."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ..plan import NO_FEATURES, Feature
from .buckets import Buckets


class StepShape(NamedTuple):
    """What a step's launches depend on.

    Attributes:
        lanes, chunks: lanes and prompt chunks that there is room for.
        tokens: tokens of the forward pass.
        sampled: positions that are sampled.
        features: what the step's rows ask for.
        copies: blocks of the cache that are copied before; never padded.
        ledgers: ledgers that open before sampling; never padded.
        scores: prompt positions that are scored, behind those that are sampled; never padded.
    """

    lanes: int
    chunks: int
    tokens: int
    sampled: int
    features: Feature = NO_FEATURES
    copies: int = 0
    ledgers: int = 0
    scores: int = 0

    @property
    def held(self) -> bool:
        """Whether the step has two parts."""
        # NOTE: in the common case no flag is asked for its bits, which takes half a microsecond.
        return bool(self.features and self.features & Feature.HELD)


class Shapes(Protocol):
    """Finds a step's shape."""

    def fit(self, needed: StepShape) -> StepShape:
        """Return the shape for a step that needs these sizes; what it has more of each is padding."""
        ...


class ExactShapes:
    """No padding."""

    def fit(self, needed: StepShape) -> StepShape:
        return needed


class PaddedShapes:
    """Few shapes, so that CUDA graphs serve many steps.

    A step of lanes alone is padded to the next bucket of lanes. With prompt chunks there are four sizes, so each has
    fewer values. Chunk tokens lie directly behind the lanes in use, not behind those that there is room for: room for
    lanes and chunks costs next to nothing, and the padding is that of the tokens, which a full step has none of.

    Attributes:
        decode: lanes of steps without chunks.
    """

    def __init__(self, max_lanes: int, max_chunks: int, max_tokens: int) -> None:
        self.decode = Buckets.padded(max_lanes)
        self._max_lanes = max_lanes
        self._lanes = Buckets.doubling(max_lanes, first=32, widest=128)
        self._chunks = Buckets.doubling(max_chunks, first=16)
        self._tokens = Buckets.eighths(max_tokens)

    def fit(self, needed: StepShape) -> StepShape:
        if not needed.chunks:
            lanes = self.decode.fit(needed.lanes)
            return needed._replace(lanes=lanes, tokens=lanes, sampled=lanes)
        lanes, chunks = self._lanes.fit(needed.lanes), self._chunks.fit(needed.chunks)
        tokens, sampled = self._tokens.fit(max(needed.tokens, lanes)), min(lanes + chunks, self._max_lanes)
        return needed._replace(lanes=lanes, chunks=chunks, tokens=tokens, sampled=sampled)
