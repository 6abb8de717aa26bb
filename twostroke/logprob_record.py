"""The log-probabilities of one position, as the device writes them."""

from __future__ import annotations

import numpy as np

MAX_LOGPROBS = 20
"""Most likely tokens that can be asked for at each position."""

LOGPROB_RECORD = np.dtype(
    [
        ("logprob", np.float32),  # of the token, in the softmax of the model's logits; NaN where one of these is bad
        ("sampling_logprob", np.float32),  # of the token, in the distribution that it was drawn from
        ("rank", np.int32),  # 1 + the tokens that are more likely
        ("ids", np.int32, MAX_LOGPROBS),  # the most likely tokens, -1 where unused
        ("logprobs", np.float32, MAX_LOGPROBS),
    ]
)
"""One position, as a record of 4-byte words."""

RECORD_WORDS = LOGPROB_RECORD.itemsize // 4

MAX_SCORES = 256
"""Prompt positions of a step whose log-probabilities are computed; it bounds the logits that exist at once."""

NO_RECORDS = np.empty(0, LOGPROB_RECORD)
NO_RECORDS.flags.writeable = False
