"""Commits: the CPU takes the output of a step."""

from __future__ import annotations

import numpy as np

from ..errors import counted
from ..logprob_record import NO_RECORDS
from ..plan import Flag, Plan, StepOutput
from ..request import FinishReason, Sample
from .batch import Batch
from .committed import Committed
from .endings import Endings
from .forks import Forks
from .queue import Queue

_TOKEN, _STOP, _ERROR = int(Flag.TOKEN), int(Flag.STOP), int(Flag.ERROR)

BAD_LOGITS = "the logits held a NaN or an infinity, or left no token to sample"


class Commits:
    """Takes outputs, step by step: tokens come to their rows, prompts are published, samples end, rows return.

    Args:
        batch: the samples that have rows. waiting: where those go that waited for a prompt.
        forks: which these are.
        endings: ends the samples whose output says so.
    """

    def __init__(self, batch: Batch, waiting: Queue, forks: Forks, endings: Endings) -> None:
        self._batch = batch
        self._rows, self._prefixes = batch.rows, batch.prefixes
        self._waiting = waiting
        self._forks = forks
        self._endings = endings

    def commit(self, plan: Plan, output: StepOutput) -> Committed:
        """Take the output of the oldest step in flight; see `Scheduler.commit`."""
        batch = self._batch
        sampled = self._take_tokens(plan, output)
        handed = self._rows.streamed(sampled, output)
        if batch.held.forced:
            handed = batch.held.hand_over(plan, sampled, output.flags, *handed)
        scored: tuple[list[Sample], np.ndarray] = ([], NO_RECORDS)
        finished: list[Sample] = []
        if len(plan.scores):
            scored = self._rows.scored(plan, output)
            finished = self._end_badly_scored(*scored)
        if len(sampled) > plan.num_lanes:
            self._take_prompts(sampled[plan.num_lanes :], output.flags[plan.num_lanes :])
        finished += self._end_flagged(sampled, output.flags)
        if batch.held.late:
            batch.held.committed(plan)
        if batch.draining:
            batch.drain()
        batch.return_releases()
        return Committed(finished, *handed, *scored)

    def _take_tokens(self, plan: Plan, output: StepOutput) -> np.ndarray:
        """Confirm the step's positions and write its tokens; returns the rows that sampled, intp [S]."""
        batch = self._batch
        if plan.step != batch.committed_step + 1 or plan.step > batch.launched_step:
            raise RuntimeError(
                f"step {plan.step} committed after {batch.committed_step}, launched {batch.launched_step}"
            )
        sampled = self._rows.confirm(plan)
        if not len(sampled) == len(output.tokens) == len(output.flags):
            raise RuntimeError(
                f"step {plan.step}: {counted(len(output.tokens), 'output')} for "
                f"{counted(len(sampled), 'sampled position')}"
            )
        batch.committed_step = plan.step
        # NOTE: dead rows are written to like all others: nobody reads them, and a mask would cost more.
        self._rows.write_tokens(sampled, output.tokens)
        return sampled

    def _take_prompts(self, rows: np.ndarray, flags: np.ndarray) -> None:
        """`rows`, intp [S], have computed their prompts; `flags` came with their first tokens."""
        lived = flags != 0  # those of late rows are 0, and will be computed again
        prompts = rows[lived]
        self._rows.stamp_first_tokens(prompts)
        self._prefixes.publish_prompts(prompts, flags[lived])
        self._release_forks(prompts)
        self._batch.slide_prompts(prompts)

    def _release_forks(self, rows: np.ndarray) -> None:
        """The prompts of `rows`, intp [S], are computed: samples that waited for that join the queue."""
        for sample in self._rows.samples[rows].tolist():
            if sample is not None:
                for fork in self._forks.release(sample):
                    self._waiting.push(fork)

    def _end_badly_scored(self, samples: list[Sample], scores: np.ndarray) -> list[Sample]:
        """End the samples whose prompt had bad logits; what was computed of it is of no use to anybody."""
        bad = np.flatnonzero(np.isnan(scores["logprob"])).tolist()
        ended = list(dict.fromkeys(samples[place] for place in bad))
        for sample in ended:
            self._rows.publishes[self._batch.row_of[sample]] = False
            self._endings.end(sample, FinishReason.ERROR, BAD_LOGITS)
        return ended

    def _end_flagged(self, sampled: np.ndarray, flags: np.ndarray) -> list[Sample]:
        """End the samples whose flags say so; rows whose sample has ended before are skipped."""
        finished: list[Sample] = []
        ended = flags != _TOKEN
        if not np.count_nonzero(ended):
            return finished
        for place in np.flatnonzero(ended).tolist():
            row, flag = int(sampled[place]), int(flags[place])
            if not self._rows.alive[row]:
                continue
            sample = self._rows.samples[row]
            if flag & _ERROR:
                # The position is confirmed, but gave no token; those that were forced behind it do not count.
                drop = self._rows.known(row) - int(self._rows.confirmed[row])
                self._endings.end(
                    sample, FinishReason.ERROR, self._batch.held.failure(sample) or BAD_LOGITS, drop=drop, bad=1
                )
            elif flag & _TOKEN:
                self._endings.end(sample, FinishReason.STOP if flag & _STOP else FinishReason.LENGTH)
            elif sample in self._batch.held.late:
                continue
            else:
                raise RuntimeError(f"row {row} lives, but the device says that it is dead")
            finished.append(sample)
        return finished
