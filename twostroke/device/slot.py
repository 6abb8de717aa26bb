"""A slot: the buffers and events of one step in flight."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ..logprob_record import LOGPROB_RECORD, MAX_SCORES, RECORD_WORDS
from ..plan import Feature, Plan, StepOutput
from .held_part import HeldPart
from .layout import pack
from .streams import Device

_LINES = 64


class _Copy:
    """Copies the first lines of one buffer into another, on the current stream.

    A few lines more than asked for, so that there are few sizes, and tensors for each are made once.
    """

    def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._source = source
        self._target = target
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, lines: int) -> None:
        size = -(-lines // _LINES)
        views = self._views.get(size)
        if views is None:
            views = self._views[size] = self._source[: size * _LINES], self._target[: size * _LINES]
        views[1].copy_(views[0], non_blocking=True)


class StepBuffers:
    """What a step reads and writes on the device.

    On their own they are where steps run that share one captured graph whatever their slot: the compute stream brings
    the slot's input here, and takes the output back.

    Attributes:
        device_input: int32 [input words].
        device_output: int32 [max sampled, 2]: token, flags.
        device_records: int32 [max sampled, RECORD_WORDS], log-probabilities of the sampled positions. device_scores:
            int32 [MAX_SCORES, RECORD_WORDS], those of the scored positions.
    """

    held: HeldPart

    def __init__(self, device: Device, input_words: int, max_outputs: int) -> None:
        self.device_input = device.buffer(input_words)
        self.device_output = device.buffer(max_outputs, 2)
        self.device_records = device.buffer(max_outputs, RECORD_WORDS)
        self.device_scores = device.buffer(MAX_SCORES, RECORD_WORDS)

    def take_input(self, slot: Slot) -> None:
        """Copy the words in use of a slot's input; its held part is used in place."""
        self.held = slot.held
        self.device_input[: slot.words].copy_(slot.device_input[: slot.words], non_blocking=True)

    def give_output(self, slot: Slot) -> None:
        """Copy the outputs of the slot's step into it."""
        slot.device_output[: slot.outputs].copy_(self.device_output[: slot.outputs], non_blocking=True)
        if slot.records:
            slot.device_records[: slot.records].copy_(self.device_records[: slot.records], non_blocking=True)
        if slot.scores:
            slot.device_scores[: slot.scores].copy_(self.device_scores[: slot.scores], non_blocking=True)


class Slot(StepBuffers):
    """One of two (or more) sets of buffers through which steps go to the device and back.

        fill        h2d copy        compute            d2h copy        read
        host_input ---------> device_input ... device_output ---------> host_output
                   h2d_done               compute_done        d2h_done

    The host does not touch the host buffers between a launch and its `d2h_done` (invariant 2); the device input is
    written by the h2d stream alone, and only after the step that read it last is committed.

    Attributes:
        host_input, host_output, host_records, host_scores: as those on the device.
        words: words of the input in use.
        outputs: sampled positions of the step in flight. records, scores: those whose log-probabilities come with them.
        held: what the second part of a step with held rows needs, with masks of `mask_words` words.
    """

    def __init__(self, device: Device, input_words: int, max_outputs: int, mask_words: int = 0) -> None:
        super().__init__(device, input_words, max_outputs)
        self.host_input = device.host_buffer(input_words)
        self.host_output = device.host_buffer(max_outputs, 2)
        self.held = HeldPart(device, max_outputs, mask_words)
        self.host_records = device.host_buffer(max_outputs, RECORD_WORDS)
        self.host_scores = device.host_buffer(MAX_SCORES, RECORD_WORDS)
        self.h2d_done = device.event(timed=True)
        self.compute_done = device.event()
        self.d2h_done = device.event()
        self.words = 0
        self.outputs = self.records = self.scores = 0
        self._copy_in = _Copy(self.host_input, self.device_input)
        self._copy_out = _Copy(self.device_output, self.host_output)
        self._host_words: np.ndarray = self.host_input.numpy()
        self._host_outputs: np.ndarray = self.host_output.numpy()
        self._records: np.ndarray = self.host_records.numpy().view(LOGPROB_RECORD)[:, 0]
        self._scores: np.ndarray = self.host_scores.numpy().view(LOGPROB_RECORD)[:, 0]

    def fill(self, plan: Plan, outputs: int) -> None:
        """Write the plan into the host input."""
        self.words = pack(plan, self._host_words)
        if len(plan.held):
            self.held.fill_positions(plan.held)
        self.outputs = outputs
        self.records = outputs if plan.features and plan.features & Feature.LOGPROBS else 0
        self.scores = len(plan.scores)

    def copy_in(self) -> None:
        """Copy the words in use to the device; called on the h2d stream."""
        self._copy_in(self.words)

    def copy_out(self) -> None:
        """Copy the outputs to the host; called on the d2h stream."""
        self._copy_out(self.outputs)
        if self.records:
            self.host_records[: self.records].copy_(self.device_records[: self.records], non_blocking=True)
        if self.scores:
            self.host_scores[: self.scores].copy_(self.device_scores[: self.scores], non_blocking=True)

    def read(self) -> StepOutput:
        """Take the outputs; valid once `d2h_done` is."""
        taken = self._host_outputs[: self.outputs]
        # NOTE: two copies, since numpy lets go of the interpreter's lock for one of more than 500 elements.
        output = StepOutput(tokens=taken[:, 0].copy(), flags=taken[:, 1].copy())
        if not self.records and not self.scores:
            return output
        return replace(output, records=self._records[: self.records].copy(), scores=self._scores[: self.scores].copy())

    @property
    def host_bytes(self) -> int:
        buffers = self.host_input, self.host_output, self.host_records, self.host_scores
        return 4 * sum(buffer.numel() for buffer in buffers) + self.held.bytes

    @property
    def device_bytes(self) -> int:
        once = self.device_input, self.device_scores
        twice = self.device_output, self.device_records  # the held part has as large ones
        return 4 * sum(buffer.numel() for buffer in (*once, *twice, *twice)) + self.held.bytes
