"""The probe: finds the attention of a transformers model's layers, and refuses a model that paging would change."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from ..attention.groups import in_groups
from ..attention.interface import Attention, LayerSpec
from ..errors import UnsupportedModel, counted
from ..kernels.step import StepInputs
from .hook import PROBE, AttentionCall, attending

HARMLESS_OPTIONS = frozenset(
    {
        "cache_position",
        "deterministic",
        "hidden_states",
        "output_attentions",
        "output_hidden_states",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Arguments of an attention call that do not change what attention computes."""

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

BATCH_ROPE_TYPES = ("dynamic", "longrope")
"""Their frequencies depend on the longest sequence of a batch, so a sequence would depend on its batch mates."""


class SegmentAttention(Attention):
    """Attention without the cache, over two sequences that alternate in one step: token i belongs to sequence i % 2.

    Whatever mixes tokens outside of attention mixes neighbours, here those of different sequences.
    """

    def __init__(self, layers: list[LayerSpec], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(layers, num_blocks=1, block_size=1, dtype=dtype, device=device)  # the dummy block alone

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: StepInputs) -> torch.Tensor:
        spec = self.layers[layer]
        distance = step.positions[:, None] - step.positions[None]
        sequence = torch.arange(len(step.positions), device=q.device) % 2
        mask = (sequence[:, None] == sequence[None]) & (distance >= 0)
        if spec.window:
            mask &= distance < spec.window
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.scale, enable_gqa=True)
        return out[0].transpose(0, 1).contiguous()


class Recorder:
    """A hook's handler that writes down the layers, in the order of their calls."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.dtype = dtype
        self.layers: list[LayerSpec] = []

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        self._check_shapes(call)
        self._check_options(call)
        _, heads, _, head_dim = call.query.shape
        scale = call.options.get("scaling") or head_dim**-0.5
        self.layers.append(LayerSpec(heads, call.key.shape[1], head_dim, float(scale), self._window(call)))
        return torch.zeros_like(call.query).transpose(1, 2).contiguous()

    def _check_shapes(self, call: AttentionCall) -> None:
        query, key, value = call.query, call.key, call.value
        if key.shape != value.shape or key.shape[-1] != query.shape[-1]:
            raise self._refusal(f"value heads of size {value.shape[-1]} beside key heads of size {key.shape[-1]}")
        if key.shape[2] != query.shape[2] or query.shape[1] % key.shape[1]:
            raise self._refusal(f"queries {list(query.shape)} on keys {list(key.shape)}")
        if {query.dtype, key.dtype, value.dtype} != {self.dtype}:
            raise self._refusal(f"attention in {query.dtype} in a model of {self.dtype}")

    def _check_options(self, call: AttentionCall) -> None:
        known = {"scaling", "dropout", "sliding_window", "is_causal"}
        for name, value in call.options.items():
            if name not in known | HARMLESS_OPTIONS and value is not None and value is not False:
                raise self._refusal(f"the attention argument {name!r}")
        if call.options.get("dropout"):
            raise self._refusal("dropout in attention")
        causal = call.options.get("is_causal")
        if not (getattr(call.module, "is_causal", True) if causal is None else causal):
            raise self._refusal("attention that is not causal")

    def _window(self, call: AttentionCall) -> int:
        """The mask decides, as in transformers' own eager attention; `sliding_window` only where there is no mask."""
        if call.mask is None:
            return int(call.options.get("sliding_window") or 0)
        window = int(call.mask.max())
        if call.mask.dtype != torch.int64 or window < 0 or int(call.mask.min()) != window:
            raise self._refusal("an attention mask that is neither causal nor a causal window")
        return window

    def _refusal(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.name}: {what} cannot run over paged attention")


