"""The second part of a step with held rows: its buffers, which belong to a slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..logprob_record import RECORD_WORDS
from .streams import Device


class HeldPart:
    """What goes to the device for the held rows of a step, and what stays there between the step's two parts.

        launch     positions ---h2d copy--> first part: the logits and rows of the held positions are kept
        complete   places, masks --h2d copy--> second part: samples from what was kept

    The rules of the slot hold here too: the host does not touch its buffers from a launch to `d2h_done`, and the h2d
    stream alone writes those on the device which it copies to.

    Args:
        rows: most held positions of a step. mask_words: words of a mask.

    Attributes:
        count: held positions of the step in flight.
        positions: int32 [rows], these positions.
        places: int32 [rows], which of them are sampled. masks: int32 [rows, mask_words], of these.
        masks_done: recorded behind the copy of the masks.
        output, records: int32 [rows, 2] and [rows, RECORD_WORDS], working buffers of the second part.
    """

    def __init__(self, device: Device, rows: int, mask_words: int) -> None:
        self.host_positions, self.positions = device.host_buffer(rows), device.buffer(rows)
        self.host_places, self.places = device.host_buffer(rows), device.buffer(rows)
        self.host_masks, self.masks = device.host_buffer(rows, mask_words), device.buffer(rows, mask_words)
        self.masks_done = device.event(timed=True)
        self.output, self.records = device.buffer(rows, 2), device.buffer(rows, RECORD_WORDS)
        self.count = 0
        self._logits = self._rows = torch.empty(0)

    def fill_positions(self, positions: np.ndarray) -> None:
        """Write the held positions, int32 [H], into the host's buffer."""
        self.count = len(positions)
        self.host_positions.numpy()[: self.count] = positions

    def copy_positions(self) -> None:
        """Called on the h2d stream."""
        self.positions[: self.count].copy_(self.host_positions[: self.count], non_blocking=True)

    def fill_masks(self, places: np.ndarray, masks: Sequence[np.ndarray]) -> None:
        """Write the places, int32 [K], and their masks, int32 [mask_words] each, into the host's buffers."""
        self.host_places.numpy()[: len(places)] = places
        table = self.host_masks.numpy()
        for line, mask in enumerate(masks):
            table[line] = mask

    def copy_masks(self, count: int) -> None:
        """Called on the h2d stream."""
        self.places[:count].copy_(self.host_places[:count], non_blocking=True)
        self.masks[:count].copy_(self.host_masks[:count], non_blocking=True)

    def keep(self, logits: torch.Tensor, rows: torch.Tensor, dummy_row: int) -> None:
        """Keep the logits [S, V], as float32, and rows, int32 [S], of the held positions; called in the first part.

        The dummy row takes the place of theirs in `rows`, so that nobody samples there.
        """
        positions = self.positions[: self.count].long()
        self._logits, self._rows = logits.index_select(0, positions).float(), rows.index_select(0, positions)
        rows.index_fill_(0, positions, dummy_row)

    def take(self, count: int, rows: torch.Tensor) -> torch.Tensor:
        """Write the rows to sample to `rows`, int32 [K], and return their logits, float32 [K, V]."""
        places = self.places[:count].long()
        torch.index_select(self._rows, 0, places, out=rows)
        logits = self._logits.index_select(0, places)
        self._logits = self._rows = torch.empty(0)
        return logits

    def put(self, count: int, output: torch.Tensor, records: torch.Tensor) -> None:
        """Write what the second part gave to the output of the step, int32 [S, 2], and its log-probabilities."""
        positions = self.positions.index_select(0, self.places[:count].long()).long()
        output.index_copy_(0, positions, self.output[:count])
        records.index_copy_(0, positions, self.records[:count])

    @property
    def bytes(self) -> int:
        """Of the host's buffers; those of the device that are copied to have as many."""
        return 4 * (self.host_positions.numel() + self.host_places.numel() + self.host_masks.numel())
