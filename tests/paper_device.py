"""A device made of paper: it executes plans on numpy arrays, and objects to plans that a real one could not run."""

import hashlib
from collections import deque
from collections.abc import Callable

import numpy as np
from paper_masks import allowed, has_mask

from twostroke.cache.copy_costs import CopyCosts
from twostroke.held_input import HeldInput
from twostroke.plan import DUMMY_BLOCK, Flag, Plan, StepOutput
from twostroke.request import FinishReason, Request

VOCAB = 97


ANY = np.full(VOCAB, True)
"""No mask."""


def next_token(
    seed: int, tokens: list[int], outputs: int, min_outputs: int, stop_ids: set[int], mask: np.ndarray = ANY
) -> int:
    """A pure function of the seed, all earlier tokens and the mask; stop ids are barred while outputs < min_outputs."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + np.array(tokens, np.int64).tobytes(), digest_size=4).digest()
    token = int.from_bytes(digest, "little") % VOCAB
    while not mask[token] or (outputs < min_outputs and token in stop_ids):
        token = (token + 1) % VOCAB
    return token


def oracle(
    request: Request, nan_at: int | None = None, seed: int | None = None, window: int = 0
) -> tuple[list[int], FinishReason]:
    """The output that `request` must get, and why it ends.

    `nan_at` is the output index whose logits are NaN; `seed` that of a sample other than the first; `window` the
    widest of the cache groups' windows, 0 if one sees all.
    """
    seed = request.seed if seed is None else seed
    tokens, stops = request.prompt.tolist(), set(request.terms.stop_ids.tolist())
    output: list[int] = []
    while len(output) < request.max_tokens:
        if len(output) == nan_at:
            return output, FinishReason.ERROR
        known = tokens + output
        mask = allowed(known, VOCAB) if has_mask(request, len(output)) else ANY
        output.append(next_token(seed, known[-window:], len(output), request.params.min_tokens, stops, mask))
        if output[-1] in stops:
            return output, FinishReason.STOP
    return output, FinishReason.LENGTH


BAD = -13
"""What bad logits leave in the cache: no token."""


class PaperDevice:
    """Row state, tables, lanes, and a KV cache that keeps the tokens themselves: a wrong table gives wrong tokens.

    Blocks have one number for all groups, and belong to the group that wrote them last.

    When a row's logits are bad, so is all that it has computed since its last good token: nobody may ever read it.

    Attributes:
        prefixes: of each block that was written to its end, the tokens of the row up to there.
        written: step in which each block was written last. group_of: by which group.
        history: what the tokens of each row must be.
        version: of the weights. version_of: by which of them each output of each seed was sampled.
        epoch_of: epoch of the row that wrote it; a row has the `epoch` in which it joined.
        host: what each host slot holds, see `save`.
    """

    def __init__(
        self, *, max_rows: int, max_len: int, block_size: int, num_blocks: int, windows: tuple[int, ...]
    ) -> None:
        self.dummy_row, self.block_size, self.windows, self.num_groups = max_rows, block_size, windows, len(windows)
        self.widest = 0 if 0 in windows else max(windows)
        self.rows: dict[int, dict] = {}
        self.tables = np.full((self.num_groups, max_rows + 1, -(-max_len // block_size)), DUMMY_BLOCK, np.int32)
        self.held = np.zeros((self.num_groups, max_rows + 1), int)
        self.cache = np.full((num_blocks, block_size), -1, int)
        self.lanes = np.full(max_rows, max_rows, int)
        self.nan_at: dict[int, int] = {}
        self.epoch = 0
        self.version = 0
        self.version_of: dict[tuple[int, int], int] = {}
        self._held: set[int] = set()
        self.prefixes: dict[int, list[int]] = {}
        self.history: dict[int, list[int]] = {}
        self.written = np.full(num_blocks, -1)
        self.group_of = np.full(num_blocks, -1)
        self.epoch_of = np.full(num_blocks, -1)
        self.host: dict[int, tuple] = {}
        self._step = -1

    def save(self, block: int, slot: int) -> None:
        whose = self.written[block], self.epoch_of[block], self.group_of[block]
        self.host[slot] = self.cache[block].copy(), self.prefixes[block], whose

    def load(self, slot: int, block: int) -> None:
        self.cache[block], self.prefixes[block], whose = self.host[slot]
        self.written[block], self.epoch_of[block], self.group_of[block] = whose

    def run(self, plan: Plan) -> StepOutput:
        """Run a step; held positions stay without a token until `complete`."""
        self._step = plan.step
        self._apply(plan)
        assert (self.lanes[: plan.num_lanes] == plan.lane_rows).all()
        assert (self.lanes[plan.num_lanes :] == self.dummy_row).all()
        assert len(set(plan.lane_rows.tolist())) == plan.num_lanes
        self._held = set(plan.sampled_rows()[plan.held].tolist())
        results = [self._decode(row) for row in plan.lane_rows.tolist()]
        offset = 0
        for row, start, count, samples in plan.chunks.tolist():
            result = self._prefill(row, start, plan.prompt_tokens[offset : offset + count].tolist(), samples)
            offset += count
            results += [result] if samples else []
        assert offset == len(plan.prompt_tokens)
        tokens, flags = zip(*results, strict=True) if results else ((), ())
        return StepOutput(np.array(tokens, np.int32), np.array(flags, np.int32))

    def complete(self, plan: Plan, output: StepOutput, held: HeldInput) -> None:
        """Sample the held positions that have a mask; the others were computed in vain."""
        rows = plan.sampled_rows()
        for place, mask in zip(held.places.tolist(), held.masks, strict=True):
            position = plan.held[place]
            row = int(rows[position])
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB].astype(bool)
            output.tokens[position], output.flags[position] = self._sample(self.rows[row], bits)
        for place in set(range(len(plan.held))) - set(held.places.tolist()):
            state = self.rows[int(rows[plan.held[place]])]
            state["length"] -= 1
            state["launched"] -= 1

    def _apply(self, plan: Plan) -> None:
        for record in plan.joins:
            row = int(record["row"])
            assert 0 <= row < self.dummy_row
            self.rows[row] = {name: record[name] for name in record.dtype.names}
            self.rows[row]["seed"] = int(record["seed_low"]) | int(record["seed_high"]) << 32
            self.rows[row] |= {"first": int(record["length"]), "good": int(record["length"]), "epoch": self.epoch}
            self.rows[row]["launched"] = int(record["length"])
            self.tables[:, row] = DUMMY_BLOCK
            self.held[:, row] = [self._first_of(group, int(record["length"])) for group in range(self.num_groups)]
        for source, target in plan.block_copies.tolist():
            self.cache[target], self.group_of[target] = self.cache[source], self.group_of[source]
        for group, row, index, block in plan.block_deltas.tolist():
            assert index == self.held[group, row], "a hole in the block table"
            assert block != DUMMY_BLOCK
            self.tables[group, row, index] = block
            self.held[group, row] += 1
        for lane, row in plan.lane_deltas.tolist():
            self.lanes[lane] = row

    def _first_of(self, group: int, length: int) -> int:
        """The first block that a row with `length` positions has, if it joins."""
        window = self.windows[group]
        full = length // self.block_size
        return max(0, full * self.block_size - window + 1) // self.block_size if window else 0

    def blocks_of(self, row: int) -> list[int]:
        return [
            int(block) for group in range(self.num_groups) for block in self.tables[group, row, : self.held[group, row]]
        ]

    def unseen(self, row: int) -> list[int]:
        """Blocks in which no position from the row's next one on sees anything."""
        blocks = []
        for group, window in enumerate(self.windows):
            if window:
                first = max(0, self.rows[row]["launched"] - window + 1)
                blocks += self.tables[group, row, : min(first // self.block_size, self.held[group, row])].tolist()
        return blocks

    def _write(self, row: int, position: int, token: int, seen_from: int | None = None) -> None:
        """Write a token; what `seen_from`, a position, does not see any more is another's by now."""
        index, offset = divmod(position, self.block_size)
        assert position >= self.rows[row]["first"], "a shared block is written"
        assert (self.held[:, row] > index).all(), f"no block for position {position} of row {row}"
        history = self.history[row]
        history[position:] = [token, *history[position + 1 :]]
        for group, window in enumerate(self.windows):
            if window and seen_from is not None and position <= seen_from - window:
                continue
            block = int(self.tables[group, row, index])
            self.cache[block, offset] = token
            self.written[block], self.epoch_of[block], self.group_of[block] = (
                self._step,
                self.rows[row]["epoch"],
                group,
            )
            if offset == self.block_size - 1:
                self.prefixes[block] = history[: position + 1]

    def _read(self, row: int, count: int) -> list[int]:
        """What the position behind `count` - 1 others sees in the group that sees most."""
        reads = []
        for group, window in enumerate(self.windows):
            positions = np.arange(max(0, count - window) if window else 0, count)
            blocks = self.tables[group, row, positions // self.block_size]
            assert (self.group_of[blocks] == group).all(), "a block of another group is read"
            reads.append(self.cache[blocks, positions % self.block_size].tolist())
        longest = max(reads, key=len)
        assert all(read == longest[len(longest) - len(read) :] for read in reads)
        return longest

    def _decode(self, row: int) -> tuple[int, int]:
        state = self.rows[row]
        state["launched"] += 1
        if state["done"]:
            return -7, 0
        self._write(row, int(state["length"]), int(state["last_token"]))
        state["length"] += 1
        return self._compute(state, row, int(state["length"]) - 1)

    def _prefill(self, row: int, start: int, tokens: list[int], samples: int) -> tuple[int, int]:
        state = self.rows[row]
        assert not state["done"]
        assert start == state["length"], "a prompt chunk does not begin where the last one ended"
        for position, token in enumerate(tokens, start):
            self._write(row, position, token)
        state["length"] += len(tokens)
        state["launched"] += len(tokens)
        return self._compute(state, row, start) if samples else (-7, 0)

    def _compute(self, state: dict, row: int, start: int) -> tuple[int, int]:
        """Compute the logits of the row's last position, and sample from them unless the row is held.

        `start` is the first position that this step computes.
        """
        state["version"] = self.version
        state["seen"] = self._read(row, int(state["length"]))
        if self._is_bad(state):
            for position in range(state["good"], int(state["length"])):
                self._write(row, position, BAD, seen_from=start)
        return (-7, 0) if row in self._held else self._sample(state)

    def _sample(self, state: dict, mask: np.ndarray = ANY) -> tuple[int, int]:
        """Sample from logits that are there: by now the row may have lost its blocks to another one."""
        outputs = int(state["outputs"])
        assert outputs < state["max_outputs"], "a step too many"
        if self._is_bad(state):
            state["done"] = 1
            return -7, int(Flag.ERROR)
        stops = set(state["stop_ids"].tolist()) - {-1}
        state["good"] = int(state["length"])
        token = next_token(state["seed"], state["seen"], outputs, int(state["min_outputs"]), stops, mask)
        state["last_token"], state["outputs"] = token, outputs + 1
        self.version_of[state["seed"], outputs] = state["version"]
        flag = Flag.TOKEN
        flag |= Flag.STOP if token in stops else 0
        flag |= Flag.LENGTH if outputs + 1 == state["max_outputs"] else 0
        state["done"] = int(flag != Flag.TOKEN)
        return token, int(flag)

    def _is_bad(self, state: dict) -> bool:
        return self.nan_at.get(state["seed"]) == int(state["outputs"])


class PaperLink:
    """Makes copies as late as it may: when a step must run after them, or `lag` polls later.

    Attributes:
        expected: of each block to be loaded, by step and block, the tokens up to its end.
        seconds_of: what so many saves, or loads, are said to take.
    """

    def __init__(self, lag: int) -> None:
        self.device: PaperDevice | None = None
        self.seconds_of: Callable[[int], float] = lambda blocks: 1.0
        self.expected: dict[tuple[int, int], list[int]] = {}
        self._lag = lag
        self._queue: deque[tuple[int, Plan]] = deque()  # polls to go
        self._done: list[tuple[int, int, float, int, float]] = []

    def queue(self, plan: Plan) -> None:
        if len(plan.saves) or len(plan.loads):
            self._queue.append((self._lag, plan))
        while self._queue and self._queue[0][1].step <= plan.after:
            self._copy()

    def poll(self) -> list[tuple[int, int, float, int, float]]:
        self._queue = deque((polls - 1, plan) for polls, plan in self._queue)
        while self._queue and self._queue[0][0] < 0:
            self._copy()
        done, self._done = self._done, []
        return done

    def _copy(self) -> None:
        _, plan = self._queue.popleft()
        for block, slot in plan.saves.tolist():
            self.device.save(block, slot)
        assert len(set(plan.saves[:, 1].tolist())) == len(plan.saves), "two saves to one slot"
        assert len(set(plan.loads[:, 1].tolist())) == len(plan.loads), "two loads to one block"
        for slot, block in plan.loads.tolist():
            self.device.load(slot, block)
            expected = self.expected.pop((plan.step, block))
            assert self.device.prefixes[block] == expected
            size = self.device.block_size
            assert self.device.cache[block].tolist() == expected[-size:], "other tokens came back"
            assert self.device.written[block] < plan.step
        saved, loaded = len(plan.saves), len(plan.loads)
        self._done.append((plan.step, saved, self.seconds_of(saved), loaded, self.seconds_of(loaded)))


class EveryCopyPays(CopyCosts):
    """Leaves nothing to the clock."""

    def worthwhile(self, blocks: int, copies: int) -> int:
        return blocks
