"""An engine that several API processes share, as one of them has it."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection

from ..request import mix_seed
from .attached_engine import AttachedEngine
from .board import WAITING, Board
from .wire import Begun, FromEngine, Ready, Unfit


class SharedEngine(AttachedEngine):
    """A front beside others: what all of them have in the queue together is held to its limit.

    Args:
        connection, ready, on_end: see `AttachedEngine`.
        seed: of the engine; each process draws other seeds from it.
        board: says how much each process has in the queue.
    """

    def __init__(
        self, connection: Connection, ready: Ready, seed: int | None, board: Board, on_end: Callable[[], None]
    ) -> None:
        self._board = board
        super().__init__(connection, ready, None if seed is None else mix_seed(seed, board.place), on_end)
        self._publish()

    def _count_in(self, samples: int, elsewhere: int = 0) -> None:
        with self._board.locked():
            super()._count_in(samples, elsewhere + round(self._board.elsewhere(WAITING)))
            self._publish()

    def _take(self, message: FromEngine) -> None:
        super()._take(message)
        if isinstance(message, Begun | Unfit):
            self._publish()

    def _publish(self) -> None:
        """Let the others know how many wait here."""
        with self._counting:
            if self.alive:  # the place belongs to the next engine then
                self._board.own[WAITING] = self._submitted - self._remote.begun
