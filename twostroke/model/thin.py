"""The decode steps of few tokens of the native decoder, through kernels that read weights without a pause."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from ..attention.interface import Attention
from ..kernels import ops
from ..kernels.announced import Written
from ..kernels.compiler import CompilerMissing
from ..kernels.ops import Rotary
from ..kernels.step import StepInputs
from ..kernels.thin_linear import MAX_TOKENS, Scaled, ThinLinears, ThinWeight

if TYPE_CHECKING:
    from .decoder import Decoder
    from .linear import Linear

CAPABILITY = (9, 0)

_log = logging.getLogger(__name__)


class _ThinLayer(NamedTuple):
    qkv: ThinWeight
    output: ThinWeight
    gate_up: ThinWeight
    down: ThinWeight


class ThinDecoder:
    """The steps of a decoder that have lanes only, and at most `MAX_TOKENS` of them.

    Four products and attention are all that a layer launches: norms, residual and activation are parts of the products.
    Each starts while the one ahead ends; behind a product, a product reads what that has announced.
    A norm's weight multiplies the residual ahead of the product and its scale follows behind it, so a norm's result is
    rounded once instead of twice, and results differ from those of the plain path by the rounding of bf16.

    Args:
        decoder: whose weights are used; it must be one that `made_for` accepts.
        linears: launches the products.
    """

    def __init__(self, decoder: Decoder, linears: ThinLinears) -> None:
        self._decoder = decoder
        self._linears = linears
        self._layers = [
            _ThinLayer(
                linears.scaling(_weight(block.qkv), block.qkv.bias),
                linears.adding(_weight(block.output)),
                linears.gating(_weight(block.gate_up)),
                linears.adding(_weight(block.down)),
            )
            for block in decoder.blocks
        ]
        self._head = linears.heading(_weight(decoder.head))

    @classmethod
    def made_for(cls, decoder: Decoder) -> ThinDecoder | None:
        """Return the thin steps of a decoder; None where its device, its shapes or a missing compiler forbid them."""
        device = decoder.device
        if device.type != "cuda" or torch.cuda.get_device_capability(device) != CAPABILITY or not _fits(decoder):
            return None
        try:
            return cls(decoder, ThinLinears(device, decoder.config.norm_eps))
        except CompilerMissing as error:
            _log.warning("decode steps of few tokens take the slower path: %s", error)
            return None

    @staticmethod
    def takes(step: StepInputs) -> bool:
        """Whether a step is one of those; shapes alone decide."""
        return step.num_lanes == len(step.input_ids) <= MAX_TOKENS and step.sample_index is None

    def forward(self, step: StepInputs, attention: Attention) -> torch.Tensor:
        """Return logits [T, vocabulary], bf16."""
        linears, decoder, config = self._linears, self._decoder, self._decoder.config
        eps, split = config.norm_eps, (config.heads, config.kv_heads, config.kv_heads)
        linears.begin()
        tables = ops.rotary_tables(step.positions, decoder.inverse_frequencies, config.rope.attention_factor)
        residual = functional.embedding(step.input_ids, decoder.embedding)
        x = Scaled(residual, ops.rms_norm(residual, decoder.blocks[0].attention_norm, eps), None)
        for index, (block, thin) in enumerate(zip(decoder.blocks, self._layers, strict=True)):
            heads = linears.scaled(x, thin.qkv).view(len(residual), -1, config.head_dim)
            rotary = Rotary(*tables, block.q_norm, block.k_norm, eps)
            q, k, v = heads.split(split, dim=1)
            seen = Written(attention.forward_rotary(index, q, k, v, rotary, step).flatten(1))
            x = linears.residual(seen, thin.output, x.residual, block.mlp_norm)
            x = linears.residual(linears.gated(x, thin.gate_up), thin.down, x.residual, decoder.norm_after(index))
        return linears.scaled(x, self._head)


def _fits(decoder: Decoder) -> bool:
    plain = all(layer.bias is None for block in decoder.blocks for layer in (block.output, block.gate_up, block.down))
    gated = all(ThinWeight.fits(_weight(block.gate_up), gated=True) for block in decoder.blocks)
    others = [decoder.head, *(layer for block in decoder.blocks for layer in (block.qkv, block.output, block.down))]
    return plain and gated and all(ThinWeight.fits(_weight(layer)) for layer in others)


def _weight(linear: Linear) -> torch.Tensor:
    assert linear.weight is not None, "only CPU weights are packed away"
    return linear.weight
