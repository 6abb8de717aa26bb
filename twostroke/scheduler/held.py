"""Held rows: those whose next token cannot be sampled before the CPU knows all tokens before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ..errors import CannotFollow, told
from ..held_input import HeldInput, ProcessorCall, RowTokens
from ..plan import NO_POSITIONS, Flag, Plan
from ..request import Request, Sample

if TYPE_CHECKING:
    from .batch import Batch
    from .draft import Draft

_NEVER = np.iinfo(np.int64).max


class Constraints(Protocol):
    """Where constraints come from, see `constraints.Constraints`."""

    mask_words: int

    def begin(self, request: Request) -> Any: ...
    def run(self, work: Callable[[], None]) -> Future[None]: ...


class _Follower:
    """What is known of one held sample beside the loop: its constraint, and the mask of its next token.

    A worker writes to it while `work` is not done, the loop's thread otherwise.

    Attributes:
        mask: int32 [words], of the token behind the first `known` ones.
        held_from: as its constraint says, once `mask` is there. since: what that was at the last mask that was used.
        forced: the next tokens, as far as there is no choice; the mask allows the first of them.
        failure: what went wrong; the sample then ends with it.
    """

    def __init__(self, request: Request, constraints: Constraints) -> None:
        self.mask = np.full(constraints.mask_words, -1, np.int32)
        self.known = -1
        self.held_from = self.since = 0
        self.forced: list[int] = []
        self.failure: str | None = None
        self.work: Future[None] | None = None
        self._request = request
        self._constraints = constraints
        self._constraint: Any = None

    def follow(self, tokens: np.ndarray) -> None:
        """Let a worker find the mask behind `tokens`, prompt and output, int32, unless it is known or on its way."""
        params = self._request.params
        if params.structured is None and params.max_thinking_tokens is None:
            return  # it has logits processors only
        if self.known != len(tokens):
            new = tokens[max(self.known, len(self._request.prompt)) :].tolist()
            self.known = len(tokens)
            self.work = self._constraints.run(partial(self._fill, new))

    def _fill(self, new: list[int]) -> None:
        try:
            if self._constraint is None:
                self._constraint = self._constraints.begin(self._request)
            self._constraint.advance(new)
            self._constraint.fill(self.mask)
            self.forced = self._constraint.forced()
            if self.forced:
                self.mask[:] = 0
                self.mask.view(np.uint32)[self.forced[0] // 32] = np.uint32(1 << self.forced[0] % 32)
            self.held_from = self._constraint.held_from
        except Exception as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Leave the sample no token, so that it ends."""
        self.failure = str(error) if isinstance(error, CannotFollow) else told(error)
        self.mask[:] = 0
        self.forced = []


