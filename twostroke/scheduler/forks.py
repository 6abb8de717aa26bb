"""Forks: the samples of one request, which has its prompt computed once."""

from __future__ import annotations

from ..cache.block_pool import BlockRun
from ..cache.prefix_cache import keys_of
from ..request import Sample
from .batch import Batch
from .prefixes import Start


class _Family:
    """The samples of one request that have not ended.

    Attributes:
        members: all of them. pending: those that wait for the prompt. Both in the order of their indices.
        promised: free rows that are kept for those which never had one.
        begun: whether one of them, or one that has ended, had a row.
    """

    def __init__(self) -> None:
        self.members: dict[Sample, None] = {}
        self.pending: dict[Sample, None] = {}
        self.promised = 0
        self.begun = False


class Forks:
    """Lets one sample of a request compute the prompt, and the others begin where it ends.

        sample 0    waiting --> prefilling --> first token committed --> ...
        sample i    pending .................. waiting --> joins as a fork

    A fork shares the full blocks of the prompt with whichever sample of its request has them; the block in which the
    prompt ends is copied on the device, and only the prompt's last token is computed again, for its logits. A fork for
    which no sibling has the prompt any more, or its last window, starts like any other sample, with what the prefix
    cache knows.

    A sample that begins to compute the prompt has free rows promised for its forks, so that the requests behind it do
    not take them in the meantime. A request wider than the batch gets what there is; the rest of its samples wait.

    Attributes:
        promised: free rows that are kept for forks.
        pending: samples that wait for another one of their request.
    """

    def __init__(self, batch: Batch) -> None:
        self.promised = self.pending = 0
        self._batch = batch
        self._families: dict[str, _Family] = {}

    def pending_samples(self) -> list[Sample]:
        """All samples that wait for another one of their request."""
        return [sample for family in self._families.values() for sample in family.pending]

    def submit(self, sample: Sample) -> bool:
        """Take in a new sample; True if it waits for another one of its request."""
        if sample.request.terms.samples == 1:
            return False
        family = self._families.setdefault(sample.request.id, _Family())
        if waits := bool(family.members):
            family.pending[sample] = None
            self.pending += 1
        family.members[sample] = None
        return waits

    def is_pending(self, sample: Sample) -> bool:
        """Whether `sample` waits for another one of its request, and so not in the queue."""
        family = self._families.get(sample.request.id)
        return family is not None and sample in family.pending

    def has_begun(self, sample: Sample) -> bool:
        """Whether `sample`, which has not ended, or another one of its request has had a row."""
        family = self._families.get(sample.request.id)
        return sample.timings.admitted is not None if family is None else family.begun

    def rows_for(self, sample: Sample) -> int:
        """How many rows are free for `sample`, which are not promised to others."""
        family = self._families.get(sample.request.id)
        own = family.promised if family else 0
        return len(self._batch.rows.free) - self.promised + own

    def start(self, sample: Sample) -> Start | None:
        """Where `sample` begins as a fork; None if it is none, or no sibling has the prompt."""
        family = self._families.get(sample.request.id)
        if family is None or sample.index == 0 or len(sample.tokens) > sample.prompt_len:
            return None
        rows, length = self._batch.rows, sample.prompt_len
        for sibling in family.members:
            row = self._batch.row_of.get(sibling)
            # What it has prefilled is vouched for once it has sampled a token.
            if row is not None and rows.order[row] >= 0 and rows.confirmed[row] >= rows.target[row]:
                full, rest = divmod(length - 1, rows.block_size)
                firsts = rows.firsts(full)
                if (rows.first[:, row] <= firsts).all():
                    chain = sibling.chain[:full]
                    runs = [
                        BlockRun(rows.blocks[group, row, first:full].copy(), keys_of(chain[first:], group))
                        for group, first in enumerate(firsts)
                    ]
                    return Start(length - 1, runs, chain, row, rows.blocks[:, row, full].tolist() if rest else ())
        return None

    def admitted(self, sample: Sample) -> None:
        """`sample` got a row: of those left, so many are promised as samples wait for the prompt that it computes."""
        family = self._families.get(sample.request.id)
        if family is None:
            return
        family.begun = True
        free = len(self._batch.rows.free) - self.promised + family.promised
        self._promise(family, min(len(family.pending), free) if family.pending else max(0, family.promised - 1))

    def release(self, sample: Sample) -> list[Sample]:
        """The prompt of `sample` is computed; return the samples that waited for it, oldest first."""
        family = self._families.get(sample.request.id)
        if family is None:
            return []
        released = list(family.pending)
        family.pending.clear()
        self.pending -= len(released)
        return released

    def ended(self, sample: Sample) -> Sample | None:
        """Forget `sample`; return the one that is to compute the prompt in its place, if there is one."""
        family = self._families.get(sample.request.id)
        if family is None:
            return None
        del family.members[sample]
        waited = sample in family.pending
        heir = None if waited else next(iter(family.pending), None)
        if (gone := sample if waited else heir) is not None:
            del family.pending[gone]
            self.pending -= 1
        if family.promised:
            self._promise(family, min(family.promised, sum(s.timings.admitted is None for s in family.members)))
        if not family.members:
            del self._families[sample.request.id]
        return heir

    def _promise(self, family: _Family, rows: int) -> None:
        self.promised += rows - family.promised
        family.promised = rows
