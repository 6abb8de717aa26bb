"""Sampling: one token per row of logits, on whatever device they lie."""

from __future__ import annotations

import torch

from .state import SamplingState
from .torch_sampler import sample_rows


def sample(
    logits: torch.Tensor,
    rows: torch.Tensor,
    state: SamplingState,
    tokens: torch.Tensor,
    errors: torch.Tensor,
    typical: bool = False,
    chances: torch.Tensor | None = None,
) -> None:
    """Draw one token per row of `logits` by the parameters of the row of the batch behind it.

    On CUDA nothing waits for the device, and the launches do not depend on the data, so a graph can capture them.
    A row's token depends on its logits, parameters, seed and output index only.

    Args:
        logits: [S, V] in bfloat16, float16 or float32, the last dimension contiguous; -inf forbids a token.
        rows: int32 [S]; rows of the batch, the dummy row included, may repeat.
        tokens: int32 [S], written: the token, 0 where `errors` is 1.
        errors: int32 [S], written: 1 where a logit is NaN or +inf, or no token is allowed.
        typical: a row of the batch has a typical_p below 1; without it, typical_p is not looked at.
        chances: float32 [S], written unless None: the log-probability of the token in the distribution that it was
            drawn from, which is that of the kept tokens at the row's temperature; 0 for a greedy row.
    """
    if logits.is_cuda:
        # NOTE: imported here, since a CPU build of torch comes without triton.
        from ..kernels import sample as kernels

        kernels.sample_rows(logits, rows, *state, tokens, errors, typical, chances)
    else:
        sample_rows(logits, rows, state, tokens, errors, typical, chances)
