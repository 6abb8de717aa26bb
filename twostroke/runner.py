"""The runner: takes a plan through a slot."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from .device.activity import Activity, Window
from .device.batch_state import BatchState
from .device.graphs import Graphs, Recurring
from .device.layout import block_copies, scores
from .device.shapes import Shapes, StepShape
from .device.slot import Slot, StepBuffers
from .device.streams import Device, Meter
from .device.transfers import Transfers
from .held_input import HeldInput, ProcessorCall
from .plan import NO_FEATURES, Feature, Plan, StepOutput
from .sampling.logprobs import write_logprobs
from .sampling.mask import apply_masks
from .sampling.processors import run_processors
from .sampling.stage import Stage
from .sampling_part import LedgerOps, SamplingPart

MAX_PROMPT_GRAPHS = 64
"""Captured graphs of steps with prompt chunks; more than there can be slots."""

MAX_SAMPLING_GRAPHS = 64
"""The same of sampling parts: one for each set of features, size and slot."""

MIN_PATIENCE = 5e-4
"""Seconds that masks are waited for, at least."""


class BatchOps(Protocol):
    """The batch's operations, see `kernels.batch.BatchOps`."""

    def apply_deltas(self, words: torch.Tensor, batch: Any) -> None: ...

    def prepare(self, words: torch.Tensor, batch: Any, lanes: int, chunks: int, tokens: int, sampled: int) -> Any: ...

    def advance(self, batch: Any, sampled: int, output: torch.Tensor) -> None: ...


class Forward(Protocol):
    """The model over its cache."""

    def __call__(self, step: Any, /) -> torch.Tensor:
        """Inputs of a step -> logits [S, V]."""
        ...

    def copy_blocks(self, pairs: torch.Tensor) -> None:
        """Copy blocks of the cache, see `Plan.block_copies`."""


