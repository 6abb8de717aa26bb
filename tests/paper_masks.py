"""Constraints made of paper: every so many tokens a mask that follows from all tokens before, some of them late."""

import hashlib
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from twostroke.request import Request


def allowed(tokens: list[int], vocab: int) -> np.ndarray:
    """Which tokens may follow, bool [V]: about half of them, a pure function of those before."""
    digest = hashlib.blake2b(np.array(tokens, np.int64).tobytes(), digest_size=-(-vocab // 8)).digest()
    return np.unpackbits(np.frombuffer(digest, np.uint8), count=vocab).astype(bool)


def has_mask(request: Request, index: int) -> bool:
    """Whether an output token must not be sampled without a mask."""
    gap = request.params.max_thinking_tokens
    return gap is not None and index % gap == 0


class PaperConstraint:
    """Lets every `max_thinking_tokens`-th token, from the first one on, be one of those that are `allowed`."""

    def __init__(self, request: Request, vocab: int) -> None:
        self.held_from = 0
        self._request, self._vocab = request, vocab
        self._tokens = request.prompt.tolist()

    def advance(self, tokens: list[int]) -> None:
        self._tokens += tokens

    def fill(self, mask: np.ndarray) -> None:
        index = len(self._tokens) - len(self._request.prompt)
        bits = np.full(32 * len(mask), 1, np.uint8)
        if has_mask(self._request, index):
            bits[: self._vocab] = allowed(self._tokens, self._vocab)
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)
        self.held_from = next(n for n in range(index + 1, index + 100) if has_mask(self._request, n))

    def forced(self) -> list[int]:
        return []


class PaperConstraints:
    """Work on masks is done at once, or, while `slow`, when `think` is called."""

    def __init__(self, vocab: int) -> None:
        self.mask_words = -(-vocab // 32)
        self.slow = False
        self._vocab = vocab
        self._pending: list[tuple[Callable[[], None], Future[None]]] = []

    def begin(self, request: Request) -> PaperConstraint:
        return PaperConstraint(request, self._vocab)

    def run(self, work: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        self._pending.append((work, future))
        if not self.slow:
            self.think()
        return future

    def think(self) -> bool:
        """Do what is pending; False if nothing was."""
        pending, self._pending = self._pending, []
        for work, future in pending:
            work()
            future.set_result(None)
        return bool(pending)
