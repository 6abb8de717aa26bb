"""Traffic: traces that are drawn at random."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..errors import InvalidConfig
from .arrivals import OUTPUT_TOKEN, Arrival, own_tokens

POISSON, BURSTS, AT_ONCE = PATTERNS = ("poisson", "bursts", "at-once")


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Conversations that begin at random, the same ones for one seed.

    Attributes:
        requests: turns of all conversations together.
        rate: requests a second, on average.
        pattern: `poisson`: conversations begin independently of each other; `bursts`: so many as `burst` begin at once;
            `at-once`: all begin at 0.
        prompt_tokens: least and most tokens of a prompt beyond what is shared; drawn evenly.
        output_tokens: the same of an answer.
        prefixes: of so many different beginnings of `prefix_tokens` tokens each conversation has one.
        turns: of a conversation. A turn's prompt is the one before it, its answer, and new tokens.
        turn_seconds: from one turn to the next, on average (exponential), whether it is answered by then or not.
    """

    requests: int
    rate: float = 1.0
    pattern: str = POISSON
    burst: int = 8
    prompt_tokens: tuple[int, int] = (512, 512)
    output_tokens: tuple[int, int] = (128, 128)
    prefixes: int = 1
    prefix_tokens: int = 0
    turns: int = 1
    turn_seconds: float = 30.0
    seed: int = 0

    def validate(self) -> None:
        """Raise `InvalidConfig` for the first value that is out of its range."""
        if self.pattern not in PATTERNS:
            raise InvalidConfig(f"pattern={self.pattern!r} must be one of {', '.join(PATTERNS)}")
        for name, least in (("requests", 1), ("burst", 1), ("prefixes", 1), ("prefix_tokens", 0), ("turns", 1)):
            if getattr(self, name) < least:
                raise InvalidConfig(f"{name}={getattr(self, name)} must be at least {least}")
        for name in ("rate", "turn_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InvalidConfig(f"{name}={getattr(self, name)} must be above 0, and finite")
        for name in ("prompt_tokens", "output_tokens"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise InvalidConfig(f"{name}={low}-{high} must be a range of numbers from 1 on")

    def __iter__(self) -> Iterator[Arrival]:
        """The arrivals, by time; made as they are asked for."""
        rng = random.Random(self.seed)
        starts = self._starts(rng)
        coming: list[tuple[float, int, int, Arrival]] = []  # time, number, turn: no two are alike
        conversations = -(-self.requests // self.turns)
        number = begun = 0
        next_start = next(starts)
        while number < self.requests:
            if begun < conversations and (not coming or next_start <= coming[0][0]):
                turn, arrival = 1, self._arrival(rng, number, next_start, self._prefix(rng))
                begun, next_start = begun + 1, next(starts)
            else:
                time, _, turn, before = heapq.heappop(coming)
                said = np.full(before.output_tokens, OUTPUT_TOKEN, np.int32)
                arrival = self._arrival(rng, number, time, np.concatenate([before.prompt, said]))
                turn += 1
            if turn < self.turns:
                pause = rng.expovariate(1 / self.turn_seconds)
                heapq.heappush(coming, (arrival.time + pause, number, turn, arrival))
            yield arrival
            number += 1

    def _starts(self, rng: random.Random) -> Iterator[float]:
        """When conversations begin."""
        together = self.burst if self.pattern == BURSTS else 1
        time = 0.0
        while True:
            if self.pattern != AT_ONCE:
                time += rng.expovariate(self.rate / self.turns / together)
            for _ in range(together):
                yield time

    def _prefix(self, rng: random.Random) -> np.ndarray:
        return own_tokens(self.requests + rng.randrange(self.prefixes), self.prefix_tokens)

    def _arrival(self, rng: random.Random, number: int, time: float, before: np.ndarray) -> Arrival:
        prompt = np.concatenate([before, own_tokens(number, rng.randint(*self.prompt_tokens))])
        outputs = rng.randint(*self.output_tokens)
        return Arrival(time, prompt, outputs, outputs)