class Runner:
    """Launches plans and collects their outputs. One runner, one batch state, any number of slots.

    Args:
        device: streams and buffers.
        state: the device-resident batch.
        ops: what happens to the batch in a step.
        forward: the model.
        ledgers: opened before the stages, and kept after sampling.
        stages: what edits the logits before they are sampled, in this order, where a step's features ask for it.
        sample: (logits [S, V], rows [S], tokens out [S], errors out [S], typical, chances out [S] or None) on the
            current stream, by one kernel at least: what is behind it reads `rows` before that one ends.
        shapes: what steps are padded to.

    Attributes:
        transfers: of blocks to the host and back; None where there are none.
    """

    def __init__(
        self,
        device: Device,
        state: BatchState,
        ops: BatchOps,
        forward: Forward,
        ledgers: LedgerOps,
        stages: Sequence[Stage],
        sample: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, bool, torch.Tensor | None], None],
        shapes: Shapes,
    ) -> None:
        self.device = device
        self.state = state
        self.activity = Activity()
        self.transfers: Transfers | None = None
        self._ops = ops
        self._forward = forward
        self._ledgers = ledgers
        self._sampling = SamplingPart(state, ledgers, stages, sample, ops.advance)
        self._shapes = shapes
        self._graphs: Graphs | None = None
        self._prompts: StepBuffers | None = None
        self._recurring_steps: Recurring | None = None
        self._recurring_sampling: Recurring | None = None
        self._logits = torch.empty(0)
        self._in_flight: deque[Plan] = deque()
        self._unsampled: deque[tuple[Plan, Slot, StepShape, Window | None]] = deque()

    def launch(self, plan: Plan, slot: Slot) -> None:
        """Queue a step: its input to the device, the step itself, its output back. Returns without waiting.

        Of a step with held rows this is the first part: forward pass, and sampling of the other rows.
        """
        began = time.perf_counter()
        outputs = plan.num_lanes + len(plan.sampling_chunks())
        needed = StepShape(
            plan.num_lanes,
            len(plan.chunks),
            plan.num_tokens,
            outputs,
            plan.features,
            len(plan.block_copies),
            plan.num_ledgers,
            len(plan.scores),
        )
        shape = self._shapes.fit(needed)
        slot.fill(plan, outputs)
        filled = time.perf_counter()
        device, window = self.device, self.activity.window
        copy_in = partial(self.copy_in, shape, slot)
        if window is not None:
            copy_in = partial(_metered, device.copy_meters[0], copy_in)
        device.h2d.run(copy_in)
        device.h2d.record(slot.h2d_done)
        if self.transfers is not None:
            self.transfers.queue(plan)
            self.transfers.hold_back(plan.after)
        device.compute.wait(slot.h2d_done)
        queued_at = time.perf_counter()
        device.compute.run(partial(self.compute, shape, slot))
        self._in_flight.append(plan)
        if shape.held:
            self._unsampled.append((plan, slot, shape, window))
        else:
            self._queue_output(slot, window)
        self.activity.launched(plan, began, filled, queued_at, time.perf_counter(), window, slot.h2d_done)

    def complete(self, unhold: Callable[[Plan, float], HeldInput]) -> None:
        """Queue the second part of the oldest step in flight, if it has one that is not queued.

        Args:
            unhold: gives what it needs, see `Scheduler.unhold`.
        """
        if not self._unsampled or self._unsampled[0][0] is not self._in_flight[0]:
            return
        plan, slot, shape, window = self._unsampled.popleft()
        held = unhold(plan, self._patience())
        began = time.perf_counter()
        slot.held.fill_masks(held.places, held.masks)
        filled = time.perf_counter()
        device, count = self.device, len(held.places)
        device.h2d.run(partial(self.copy_masks, count, slot))
        device.h2d.record(slot.held.masks_done)
        device.compute.wait(slot.held.masks_done)
        queued_at = time.perf_counter()
        device.compute.run(partial(self.compute_held, shape, slot, count, held.calls))
        self._queue_output(slot, window)
        masks_done = slot.held.masks_done
        self.activity.completed(plan, began, filled, queued_at, time.perf_counter(), window, masks_done)

    def _queue_output(self, slot: Slot, window: Window | None) -> None:
        device, copy_out = self.device, partial(self.copy_out, slot)
        if window is not None:
            copy_out = partial(_metered, device.copy_meters[1], copy_out)
        device.compute.record(slot.compute_done)
        device.d2h.wait(slot.compute_done)
        device.d2h.run(copy_out)
        device.d2h.record(slot.d2h_done)

    def _patience(self) -> float:
        """Seconds to wait for masks: so long the device is busy with the first part, as a rule."""
        activity = self.activity
        mean = activity.busy_seconds / activity.steps if activity.steps else 0.0
        return max(MIN_PATIENCE, mean / 2)

    def wait(self, plan: Plan, slot: Slot) -> StepOutput:
        """Wait for the step's output: the only place where the CPU waits for the device."""
        began = time.perf_counter()
        slot.d2h_done.synchronize()
        self._in_flight.popleft()
        self.activity.done(plan.step, began, time.perf_counter(), self.device)
        return slot.read()

    def write_weights(self, write: Callable[[], object]) -> None:
        """Queue `write` behind the steps that are launched, before all others."""
        self.device.compute.run(partial(_metered, self.device.meter, write))
        self.activity.wrote_weights()

    def rest(self) -> None:
        """Note that there is nothing to do: the gap before the next step is nobody's fault."""
        self.activity.rest()
        self.device.set_clock()

    def forget_activity(self) -> None:
        """Start the accounting anew, as if no step had run."""
        self.activity = Activity()

    def capture(
        self, graphs: Graphs, decode: Sequence[int], slots: Sequence[Slot], prompts: StepBuffers, logits: torch.Tensor
    ) -> None:
        """Capture decode steps, and from now on run all steps by graphs.

        Each size of `decode`, largest first, so that the pool is sized once, is captured for every slot, and twice: the
        whole step for the common case, and for steps with features the forward part, which leaves its logits in
        `logits`, [max lanes, V] in the model's dtype. Steps with prompt chunks run on the buffers `prompts`, so that
        one graph serves all slots. They are captured when their shape comes the second time, and so is the sampling
        part of steps with features when these come the second time with the same size and buffers.
        """
        self._graphs, self._prompts, self._logits = graphs, prompts, logits
        self._recurring_steps = Recurring(graphs, MAX_PROMPT_GRAPHS)
        self._recurring_sampling = Recurring(graphs, MAX_SAMPLING_GRAPHS)
        for lanes in sorted(decode, reverse=True):
            for slot in slots:
                for features in (NO_FEATURES, ~NO_FEATURES):
                    shape = StepShape(lanes, 0, lanes, lanes, features)
                    self._captured_part(shape)(shape, slot)
                    self._capture(_graph_key(shape, slot), partial(self._captured_part(shape), shape, slot))

    def forget_graphs(self) -> None:
        """Let go of what was captured, and of its memory; steps run eagerly until the next capture."""
        self._graphs = self._prompts = self._recurring_steps = self._recurring_sampling = None

    def copy_in(self, shape: StepShape, slot: Slot) -> None:
        """The work on the h2d stream."""
        slot.copy_in()
        if shape.held:
            slot.held.copy_positions()

    def copy_masks(self, count: int, slot: Slot) -> None:
        """The work of a second part on the h2d stream."""
        slot.held.copy_masks(count)

    def compute(self, shape: StepShape, slot: Slot) -> None:
        """The work on the compute stream."""
        prompts = self._prompts if shape.chunks else None
        # NOTE: before the meter begins, since no step runs meanwhile.
        self._capture_recurring(shape, prompts or slot)
        self.device.meter.begin()
        if prompts is None:
            self._run(shape, slot)
        else:
            prompts.take_input(slot)
            self._run(shape, prompts)
            prompts.give_output(slot)
        self.device.meter.end()

    def compute_held(self, shape: StepShape, slot: Slot, count: int, calls: Sequence[ProcessorCall]) -> None:
        """The work of a second part on the compute stream: `count` rows of those held sample."""
        self.device.meter.begin()
        if count:
            logits = slot.held.take(count, self.state.sample_rows[:count])
            raw = logits.clone() if shape.features & Feature.LOGPROBS else logits
            run_processors(logits, calls)
            apply_masks(logits, slot.held.masks[:count])
            self._sampling.run_edited(shape.features, logits, raw, slot.held.output, slot.held.records)
            slot.held.put(count, slot.device_output, slot.device_records)
        self.device.meter.end()

    def copy_out(self, slot: Slot) -> None:
        """The work on the d2h stream."""
        slot.copy_out()

    def step(self, shape: StepShape, buffers: StepBuffers) -> None:
        """Both parts, one after the other."""
        logits = self.forward_part(shape, buffers)
        self._prepare_sampling(shape, buffers, logits)
        self._sample(shape, buffers, logits[: shape.sampled])

    def forward_part(self, shape: StepShape, buffers: StepBuffers) -> torch.Tensor:
        """Deltas, inputs with carry-over, forward pass.

        Returns:
            The logits of the sampled positions, and behind them those of the scored ones, [S + Q, V].
        """
        words = buffers.device_input
        self._ops.apply_deltas(words, self.state)
        inputs = self._ops.prepare(words, self.state, shape.lanes, shape.chunks, shape.tokens, shape.sampled)
        if shape.scores:
            inputs = inputs._replace(sample_index=self._index_scores(shape, words))
        return self._forward(inputs)

    def _index_scores(self, shape: StepShape, words: torch.Tensor) -> torch.Tensor:
        """Put the scored positions behind the sampled ones; returns the index of both, int64 [S + Q]."""
        state, end = self.state, shape.sampled + shape.scores
        rows, places, _ = scores(words, shape.copies, shape.scores).T
        state.sample_index[shape.sampled : end] = places
        state.sample_rows[shape.sampled : end] = rows
        return state.sample_index[:end]

    def _prepare_sampling(self, shape: StepShape, buffers: StepBuffers, logits: torch.Tensor) -> None:
        """What differs from step to step: scores, ledgers that open, held rows, which are kept for the second part.

        The logits [S + Q, V] are those of the sampled positions, then of the scored ones.
        """
        n, state = shape.sampled, self.state
        if shape.scores:
            targets = scores(buffers.device_input, shape.copies, shape.scores)[:, 2]
            rows = state.sample_rows[n : n + shape.scores]
            write_logprobs(logits[n:], rows, state.prompt_logprobs, targets, None, buffers.device_scores)
        if shape.ledgers:
            self._ledgers.open(buffers.device_input, shape.ledgers)
        if n and shape.held:
            buffers.held.keep(logits[:n], state.sample_rows[:n], dummy_row=state.max_rows)

    def _sample(self, shape: StepShape, buffers: StepBuffers, logits: torch.Tensor) -> None:
        if shape.sampled:
            self._sampling.run(shape.features, logits, buffers.device_output, buffers.device_records)

    def _run(self, shape: StepShape, buffers: StepBuffers) -> None:
        """Run a step by its graph, or eagerly if there is none. Blocks are copied before, as many as there may be."""
        if shape.copies:
            self._forward.copy_blocks(block_copies(buffers.device_input, shape.copies))
        if self._graphs is None or shape.scores:
            self.step(shape, buffers)
            return
        key = _graph_key(shape, buffers)
        if key in self._graphs:
            self._graphs.replay(key)
        else:
            self._captured_part(shape)(shape, buffers)
        if shape.features:
            logits = self._logits[: shape.sampled]
            self._prepare_sampling(shape, buffers, logits)
            if (key := _sampling_key(shape, buffers)) in self._graphs:
                self._graphs.replay(key)
            else:
                self._sample(shape, buffers, logits)

    def _captured_part(self, shape: StepShape) -> Callable[[StepShape, StepBuffers], None]:
        return self._forward_to_logits if shape.features else self.step

    def _forward_to_logits(self, shape: StepShape, buffers: StepBuffers) -> None:
        self._logits[: shape.sampled].copy_(self.forward_part(shape, buffers))

    def _capture_recurring(self, shape: StepShape, buffers: StepBuffers) -> None:
        """Capture those parts of a step that come the second time."""
        steps, sampling = self._recurring_steps, self._recurring_sampling
        if steps is None or sampling is None or shape.scores:
            return
        if shape.chunks and steps.due(key := _graph_key(shape, buffers)):
            self._capture(key, partial(self._captured_part(shape), shape, buffers))
        if shape.features and shape.sampled and sampling.due(key := _sampling_key(shape, buffers)):
            self._capture(key, partial(self._sample, shape, buffers, self._logits[: shape.sampled]))

    def _capture(self, key: tuple[int, ...], work: Callable[[], object]) -> None:
        assert self._graphs is not None
        began = time.perf_counter()
        self._graphs.capture(key, work)
        self.activity.captured(began, time.perf_counter())


def _graph_key(shape: StepShape, buffers: StepBuffers) -> tuple[int, ...]:
    """What a step's graph depends on: sizes, addresses, and whether it ends with the forward part."""
    return id(buffers), *shape[:4], bool(shape.features)


def _sampling_key(shape: StepShape, buffers: StepBuffers) -> tuple[int, ...]:
    """What a sampling part's graph depends on; held rows are none of its rows."""
    return id(buffers), shape.sampled, int(shape.features & ~Feature.HELD)


def _metered(meter: Meter, work: Callable[[], object]) -> None:
    meter.begin()
    work()
    meter.end()
