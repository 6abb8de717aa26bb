"""The runner: takes a plan through a slot."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from .device.batch_state import BatchState
from .device.buckets import Buckets
from .device.graphs import Graphs
from .device.slot import Slot
from .device.streams import Device
from .plan import Plan, StepOutput


class BatchOps(Protocol):
    """The batch's operations, see `kernels.batch.BatchOps`."""

    def apply_deltas(self, words: torch.Tensor, batch: Any) -> None: ...

    def prepare(
        self, words: torch.Tensor, batch: Any, lanes: int, chunks: int, prompt_tokens: int, sampled: int
    ) -> Any: ...

    def advance(self, batch: Any, sampled: int, output: torch.Tensor) -> None: ...


class StepShape(NamedTuple):
    """The sizes of a step's tensors: lanes (padded), prompt chunks, their tokens, and sampled positions."""

    lanes: int
    chunks: int
    prompt_tokens: int
    sampled: int


class Activity:
    """How the compute stream spent its time, from its meter.

    Attributes:
        steps: steps measured.
        busy_seconds: time inside steps.
        gap_seconds: time between a step and the next, while there was work.
        idle_seconds: time between steps in which the engine had nothing to do.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.busy_seconds = 0.0
        self.gap_seconds = 0.0
        self.idle_seconds = 0.0

    def add(self, gap: float, busy: float, rested: bool) -> None:
        self.steps += 1
        self.busy_seconds += busy
        if rested:
            self.idle_seconds += gap
        else:
            self.gap_seconds += gap

    @property
    def active(self) -> float:
        """Share of the working time in which the compute stream ran a step, 0 to 1; 0 before the first step."""
        total = self.busy_seconds + self.gap_seconds
        return self.busy_seconds / total if total else 0.0


class Runner:
    """Launches plans and collects their outputs. One runner, one batch state, any number of slots.

    Args:
        device: streams and buffers.
        state: the device-resident batch.
        ops: what happens to the batch in a step.
        forward: inputs of a step -> logits [S, V].
        sample: (logits [S, V], rows [S], tokens out [S], errors out [S]) on the current stream.
        buckets: padded sizes of decode steps.
    """

    def __init__(
        self,
        device: Device,
        state: BatchState,
        ops: BatchOps,
        forward: Callable[[Any], torch.Tensor],
        sample: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None],
        buckets: Buckets,
    ) -> None:
        self.device = device
        self.state = state
        self.activity = Activity()
        self._ops = ops
        self._forward = forward
        self._sample = sample
        self._buckets = buckets
        self._graphs: Graphs | None = None
        self._rested: set[int] = set()
        self._resting = True

    def launch(self, plan: Plan, slot: Slot) -> None:
        """Queue a step: its input to the device, the step itself, its output back. Returns without waiting."""
        shape = self.shape_of(plan)
        slot.fill(plan, outputs=plan.num_lanes + len(plan.sampling_chunks()))
        if self._resting:
            self._rested.add(plan.step)
            self._resting = False
        device = self.device
        device.h2d.run(partial(self.copy_in, slot))
        device.h2d.record(slot.h2d_done)
        device.compute.wait(slot.h2d_done)
        device.compute.run(partial(self.compute, shape, slot))
        device.compute.record(slot.compute_done)
        device.d2h.wait(slot.compute_done)
        device.d2h.run(partial(self.copy_out, slot))
        device.d2h.record(slot.d2h_done)

    def wait(self, plan: Plan, slot: Slot) -> StepOutput:
        """Wait for the step's output: the only place where the CPU waits for the device."""
        slot.d2h_done.synchronize()
        gap, busy = self.device.meter.read()
        self.activity.add(gap, busy, rested=plan.step in self._rested)
        self._rested.discard(plan.step)
        return slot.read()

    def rest(self) -> None:
        """Note that there is nothing to do: the gap before the next step is nobody's fault."""
        self._resting = True

    def forget_activity(self) -> None:
        """Start the accounting anew, as if no step had run."""
        self.activity = Activity()
        self._resting = True

    def shape_of(self, plan: Plan) -> StepShape:
        """Return the step's sizes; a step of lanes alone is padded to its bucket, captured or not."""
        chunks = len(plan.chunks)
        if not chunks:
            lanes = self._buckets.fit(plan.num_lanes)
            return StepShape(lanes, 0, 0, lanes)
        sampled = plan.num_lanes + len(plan.sampling_chunks())
        return StepShape(plan.num_lanes, chunks, len(plan.prompt_tokens), sampled)

    def capture(self, graphs: Graphs, slots: list[Slot]) -> None:
        """Capture the decode buckets for every slot, largest first, so that the pool is sized once."""
        for lanes in reversed(self._buckets.sizes):
            for slot in slots:
                shape = StepShape(lanes, 0, 0, lanes)
                graphs.capture((id(slot), lanes), partial(self.step, shape, slot))
        self._graphs = graphs

    def copy_in(self, slot: Slot) -> None:
        """The work on the h2d stream."""
        slot.copy_in()

    def compute(self, shape: StepShape, slot: Slot) -> None:
        """The work on the compute stream."""
        self.device.meter.begin()
        if self._graphs is not None and not shape.chunks:
            self._graphs.replay((id(slot), shape.lanes))
        else:
            self.step(shape, slot)
        self.device.meter.end()

    def copy_out(self, slot: Slot) -> None:
        """The work on the d2h stream."""
        slot.copy_out()

    def step(self, shape: StepShape, slot: Slot) -> None:
        """Deltas, inputs with carry-over, forward pass, sampling, advance: what a graph captures."""
        state = self.state
        self._ops.apply_deltas(slot.device_input, state)
        inputs = self._ops.prepare(slot.device_input, state, *shape)
        logits = self._forward(inputs)
        if n := shape.sampled:
            self._sample(logits, state.sample_rows[:n], state.tokens[:n], state.errors[:n])
            self._ops.advance(state, n, slot.device_output)
