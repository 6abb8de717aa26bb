"""Dummies: steps and ledgers that nobody asked for, to compile kernels and to see how much memory steps take."""

from __future__ import annotations

import numpy as np
import torch

from ..logprob_record import MAX_SCORES
from ..plan import LEDGER_HEADER, ROW_RECORD, Feature, Plan
from .layout import HEADER_WORDS, Header

_STEP = 0


def empty_ledger(device: torch.device) -> torch.Tensor:
    """Return a step's input in which ledger 0 opens, without a token."""
    words = np.zeros(HEADER_WORDS + LEDGER_HEADER.itemsize // 4, np.int32)
    words[Header.LEDGERS_AT] = HEADER_WORDS
    words[HEADER_WORDS:].view(LEDGER_HEADER)["words"] = LEDGER_HEADER.itemsize // 4
    return torch.from_numpy(words).to(device)


def dummy_plan(dummy_row: int, lanes: int, tokens: int, longest: int, features: Feature) -> Plan:
    """Return a plan of padding only: lanes in no use, and prompt chunks of the dummy row, none above `longest`.

    As many of their positions are scored as can be.
    """
    scores = [[dummy_row, lanes + place, 0] for place in range(min(tokens, MAX_SCORES))]
    chunks = [[dummy_row, 0, min(longest, tokens - at), 0] for at in range(0, tokens, longest)]
    none = np.zeros(0, np.int32)
    return Plan(
        step=_STEP,
        lane_rows=np.full(lanes, dummy_row, np.int32),
        chunks=np.array(chunks, np.int32).reshape(-1, 4),
        prompt_tokens=np.zeros(tokens, np.int32),
        joins=np.zeros(0, ROW_RECORD),
        block_deltas=none.reshape(0, 4),
        lane_deltas=none.reshape(0, 2),
        features=features,
        scores=np.array(scores, np.int32).reshape(-1, 3),
    )