def check_config(config: PretrainedConfig) -> None:
    """Raise UnsupportedModel for what a configuration says that paging cannot do."""
    text, name = config.get_text_config(), config.model_type
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{name}: encoder-decoder models are not supported")
    unknown = set(getattr(text, "layer_types", None) or ()) - LAYER_TYPES
    if unknown:
        raise UnsupportedModel(f"{name}: layers of type {', '.join(sorted(unknown))} cannot run over paged attention")
    if getattr(text, "alibi", False) or getattr(text, "position_embedding_type", None) == "alibi":
        raise UnsupportedModel(f"{name}: ALiBi position biases are not supported")
    for rope_type in _rope_types(getattr(text, "rope_parameters", None)):
        if rope_type in BATCH_ROPE_TYPES:
            raise UnsupportedModel(f"{name}: rope type {rope_type!r} depends on the longest sequence of a batch")


def _rope_types(parameters: Any) -> list[str]:
    """Rope parameters are one dictionary, or one for each type of layer."""
    if not isinstance(parameters, dict):
        return []
    nested = [rope_type for value in parameters.values() for rope_type in _rope_types(value)]
    return nested + ([parameters["rope_type"]] if "rope_type" in parameters else [])


@torch.no_grad()
def find_layers(model: PreTrainedModel) -> list[LayerSpec]:
    """Run the model on a few tokens and return the attention of its layers, in the order in which they are called.

    Raises:
        UnsupportedModel: a layer has no attention call, or attention asks for what paged attention does not do.
    """
    name = model.config.model_type
    recorder = Recorder(name, model.dtype)
    set_attention(model, PROBE)
    with attending(recorder):
        model(input_ids=torch.zeros(1, 4, dtype=torch.int64, device=model.device), use_cache=False)
    expected = model.config.get_text_config().num_hidden_layers
    if len(recorder.layers) < expected:
        raise UnsupportedModel(
            f"{name}: of {counted(expected, 'layer')} only {len(recorder.layers)} attend through transformers' "
            "attention interface (state-space, recurrent and ALiBi layers do not)"
        )
    return in_groups(recorder.layers)


def set_attention(model: PreTrainedModel, implementation: str) -> None:
    """Switch the attention of the whole model; raises UnsupportedModel if it cannot be switched."""
    model.set_attn_implementation(implementation)
    if model.config._attn_implementation != implementation:
        raise UnsupportedModel(f"{model.config.model_type}: its attention does not go through transformers' interface")


def probe_tokens(layers: list[LayerSpec], vocab_size: int, max_positions: int) -> torch.Tensor:
    """Return two random sequences, int64 [2, n], on the CPU, longer than the smallest window if that is small."""
    smallest = min((layer.window for layer in layers if layer.window), default=0)
    length = smallest + 8 if 16 < smallest < 128 else 24
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (2, min(length, max_positions)), generator=generator)


def interleave(tokens: torch.Tensor) -> StepInputs:
    """Return the step over [2, n] or [1, 1] tokens, for `SegmentAttention` only: it has no lanes, chunks or blocks."""
    none = torch.empty(0, dtype=torch.int32, device=tokens.device)
    positions = torch.arange(tokens.shape[1], device=tokens.device).repeat_interleave(tokens.shape[0])
    no_slots = torch.zeros(1, len(positions), dtype=torch.int64, device=tokens.device)
    ids = tokens.T.reshape(-1)
    return StepInputs(ids, positions, no_slots, none, none, none, none, none, none[None, None], None, 0, 0)


def check_logits(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare the logits of `interleave`'s step, [2 n, vocab], with those of eager attention, [2, n, vocab].

    Raises:
        UnsupportedModel: they differ.
    """
    if change := change_of(found, expected.transpose(0, 1).reshape(found.shape)):
        raise UnsupportedModel(
            f"{name}: its logits change by {change:.2g} (relative) over paged attention; "
            "something in the model mixes tokens, or depends on positions, in a way that is not known here"
        )


def change_of(found: torch.Tensor, expected: torch.Tensor) -> float | None:
    """Return how much logits [T, vocab] differ where that is more than rounding, else None.

    The error of a token is relative to the spread of its logits. In 16 bits the median is judged, since one expert
    chosen otherwise in a near-tie changes a whole token.
    """
    expected = expected.float()
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    errors = (found.float() - expected).norm(dim=-1) / spread
    error, tolerance = (errors.max(), 1e-3) if found.dtype == torch.float32 else (errors.median(), 0.1)
    return None if error <= tolerance else float(error)
