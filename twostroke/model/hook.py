"""The hook: the place where the attention calls of an unmodified transformers model arrive."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

IMPLEMENTATION = "twostroke"
"""Attention of a running model. It has no mask function, so transformers builds no mask for it."""

PROBE = "twostroke_probe"
"""Attention of a model that is being probed: its masks say which positions the model wants to be seen."""

NO_WINDOW_PATTERN = -1
"""Stands in a probe's mask where the pattern is neither causal nor a causal window."""


class AttentionCall(NamedTuple):
    """What a model hands to its attention.

    Attributes:
        query: [B, heads, T, head_dim].
        key: [B, kv_heads, T, head_dim].
        value: as `key`.
        module: the attention module that calls.
        mask: what the model's mask function made, or something of the model's own; None if there is no mask.
        options: all other arguments.

    A compiled layer hands over the tensors alone: what else there is was seen when the model was probed.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    module: nn.Module | None = None
    mask: torch.Tensor | None = None
    options: Mapping[str, Any] = MappingProxyType({})


Handler = Callable[[AttentionCall], torch.Tensor]
"""Takes the attention calls of a forward pass, in their order; returns [B, T, heads, head_dim]."""

_running = threading.local()


@contextmanager
def attending(handler: Handler) -> Iterator[None]:
    """Let `handler` take the attention calls of the forward pass that this thread runs meanwhile."""
    _running.handler = handler
    try:
        yield
    finally:
        _running.handler = None


def _handle(call: AttentionCall) -> torch.Tensor:
    handler: Handler | None = getattr(_running, "handler", None)
    if handler is None:
        raise RuntimeError("the model was run outside of its engine")
    return handler(call)


@torch.library.custom_op("twostroke::attend", mutates_args=())
def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The attention call of a compiled layer, opaque to the compiler. It reads and writes the cache unseen by it."""
    return _handle(AttentionCall(query, key, value))


@attend.register_fake
def _shape_of_attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    batch, heads, tokens, head_dim = query.shape
    return query.new_empty(batch, tokens, heads, head_dim)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    if torch.compiler.is_compiling():
        return attend(query, key, value), None
    return _handle(AttentionCall(query, key, value, module, attention_mask, options)), None


def _describe_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., torch.Tensor],
    config: Any,
    device: torch.device,
    **_: Any,
) -> torch.Tensor:
    """Return the mask's window instead of the mask: int64 [B, 1, q_length, kv_length], the same number everywhere.

    The model passes the tensor on to those of its layers that are to use that mask, sliced perhaps.
    """
    window = _window_of(mask_function, max_positions_of(config) or kv_length, device)
    return torch.full((batch_size, 1, q_length, kv_length), window, dtype=torch.int64, device=device)


def _window_of(mask_function: Callable[..., torch.Tensor], positions: int, device: torch.device) -> int:
    """Return the window of a mask over `positions` positions, 0 if it is causal only, or `NO_WINDOW_PATTERN`.

    The mask is evaluated for the last query and two before it: a chunked or blockwise mask shows a different number of
    positions to at least one of them.
    """
    keys = torch.arange(positions, device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)

    def seen(query: int) -> torch.Tensor:
        return mask_function(zero, zero, zero + query, keys).expand(positions)

    last = positions - 1
    window = int(seen(last).sum())
    for query in {last, last // 2 + 1, last // 3}:
        if not torch.equal(seen(query), (keys <= query) & (keys > query - window)):
            return NO_WINDOW_PATTERN
    return window if window < positions else 0


def max_positions_of(config: Any) -> int | None:
    """Return the most positions that a model was made for, or None if its configuration does not say."""
    names = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length")
    values = (getattr(config.get_text_config(), name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


for _name in (IMPLEMENTATION, PROBE):
    AttentionInterface.register(_name, _attend)
AttentionMaskInterface.register(PROBE, _describe_mask)
