"""The native decoder: one model for the Llama family."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ..attention.interface import Attention
from ..kernels import invariant_ops, ops
from ..kernels.ops import Embedded, Rotary
from ..kernels.step import StepInputs
from . import weights
from .config import DecoderConfig
from .linear import InvariantLinear, Linear
from .thin import ThinDecoder


class _Layer:
    """The weights of one layer: q, k and v merged into one projection, gate and up into another."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device, linear: type[Linear]) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim

        def norm(size: int) -> torch.Tensor:
            return torch.ones(size, dtype=dtype, device=device)

        self.attention_norm = norm(hidden)
        self.qkv = linear(hidden, queries + 2 * keys, config.qkv_bias, dtype, device)
        self.q_norm = norm(config.head_dim) if config.qk_norm else None
        self.k_norm = norm(config.head_dim) if config.qk_norm else None
        self.output = linear(queries, hidden, config.output_bias, dtype, device)
        self.mlp_norm = norm(hidden)
        self.gate_up = linear(hidden, 2 * inner, config.mlp_bias, dtype, device)
        self.down = linear(inner, hidden, config.mlp_bias, dtype, device)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.output, self.gate_up, self.down

    @property
    def norms(self) -> list[torch.Tensor]:
        norms = (self.attention_norm, self.q_norm, self.k_norm, self.mlp_norm)
        return [norm for norm in norms if norm is not None]


class Decoder:
    """A decoder of the Llama family, as `model.interface.Model`. For inference: no tensor has a gradient.

    A new decoder's matrices and biases are uninitialised, its norms 1; `weights` fills them. `pack` must be called once
    they are filled, before the first forward pass.

    Args:
        deterministic: the logits of a token do not depend on the tokens beside it, to the bit. Attention must be such
            as keeps to that.
    """

    def __init__(
        self, config: DecoderConfig, dtype: torch.dtype, device: torch.device, *, deterministic: bool = False
    ) -> None:
        linear = InvariantLinear if deterministic else Linear
        self._ops = invariant_ops if deterministic else ops
        self.config = config
        self.layers = config.layer_specs()
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions
        self.dtype = dtype
        self.device = device
        self.embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.blocks = [_Layer(config, dtype, device, linear) for _ in config.windows]
        self.final_norm = torch.ones(config.hidden_size, dtype=dtype, device=device)
        self.head = (
            linear.tied(self.embedding)
            if config.tied
            else linear(config.hidden_size, config.vocab_size, False, dtype, device)
        )
        self._thin: list[ThinDecoder] = []
        self.inverse_frequencies = config.rope.inverse_frequencies(config.head_dim).to(device)
        self.weight_bytes = sum(tensor.nbytes for tensor in self._step_tensors())

    def _step_tensors(self) -> list[torch.Tensor]:
        """What a decode step reads in full: not the embedding, unless it is the output head too."""
        tensors = [self.final_norm, *self.head.tensors()]
        for block in self.blocks:
            tensors += block.norms
            for linear in block.linears:
                tensors += linear.tensors()
        return tensors

    def pack(self) -> None:
        """Bring the linear layers into the layout that is fastest on this device, and choose how steps run."""
        self.repack()
        if self._ops is ops:  # thin products sum in an order of their own
            self._thin = ThinDecoder.made_for(self)

    def repack(self) -> None:
        """Undo `unpack`: plain weights that a packed one can take the place of are let go."""
        for block in self.blocks:
            for linear in block.linears:
                linear.pack()
        self.head.pack()

    def norm_after(self, index: int) -> torch.Tensor:
        """The weight of the norm behind layer `index`: the next layer's first, or the last one."""
        return self.blocks[index + 1].attention_norm if index + 1 < len(self.blocks) else self.final_norm

    def unpack(self) -> None:
        """Bring all weights into the plain layout, to be read or written."""
        for block in self.blocks:
            for linear in block.linears:
                linear.unpack()
        if self.config.tied:
            self.head = type(self.head).tied(self.embedding)
        else:
            self.head.unpack()

    def tensors(self) -> list[torch.Tensor]:
        """All weights that are not packed."""
        return [self.embedding, *self._step_tensors()]

    def weight_shapes(self) -> dict[str, torch.Size]:
        return weights.weight_shapes(self)

    def spare_names(self, names: Iterable[str]) -> set[str]:
        return weights.spare_names(self, names)

    def copy_weights(self) -> dict[str, torch.Tensor]:
        return weights.copy_weights(self)

    def write_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        weights.write_weights(self, tensors)

    def free(self) -> None:
        empty = type(self)(self.config, self.dtype, torch.device("meta"))
        self.embedding, self.blocks = empty.embedding, empty.blocks
        self.final_norm, self.head, self._thin = empty.final_norm, empty.head, []

    def forward(self, step: StepInputs, attention: Attention) -> torch.Tensor:
        """Return logits [S, vocab_size] in `dtype`, at `step.sample_index` (every token if that is None).

        Nothing here waits for the device or has a shape that depends on data, so the pass can be captured.
        """
        for thin in self._thin:
            if thin.takes(step):
                return thin.forward(self, step, attention)
        ops, eps = self._ops, self.config.norm_eps
        normed, residual, cos, sin = self.embed(step)
        for index, block in enumerate(self.blocks):
            rotary = Rotary(cos, sin, block.q_norm, block.k_norm, eps)
            mixed = self._attend(index, normed, rotary, step, attention)
            if index == len(self.blocks) - 1 and step.sample_index is not None:
                # After the last attention tokens no longer meet, so only those that are sampled go on.
                mixed = mixed.index_select(0, step.sample_index)
                residual = residual.index_select(0, step.sample_index)
            residual = block.output.add_to(residual, mixed)
            normed = ops.rms_norm(residual, block.mlp_norm, eps)
            residual = block.down.add_to(residual, ops.silu_mul(block.gate_up(normed)))
            normed = ops.rms_norm(residual, self.norm_after(index), eps)
        return self.head(normed)

    def embed(self, step: StepInputs) -> Embedded:
        """Return what the first layer starts from."""
        return self._ops.embed(
            step.input_ids, step.positions, self.embedding, self.blocks[0].attention_norm, self.config.norm_eps,
            self.inverse_frequencies, self.config.rope.attention_factor,
        )  # fmt: skip

    def _attend(
        self,
        index: int,
        normed: torch.Tensor,
        rotary: Rotary,
        step: StepInputs,
        attention: Attention,
    ) -> torch.Tensor:
        """[T, hidden] -> what the heads of layer `index` saw, [T, heads * head_dim]."""
        block, config = self.blocks[index], self.config
        heads = block.qkv(normed).view(-1, config.heads + 2 * config.kv_heads, config.head_dim)
        q, k, v = heads.split((config.heads, config.kv_heads, config.kv_heads), dim=1)
        return attention.forward_rotary(index, q, k, v, rotary, step).flatten(1)
