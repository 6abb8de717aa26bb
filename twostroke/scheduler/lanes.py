"""Lanes: the dense positions of the decode batch."""

from __future__ import annotations

import numpy as np

NO_DELTAS = np.empty((0, 2), np.int32)
NO_DELTAS.flags.writeable = False


class Lanes:
    """Which row stands behind each lane, dense: a leaving row's lane is taken by the last lane.

        lane    0  1  2  3                            0  1  2  3
        row     7  5  2  9      -- row 5 leaves -->   7  9  2  dummy      deltas (1, 9), (3, dummy)

    Changes are collected until `pop_deltas`, which says of every changed lane what stands behind it in the end.
    """

    def __init__(self, num_rows: int, dummy_row: int) -> None:
        self.count = 0
        self.lane_of_row = np.full(num_rows, -1, np.intp)
        """The lane of each row, -1 without one."""
        self._dummy_row = dummy_row
        self._rows = np.full(num_rows, dummy_row, np.intp)
        self._changed: set[int] = set()
        self._stale = True
        self._index = self._plan_rows = np.empty(0, np.intp)

    def join(self, row: int) -> None:
        """Give `row` the next lane."""
        self._put(self.count, row)
        self.lane_of_row[row] = self.count
        self.count += 1

    def leave(self, row: int) -> None:
        """Take the lane of `row` away; does nothing if it has none."""
        lane, last = int(self.lane_of_row[row]), self.count - 1
        if lane < 0:
            return
        moved = int(self._rows[last])
        self._put(lane, moved)
        self.lane_of_row[moved] = lane
        self._put(last, self._dummy_row)
        self.lane_of_row[row] = -1
        self.count = last

    def _put(self, lane: int, row: int) -> None:
        self._rows[lane] = row
        self._changed.add(lane)
        self._stale = True

    @property
    def index(self) -> np.ndarray:
        """The rows of the lanes in use, intp [count], read-only; rebuilt only after a change."""
        self._refresh()
        return self._index

    @property
    def plan_rows(self) -> np.ndarray:
        """The same as int32, for the plan; shared by all plans between two changes."""
        self._refresh()
        return self._plan_rows

    def _refresh(self) -> None:
        if not self._stale:
            return
        self._index = self._rows[: self.count].copy()
        self._plan_rows = self._index.astype(np.int32)
        self._index.flags.writeable = self._plan_rows.flags.writeable = False
        self._stale = False

    def pop_deltas(self) -> np.ndarray:
        """What changed since the last call, int32 [M, 2]: lane, row (the dummy row if it is no longer in use)."""
        if not self._changed:
            return NO_DELTAS
        lanes = np.array(sorted(self._changed), np.intp)
        self._changed.clear()
        deltas = np.stack([lanes, self._rows[lanes]], axis=1).astype(np.int32)
        deltas.flags.writeable = False
        return deltas
