"""The runner: takes a plan through a slot."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from .device.activity import Activity
from .device.batch_state import BatchState
from .device.buckets import Buckets
from .device.graphs import Graphs
from .device.layout import block_copies
from .device.slot import Slot
from .device.streams import Device, Meter
from .plan import NO_FEATURES, Feature, Plan, StepOutput
from .sampling.stage import Stage

_WHOLE, _FORWARD = "whole step", "forward part"
"""What a graph holds."""


class BatchOps(Protocol):
    """The batch's operations, see `kernels.batch.BatchOps`."""

    def apply_deltas(self, words: torch.Tensor, batch: Any) -> None: ...

    def prepare(
        self, words: torch.Tensor, batch: Any, lanes: int, chunks: int, prompt_tokens: int, sampled: int
    ) -> Any: ...

    def advance(self, batch: Any, sampled: int, output: torch.Tensor) -> None: ...


class Forward(Protocol):
    """The model over its cache."""

    def __call__(self, step: Any, /) -> torch.Tensor:
        """Inputs of a step -> logits [S, V]."""
        ...

    def copy_blocks(self, pairs: torch.Tensor) -> None:
        """Copy blocks of the cache, see `Plan.block_copies`."""


class StepShape(NamedTuple):
    """What a step's launches depend on.

    That is lanes (padded), prompt chunks, their tokens, sampled positions, features, and block copies.
    """

    lanes: int
    chunks: int
    prompt_tokens: int
    sampled: int
    features: Feature = NO_FEATURES
    copies: int = 0


class Runner:
    """Launches plans and collects their outputs. One runner, one batch state, any number of slots.

    Args:
        device: streams and buffers.
        state: the device-resident batch.
        ops: what happens to the batch in a step.
        forward: the model.
        stages: what edits the logits before they are sampled, in this order, where a step's features ask for it.
        sample: (logits [S, V], rows [S], tokens out [S], errors out [S]) on the current stream.
        buckets: padded sizes of decode steps.
    """

    def __init__(
        self,
        device: Device,
        state: BatchState,
        ops: BatchOps,
        forward: Forward,
        stages: Sequence[Stage],
        sample: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None],
        buckets: Buckets,
    ) -> None:
        self.device = device
        self.state = state
        self.activity = Activity()
        self._ops = ops
        self._forward = forward
        self._stages = stages
        self._sample = sample
        self._buckets = buckets
        self._graphs: Graphs | None = None
        self._logits = torch.empty(0)

    def launch(self, plan: Plan, slot: Slot) -> None:
        """Queue a step: its input to the device, the step itself, its output back. Returns without waiting."""
        began = time.perf_counter()
        shape = self.shape_of(plan)
        slot.fill(plan, outputs=plan.num_lanes + len(plan.sampling_chunks()))
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

    def shape_of(self, plan: Plan) -> StepShape:
        """Return the step's sizes; a step of lanes alone is padded to its bucket, captured or not."""
        chunks = len(plan.chunks)
        if not chunks:
            lanes = self._buckets.fit(plan.num_lanes)
            return StepShape(lanes, 0, 0, lanes, plan.features)
        sampled = plan.num_lanes + len(plan.sampling_chunks())
        return StepShape(
            plan.num_lanes, chunks, len(plan.prompt_tokens), sampled, plan.features, len(plan.block_copies)
        )

    def capture(self, graphs: Graphs, slots: list[Slot], logits: torch.Tensor) -> None:
        """Capture the decode buckets for every slot, largest first, so that the pool is sized once.

        Each bucket twice: the whole step for the common case, and for steps with features the forward part, which
        leaves its logits in `logits`, float32 [max lanes, V]; their sampling part runs eagerly.
        """
        began = time.perf_counter()
        self._logits = logits
        for lanes in reversed(self._buckets.sizes):
            for slot in slots:
                shape = StepShape(lanes, 0, 0, lanes)
                graphs.capture((id(slot), lanes, _WHOLE), partial(self.step, shape, slot))
                graphs.capture((id(slot), lanes, _FORWARD), partial(self._forward_to_logits, shape, slot))
        self._graphs = graphs
        self.activity.captured(began, time.perf_counter())

    def copy_in(self, slot: Slot) -> None:
        """The work on the h2d stream."""
        slot.copy_in()

    def compute(self, shape: StepShape, slot: Slot) -> None:
        """The work on the compute stream."""
        self.device.meter.begin()
        if self._graphs is None or shape.chunks:
            self.step(shape, slot)
        elif not shape.features:
            self._graphs.replay((id(slot), shape.lanes, _WHOLE))
        else:
            self._graphs.replay((id(slot), shape.lanes, _FORWARD))
            self.sampling_part(shape, slot, self._logits[: shape.lanes])
        self.device.meter.end()

    def copy_out(self, slot: Slot) -> None:
        """The work on the d2h stream."""
        slot.copy_out()

    def step(self, shape: StepShape, slot: Slot) -> None:
        """Both parts, one after the other."""
        logits = self.forward_part(shape, slot)
        self.sampling_part(shape, slot, logits.float() if shape.features else logits)

    def forward_part(self, shape: StepShape, slot: Slot) -> torch.Tensor:
        """Deltas, inputs with carry-over, forward pass; returns the logits [S, V] of the sampled positions."""
        self._ops.apply_deltas(slot.device_input, self.state)
        if shape.copies:
            self._forward.copy_blocks(block_copies(slot.device_input, shape.copies))
        inputs = self._ops.prepare(
            slot.device_input, self.state, shape.lanes, shape.chunks, shape.prompt_tokens, shape.sampled
        )
        return self._forward(inputs)

    def sampling_part(self, shape: StepShape, slot: Slot, logits: torch.Tensor) -> None:
        """Stages, sampling, advance. `logits` [S, V] are float32, and changed, if the step has features."""
        if not (n := shape.sampled):
            return
        state = self.state
        rows = state.sample_rows[:n]
        for stage in self._stages if shape.features else ():
            if shape.features & stage.feature:
                stage.edit(logits, rows)
        self._sample(logits, rows, state.tokens[:n], state.errors[:n])
        self._ops.advance(state, n, slot.device_output)

    def _forward_to_logits(self, shape: StepShape, slot: Slot) -> None:
        self._logits[: shape.sampled].copy_(self.forward_part(shape, slot))


def _metered(meter: Meter, work: Callable[[], object]) -> None:
    meter.begin()
    work()
    meter.end()
