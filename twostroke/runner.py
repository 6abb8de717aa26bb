"""The runner: takes a plan through a slot."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from .device.activity import Activity
from .device.batch_state import BatchState
from .device.graphs import Graphs, Recurring
from .device.layout import block_copies
from .device.shapes import Shapes, StepShape
from .device.slot import Slot, StepBuffers
from .device.streams import Device, Meter
from .plan import NO_FEATURES, Plan, StepOutput
from .sampling.stage import Stage

MAX_PROMPT_GRAPHS = 64
"""Captured graphs of steps with prompt chunks; more than there can be slots."""


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
        stages: what edits the logits before they are sampled, in this order, where a step's features ask for it.
        sample: (logits [S, V], rows [S], tokens out [S], errors out [S]) on the current stream.
        shapes: what steps are padded to.
    """

    def __init__(
        self,
        device: Device,
        state: BatchState,
        ops: BatchOps,
        forward: Forward,
        stages: Sequence[Stage],
        sample: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None],
        shapes: Shapes,
    ) -> None:
        self.device = device
        self.state = state
        self.activity = Activity()
        self._ops = ops
        self._forward = forward
        self._stages = stages
        self._sample = sample
        self._shapes = shapes
        self._graphs: Graphs | None = None
        self._prompts: StepBuffers | None = None
        self._logits = torch.empty(0)

    def launch(self, plan: Plan, slot: Slot) -> None:
        """Queue a step: its input to the device, the step itself, its output back. Returns without waiting."""
        began = time.perf_counter()
        outputs = plan.num_lanes + len(plan.sampling_chunks())
        shape = self._shapes.fit(
            plan.num_lanes, len(plan.chunks), plan.num_tokens, outputs, plan.features, len(plan.block_copies)
        )
        slot.fill(plan, outputs)
        filled = time.perf_counter()
        device, window = self.device, self.activity.window
        copy_in, copy_out = partial(self.copy_in, slot), partial(self.copy_out, slot)
        if window is not None:
            copy_in = partial(_metered, device.copy_meters[0], copy_in)
            copy_out = partial(_metered, device.copy_meters[1], copy_out)
        device.h2d.run(copy_in)
        device.h2d.record(slot.h2d_done)
        device.compute.wait(slot.h2d_done)
        queued_at = time.perf_counter()
        device.compute.run(partial(self.compute, shape, slot))
        device.compute.record(slot.compute_done)
        device.d2h.wait(slot.compute_done)
        device.d2h.run(copy_out)
        device.d2h.record(slot.d2h_done)
        self.activity.launched(plan, began, filled, queued_at, time.perf_counter(), window)

    def wait(self, plan: Plan, slot: Slot) -> StepOutput:
        """Wait for the step's output: the only place where the CPU waits for the device."""
        began = time.perf_counter()
        slot.d2h_done.synchronize()
        self.activity.done(began, time.perf_counter(), self.device, slot.h2d_done)
        return slot.read()

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
        `logits`, float32 [max lanes, V]; their sampling part runs eagerly. Steps with prompt chunks run on the buffers
        `prompts`, so that one graph serves all slots, and are captured when their shape comes the second time.
        """
        self._graphs, self._prompts, self._logits = graphs, prompts, logits
        self._recurring = Recurring(graphs, MAX_PROMPT_GRAPHS)
        for lanes in sorted(decode, reverse=True):
            for slot in slots:
                for features in (NO_FEATURES, ~NO_FEATURES):
                    shape = StepShape(lanes, 0, lanes, lanes, features)
                    self._captured_part(shape)(shape, slot)
                    self._capture(shape, slot)

    def copy_in(self, slot: Slot) -> None:
        """The work on the h2d stream."""
        slot.copy_in()

    def compute(self, shape: StepShape, slot: Slot) -> None:
        """The work on the compute stream."""
        prompts = self._prompts if shape.chunks else None
        if prompts is not None and self._recurring.due(_graph_key(shape, prompts)):
            # NOTE: before the meter begins, since no step runs meanwhile.
            self._capture(shape, prompts)
        self.device.meter.begin()
        if prompts is None:
            self._run(shape, slot)
        else:
            prompts.take_input(slot)
            self._run(shape, prompts)
            prompts.give_output(slot)
        self.device.meter.end()

    def copy_out(self, slot: Slot) -> None:
        """The work on the d2h stream."""
        slot.copy_out()

    def step(self, shape: StepShape, buffers: StepBuffers) -> None:
        """Both parts, one after the other."""
        logits = self.forward_part(shape, buffers)
        self.sampling_part(shape, buffers, logits.float() if shape.features else logits)

    def forward_part(self, shape: StepShape, buffers: StepBuffers) -> torch.Tensor:
        """Deltas, inputs with carry-over, forward pass; returns the logits [S, V] of the sampled positions."""
        words = buffers.device_input
        self._ops.apply_deltas(words, self.state)
        inputs = self._ops.prepare(words, self.state, shape.lanes, shape.chunks, shape.tokens, shape.sampled)
        return self._forward(inputs)

    def sampling_part(self, shape: StepShape, buffers: StepBuffers, logits: torch.Tensor) -> None:
        """Stages, sampling, advance. `logits` [S, V] are float32, and changed, if the step has features."""
        if not (n := shape.sampled):
            return
        state = self.state
        rows = state.sample_rows[:n]
        for stage in self._stages if shape.features else ():
            if shape.features & stage.feature:
                stage.edit(logits, rows)
        self._sample(logits, rows, state.tokens[:n], state.errors[:n])
        self._ops.advance(state, n, buffers.device_output)

    def _run(self, shape: StepShape, buffers: StepBuffers) -> None:
        """Run a step by its graph, or eagerly if there is none. Blocks are copied before, as many as there may be."""
        if shape.copies:
            self._forward.copy_blocks(block_copies(buffers.device_input, shape.copies))
        if self._graphs is None:
            self.step(shape, buffers)
            return
        key = _graph_key(shape, buffers)
        if key in self._graphs:
            self._graphs.replay(key)
        else:
            self._captured_part(shape)(shape, buffers)
        if shape.features:
            self.sampling_part(shape, buffers, self._logits[: shape.sampled])

    def _captured_part(self, shape: StepShape) -> Callable[[StepShape, StepBuffers], None]:
        return self._forward_to_logits if shape.features else self.step

    def _forward_to_logits(self, shape: StepShape, buffers: StepBuffers) -> None:
        self._logits[: shape.sampled].copy_(self.forward_part(shape, buffers))

    def _capture(self, shape: StepShape, buffers: StepBuffers) -> None:
        assert self._graphs is not None
        began = time.perf_counter()
        self._graphs.capture(_graph_key(shape, buffers), partial(self._captured_part(shape), shape, buffers))
        self.activity.captured(began, time.perf_counter())


def _graph_key(shape: StepShape, buffers: StepBuffers) -> tuple[int, ...]:
    """What a graph depends on: sizes, addresses, and whether it ends with the forward part."""
    return id(buffers), *shape[:4], bool(shape.features)


def _metered(meter: Meter, work: Callable[[], object]) -> None:
    meter.begin()
    work()
    meter.end()
