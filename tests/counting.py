"""What processes of tests do at a board. They import nothing heavy: each of them begins anew."""

from __future__ import annotations

import time

from twostroke.server.board import WAITING, Board


def count_up(board: Board, limit: int) -> None:
    """Count as long as all processes together have not counted to `limit`."""
    counted = True
    while counted:
        with board.locked():
            counted = board.total(WAITING) < limit
            board.own[WAITING] += counted


def hold(board: Board) -> None:
    """Keep the others out, and never let them in."""
    with board.locked():
        board.own[WAITING] += 1
        time.sleep(600)
