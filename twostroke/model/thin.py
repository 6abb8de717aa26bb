"""The decode steps of few tokens of the native decoder, through products that start while the kernel ahead ends."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from ..attention.interface import Attention
from ..kernels.announced import Written
from ..kernels.compiler import CAPABILITY, CompilerMissing
from ..kernels.ops import Rotary
from ..kernels.step import StepInputs
from ..kernels.thin_linear import MAX_TOKENS, Scaled, ThinLinears, ThinWeight

if TYPE_CHECKING:
    from .decoder import Decoder
    from .linear import Linear

_log = logging.getLogger(__name__)


class Linears(Protocol):
    """Launches products: `ThinLinears`, and `MediumLinears` for more tokens, each with weights of its own making."""

    def scaling(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any: ...
    def gating(self, weight: torch.Tensor) -> Any: ...
    def adding(self, weight: torch.Tensor) -> Any: ...
    def begin(self) -> None: ...
    def scaled(self, x: Scaled, weight: Any) -> torch.Tensor: ...
    def gated(self, x: Scaled, weight: Any) -> Written: ...
    def residual(self, x: Written, weight: Any, residual: torch.Tensor, norm: torch.Tensor) -> Scaled: ...


class _ThinLayer(NamedTuple):
    """What `Linears` made of a layer's weights."""

    qkv: Any
    output: Any
    gate_up: Any
    down: Any


class ThinDecoder:
    """The steps of a decoder that have lanes only, and so many of them as its products are made for.

    Attention and four products are all of a layer: norms, residual and activation are parts of the products. A kernel
    starts while the one ahead ends. Products of few tokens are one kernel from an attention to the next, in which each
    reads what the one ahead has announced.
    A norm's weight multiplies the residual ahead of the product and its scale follows behind it, so a norm's result is
    rounded once instead of twice, and results differ from those of the plain path by the rounding of bf16.

    Args:
        decoder: whose weights are used; it must be one that `made_for` accepts. It is not kept: it keeps its steps.
        linears: launches the products.
        lanes: how many of them a step may have.
    """

    def __init__(self, decoder: Decoder, linears: Linears, lanes: range) -> None:
        self._linears = linears
        self._lanes = lanes
        self._layers = [
            _ThinLayer(
                linears.scaling(_weight(block.qkv), block.qkv.bias),
                linears.adding(_weight(block.output)),
                linears.gating(_weight(block.gate_up)),
                linears.adding(_weight(block.down)),
            )
            for block in decoder.blocks
        ]
        self._head = linears.scaling(_weight(decoder.head))

    @classmethod
    def made_for(cls, decoder: Decoder) -> list[ThinDecoder]:
        """Return the thin steps of a decoder, of more lanes and of few, each where its device and shapes allow it.
        Where both take a step, the first do.
        """
        if decoder.device.type != "cuda" or not _is_plain(decoder):
            return []
        capability = torch.cuda.get_device_capability(decoder.device)
        more = cls._of_more(decoder) if capability >= CAPABILITY else []
        return more + (cls._of_few(decoder) if capability == CAPABILITY else [])

    @classmethod
    def _of_few(cls, decoder: Decoder) -> list[ThinDecoder]:
        if not _fits(decoder):
            return []
        try:
            linears = ThinLinears(decoder.device, decoder.config.norm_eps)
        except CompilerMissing as error:
            _log.warning("decode steps of few tokens take the slower path: %s", error)
            return []
        if not linears.chains:
            _log.warning(
                "decode steps of few tokens are slower: another engine of this process uses %s", decoder.device
            )
        return [cls(decoder, linears, range(1, MAX_TOKENS + 1))]

    @classmethod
    def _of_more(cls, decoder: Decoder) -> list[ThinDecoder]:
        from ..kernels import medium_linear as medium

        weights = [_weight(layer) for block in decoder.blocks for layer in block.linears]
        fits = all(medium.MediumWeight.fits(weight) for weight in [_weight(decoder.head), *weights])
        if not fits or not all(medium.MediumWeight.pays(weight) for weight in weights):
            return []
        linears = medium.MediumLinears(decoder.device, decoder.config.norm_eps)
        return [cls(decoder, linears, medium.LANES)]

    def takes(self, step: StepInputs) -> bool:
        """Whether a step is one of those; shapes alone decide."""
        return step.num_lanes == len(step.input_ids) and step.num_lanes in self._lanes and step.sample_index is None

    def forward(self, decoder: Decoder, step: StepInputs, attention: Attention) -> torch.Tensor:
        """Return logits [T, vocabulary], bf16, of the decoder that these steps were made of."""
        linears, config = self._linears, decoder.config
        eps, split = config.norm_eps, (config.heads, config.kv_heads, config.kv_heads)
        linears.begin()
        normed, residual, cos, sin = decoder.embed(step)
        x = Scaled(residual, normed, None)
        for index, (block, thin) in enumerate(zip(decoder.blocks, self._layers, strict=True)):
            heads = linears.scaled(x, thin.qkv).view(len(residual), -1, config.head_dim)
            rotary = Rotary(cos, sin, block.q_norm, block.k_norm, eps)
            q, k, v = heads.split(split, dim=1)
            seen = Written(attention.forward_rotary(index, q, k, v, rotary, step).flatten(1))
            x = linears.residual(seen, thin.output, x.residual, block.mlp_norm)
            x = linears.residual(linears.gated(x, thin.gate_up), thin.down, x.residual, decoder.norm_after(index))
        return linears.scaled(x, self._head)


def _is_plain(decoder: Decoder) -> bool:
    return all(layer.bias is None for block in decoder.blocks for layer in (block.output, block.gate_up, block.down))


def _fits(decoder: Decoder) -> bool:
    gated = all(ThinWeight.fits(_weight(block.gate_up), gated=True) for block in decoder.blocks)
    others = [decoder.head, *(layer for block in decoder.blocks for layer in (block.qkv, block.output, block.down))]
    return gated and all(ThinWeight.fits(_weight(layer)) for layer in others)


def _weight(linear: Linear) -> torch.Tensor:
    assert linear.weight is not None, "only CPU weights are packed away"
    return linear.weight