class _Late:
    """A sample whose mask was not there in time.

    Attributes:
        step: the step that computed its position in vain.
        taken_back: that step is committed, and its position does not count any more.
        ready: the mask has come.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.taken_back = self.ready = False


class _Jump(NamedTuple):
    """Tokens that are taken without sampling.

    Attributes:
        step: samples the first forced token, of which the mask leaves no choice.
        known: tokens of the row that were known before.
        tokens: the forced tokens behind the first one, int32.
    """

    step: int
    known: int
    tokens: np.ndarray


class HeldRows:
    """Follows the held rows through steps in two parts.

        plan N + 1, with the row | N + 1 first part: forward | commit N: its token | masks | N + 1 second part: sampling

    The first part of a step reads the token that the row sampled last, on the device. So a row takes part in a step
    only if the second parts of all its earlier steps are queued: with two slots that is always so, with more the row
    sits out (it is *paused*) until then. A mask is waited for only a short while. If it is not there, the second part
    goes without the row: its position is taken back when the step is committed, and computed again, as a prompt chunk
    of one token, when the mask has come. Meanwhile the row is *late*.

    Args:
        batch: the rows. constraints: None where there are none.

    Attributes:
        wake: leaves a command for the scheduler; called by workers.
        count: running rows that are held.
        paused, late: see above.
        jumped: rows whose jump is not launched.
        forced: what is forced, of rows that jump, until the step that samples the first token of it is committed.
    """

    def __init__(self, batch: Batch, constraints: Constraints | None) -> None:
        self.wake: Callable[[Callable[[Any], Any]], None] | None = None
        self.count = 0
        self.paused: dict[int, None] = {}
        self.late: dict[Sample, _Late] = {}
        self.jumped: dict[int, None] = {}
        self.forced: dict[int, _Jump] = {}
        self._batch = batch
        self._constraints = constraints
        self._since = np.full(len(batch.rows.order), _NEVER, np.int64)
        """Of each row, the index of the first token that it must not sample without a mask."""
        self._followers: dict[Sample, _Follower] = {}
        self._unsampled: deque[Plan] = deque()

    # -- Rows come and go ----------------------------------------------------------------------------------------

    def join(self, row: int, sample: Sample) -> None:
        """`sample` got `row`."""
        if not sample.request.terms.is_held:
            return
        assert self._constraints is not None
        if (follower := self._followers.get(sample)) is None:
            follower = self._followers[sample] = _Follower(sample.request, self._constraints)
        self._since[row] = sample.prompt_len + follower.since
        self.count += 1

    def withdraw(self, row: int) -> None:
        """`row` takes part in no further step."""
        self.count -= int(self._since[row] != _NEVER)
        self._since[row] = _NEVER
        self.paused.pop(row, None)
        self.jumped.pop(row, None)
        sample = self._batch.rows.samples[row]
        if sample in self.late and self.late[sample].taken_back:
            del self.late[sample]

    def forget(self, sample: Sample) -> None:
        """`sample` has ended."""
        self._followers.pop(sample, None)
        self.late.pop(sample, None)

    def failure(self, sample: Sample) -> str | None:
        """What went wrong beside the loop, if anything did."""
        follower = self._followers.get(sample)
        return follower.failure if follower else None

    # -- The first part ------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Rows that have not sampled yet in a step in flight sit the next one out."""
        batch = self._batch
        for plan in self._unsampled:
            for row in plan.sampled_rows()[plan.held].tolist():
                if batch.lanes.lane_of_row[row] >= 0 or row in batch.ready:
                    batch.lanes.leave(row)
                    batch.ready.pop(row, None)
                    self.paused[row] = None

    def positions(self, lanes: np.ndarray, draft: Draft) -> np.ndarray:
        """Which sampled positions of a step are held: int32 [H]. `lanes` are the rows in lanes, intp [L]."""
        if not self.count:
            return NO_POSITIONS
        rows = np.concatenate([lanes, draft.sampling_rows()])
        held = np.flatnonzero(self._batch.rows.launched[rows] >= self._since[rows]).astype(np.int32)
        held.flags.writeable = False
        return held

    def launched(self, plan: Plan) -> None:
        if len(plan.held):
            self._unsampled.append(plan)

    # -- The second part -----------------------------------------------------------------------------------------

    def unhold(self, plan: Plan, patience: float) -> HeldInput:
        """What the second part of `plan` needs; all earlier steps are committed.

        Args:
            patience: seconds to wait for masks.
        """
        assert self._unsampled.popleft() is plan, "second parts out of order"
        rows = self._batch.rows
        living = [(n, row) for n, row in enumerate(plan.sampled_rows()[plan.held].tolist()) if rows.alive[row]]
        followers = [self._followers[rows.samples[row]] for _, row in living]
        for (_, row), follower in zip(living, followers, strict=True):
            follower.follow(rows.tokens[row, : rows.known(row)])
        wait([follower.work for follower in followers if follower.work], patience)
        ready: list[tuple[int, int, _Follower]] = []
        for (place, row), follower in zip(living, followers, strict=True):
            if follower.work is None or follower.work.done():
                ready.append((place, row, follower))
                self._go_on(row, follower)
                self._jump(row, plan.step, follower.forced)
            else:
                self._be_late(row, plan.step, follower)
        return self._input(ready)

    def committed(self, plan: Plan) -> None:
        """Take back the positions that `plan` computed in vain."""
        rows = self._batch.rows
        for sample, late in list(self.late.items()):
            if late.step == plan.step and not late.taken_back:
                row = self._batch.row_of[sample]
                rows.launched[row] -= 1
                rows.confirmed[row] -= 1
                late.taken_back = True
                sample.unmark_versions(rows.known(row))
                if rows.order[row] < 0:  # it was preempted meanwhile
                    del self.late[sample]
                else:
                    self._resume(sample)

    def _go_on(self, row: int, follower: _Follower) -> None:
        """The row samples: what it sat out for is over."""
        rows = self._batch.rows
        follower.since = follower.held_from
        if self._since[row] != _NEVER:
            self._since[row] = rows.samples[row].prompt_len + follower.since
        if row in self.paused:
            del self.paused[row]
            if rows.launched[row] < rows.limit[row]:
                self._batch.ready[row] = None

    def _jump(self, row: int, step: int, forced: list[int]) -> None:
        """Append the forced tokens of which `step` samples the first; the next chunk of `row` computes all of them.

        The last token is always sampled. Without blocks for the others the row goes on token by token.
        """
        rows, batch = self._batch.rows, self._batch
        known = rows.known(row)
        count = min(len(forced), int(rows.limit[row]) - known)
        blocks = rows.num_groups * max(0, rows.blocks_of(known + count) - int(rows.held[row]))
        runs = rows.order[row] >= 0
        if count < 2 or (runs and batch.pool.available < blocks):
            return
        rows.tokens[row, known : known + count] = forced[:count]
        self._prefill_to(row, known + count)
        self.forced[row] = _Jump(step, known, np.array(forced[1:count], np.int32))
        if runs:  # else it was preempted meanwhile, and takes the tokens along
            batch.pool.reserve(blocks)
            rows.reserved[row] += blocks
            batch.lanes.leave(row)
            batch.ready.pop(row, None)
            batch.prefilling[row] = self.jumped[row] = None

    def hand_over(
        self,
        plan: Plan,
        sampled: np.ndarray,
        flags: np.ndarray,
        samples: list[Sample],
        tokens: np.ndarray,
        records: np.ndarray,
    ) -> tuple[list[Sample], np.ndarray, np.ndarray]:
        """Add to what the commit of `plan` hands over the tokens that are forced behind those that it sampled."""
        rows = self._batch.rows
        for row in [row for row, jump in self.forced.items() if jump.step == plan.step]:
            forced = self.forced.pop(row).tokens
            if rows.streaming[row] and flags[sampled == row].item() & Flag.TOKEN:
                samples = samples + [rows.samples[row]] * len(forced)
                tokens = np.concatenate([tokens, forced])
                if len(records):
                    records = np.concatenate([records, np.zeros(len(forced), records.dtype)])
        return samples, tokens, records

    def _be_late(self, row: int, step: int, follower: _Follower) -> None:
        sample = self._batch.rows.samples[row]
        self._batch.lanes.leave(row)
        self._batch.ready.pop(row, None)
        self.paused.pop(row, None)
        self.late[sample] = _Late(step)
        assert self.wake is not None
        assert follower.work is not None
        follower.work.add_done_callback(partial(_wake_for, self.wake, sample))

    def mask_came(self, sample: Sample) -> None:
        """The mask of `sample`, which was late, is there."""
        if (late := self.late.get(sample)) is not None:
            late.ready = True
            self._resume(sample)

    def _resume(self, sample: Sample) -> None:
        """Compute the last known token of `sample` again, once it can be followed by another."""
        late = self.late[sample]
        if late.taken_back and late.ready:
            del self.late[sample]
            row, rows = self._batch.row_of[sample], self._batch.rows
            self._prefill_to(row, int(rows.launched[row]) + 1)
            self._batch.prefilling[row] = None

    def _prefill_to(self, row: int, target: int) -> None:
        """Let chunks compute `row`, which has sampled before, up to `target`."""
        rows = self._batch.rows
        if rows.confirmed[row] >= rows.target[row]:
            # NOTE: a token was sampled behind these, so they stay vouched for, see `Prefixes`.
            rows.shared[row] = rows.confirmed[row]
        rows.target[row] = target

    def _input(self, ready: list[tuple[int, int, _Follower]]) -> HeldInput:
        """Those with the same processors stand side by side; those without come last."""
        rows = self._batch.rows
        groups: dict[tuple[int, ...], list[tuple[int, int, _Follower]]] = {}
        for entry in ready:
            # NOTE: told apart by identity, since not all that can be called can be hashed or compared.
            processors = rows.samples[entry[1]].request.params.logits_processors
            groups.setdefault(tuple(map(id, processors)), []).append(entry)
        plain = groups.pop((), [])
        calls, start = [], 0
        for members in groups.values():
            tokens = tuple(RowTokens(rows.known_tokens(row), rows.samples[row].prompt_len) for _, row, _ in members)
            processors = rows.samples[members[0][1]].request.params.logits_processors
            fail = partial(_fail, [follower for _, _, follower in members])
            calls.append(ProcessorCall(processors, start, start + len(members), tokens, fail))
            start += len(members)
        ordered = [entry for members in groups.values() for entry in members] + plain
        places = np.array([place for place, _, _ in ordered], np.int32)
        return HeldInput(places, [follower.mask for _, _, follower in ordered], calls)


def _fail(followers: Sequence[_Follower], place: int, error: BaseException) -> None:
    followers[place].fail(error)


def _wake_for(wake: Callable[[Callable[[Any], Any]], None], sample: Sample, work: Future[None]) -> None:
    wake(lambda scheduler: scheduler.mask_came(sample))
