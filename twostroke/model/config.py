"""The native decoder's configuration, read from a Hugging Face config.json.

A field decides the mathematics, is known not to, or is refused: nothing is ignored in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..attention.groups import in_groups
from ..attention.interface import LayerSpec
from ..errors import InvalidConfig, UnsupportedModel, counted
from .rope import RopeSettings


@dataclass(frozen=True, slots=True)
class _Family:
    """What a model type implies, as transformers has it.

    Attributes:
        architecture: the only class whose weights are understood.
        fields: the fields read for this family, beyond `_COMMON_FIELDS`.
        defaults: what a field that the configuration does not have stands for.
        qkv_bias: whether q, k and v have a bias whatever the configuration says.
        qk_norm: whether each query and key head is normalised before the rotary embedding.
    """

    architecture: str
    fields: frozenset[str]
    defaults: dict[str, Any] = field(default_factory=dict)
    qkv_bias: bool = False
    qk_norm: bool = False


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WINDOW_FIELDS = _names("use_sliding_window sliding_window max_window_layers layer_types")
_WINDOW_DEFAULTS = {"sliding_window": 4096, "max_window_layers": 28}

_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", _names("attention_bias mlp_bias")),
    "mistral": _Family(
        "MistralForCausalLM", _names("sliding_window"), {"num_key_value_heads": 8, "sliding_window": 4096}
    ),
    "qwen2": _Family(
        "Qwen2ForCausalLM", _WINDOW_FIELDS, {"num_key_value_heads": 32, **_WINDOW_DEFAULTS}, qkv_bias=True
    ),
    "qwen3": _Family(
        "Qwen3ForCausalLM",
        _WINDOW_FIELDS | {"attention_bias"},
        {"num_key_value_heads": 32, "head_dim": 128, **_WINDOW_DEFAULTS},
        qk_norm=True,
    ),
}

_COMMON_FIELDS = _names(
    """
    model_type architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim hidden_act max_position_embeddings rms_norm_eps initializer_range tie_word_embeddings
    rope_theta rope_scaling rope_parameters partial_rotary_factor original_max_position_embeddings dtype torch_dtype
    """
)

_HARMLESS_FIELDS = _names(
    """
    _name_or_path _commit_hash name_or_path transformers_version tokenizer_class
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id forced_bos_token_id
    forced_eos_token_id use_cache cache_implementation attention_dropout hidden_dropout resid_pdrop attn_pdrop
    embd_pdrop pretraining_tp output_attentions output_hidden_states output_scores return_dict
    return_dict_in_generate id2label label2id num_labels problem_type finetuning_task task_specific_params
    chunk_size_feed_forward gradient_checkpointing attn_implementation _attn_implementation is_decoder is_llama_config
    transformers.js_config unsloth_version unsloth_fixed model_max_length max_sequence_length
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences suppress_tokens begin_suppress_tokens exponential_decay_length_penalty remove_invalid_values
    """
)
"""Bookkeeping, training, and sampling defaults (which an engine never takes from a model)."""

_NEUTRAL_VALUES: dict[str, Any] = {"is_causal": True, "causal": True, "use_rope": True, "logit_scale": 1.0}
"""Fields outside a family's own that leave the mathematics alone at this value, and change it at any other."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape and mathematics of a decoder of the Llama family.

    Attributes:
        model_type: `llama`, `mistral`, `qwen2` or `qwen3`.
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        intermediate_size: width within the feed-forward part.
        heads: query heads.
        kv_heads: key and value heads; divides `heads`.
        head_dim: size of a head; even.
        windows: one per layer: the last positions that a query sees; 0 sees all.
        max_positions: most positions that the model was made for.
        norm_eps: added to the mean square in RMS norms.
        rope: the rotary embedding.
        qkv_bias: bias on the query, key and value projections.
        output_bias: bias on the attention's output projection.
        mlp_bias: bias on the feed-forward projections.
        qk_norm: RMS norm of each query and key head before the rotary embedding.
        tied: the embedding is also the output head.
        initializer_range: standard deviation of random weights.
        dtype: the checkpoint's, by name; None if it does not say.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    max_positions: int
    norm_eps: float
    rope: RopeSettings
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    initializer_range: float
    dtype: str | None

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Read a config.json.

        Raises:
            UnsupportedModel: for what the native decoder does not implement; the message names the field.
            InvalidConfig: for a field that is missing or has a senseless value.
        """
        family = _family(config)
        _refuse_unimplemented(config, family)
        values = {**family.defaults, **config}
        heads, hidden_size = _size(values, "num_attention_heads"), _size(values, "hidden_size")
        kv_heads = _size(values, "num_key_value_heads", heads)
        head_dim = _size(values, "head_dim", hidden_size // heads)
        if heads % kv_heads:
            raise InvalidConfig(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
        if head_dim % 2:
            raise InvalidConfig(f"head_dim={head_dim} is odd")
        rope = RopeSettings.from_config(config)
        max_positions = _max_positions(values, rope)
        attention_bias = "attention_bias" in family.fields and _flag(values, "attention_bias")
        return cls(
            model_type=values["model_type"],
            vocab_size=_size(values, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_size(values, "intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            windows=_windows(values, max_positions),
            max_positions=max_positions,
            norm_eps=_positive(values, "rms_norm_eps", 1e-6),
            rope=rope,
            qkv_bias=family.qkv_bias or attention_bias,
            output_bias=attention_bias,
            mlp_bias="mlp_bias" in family.fields and _flag(values, "mlp_bias"),
            qk_norm=family.qk_norm,
            tied=_flag(values, "tie_word_embeddings"),
            initializer_range=_positive(values, "initializer_range", 0.02),
            dtype=dtype_name(config),
        )

    def layer_specs(self) -> list[LayerSpec]:
        """The attention of each layer."""
        shape = self.heads, self.kv_heads, self.head_dim, self.head_dim**-0.5
        return in_groups([LayerSpec(*shape, window) for window in self.windows])


def dtype_name(config: Mapping[str, Any]) -> str | None:
    """Name of the checkpoint's dtype, such as `bfloat16`; None if the configuration does not say."""
    name = config.get("dtype") or config.get("torch_dtype")
    return str(name).removeprefix("torch.") if name else None


def _family(config: Mapping[str, Any]) -> _Family:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise UnsupportedModel(f"the native decoder does not implement model_type={model_type!r} (it has {known})")
    family = _FAMILIES[model_type]
    architectures = config.get("architectures") or [family.architecture]
    # Early Llama checkpoints spell it LLaMAForCausalLM.
    if family.architecture.lower() not in [str(name).lower() for name in architectures]:
        raise UnsupportedModel(f"the native decoder does not implement architectures={architectures!r}")
    return family


def _refuse_unimplemented(config: Mapping[str, Any], family: _Family) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"the native decoder does not implement hidden_act={activation!r}")
    known = _COMMON_FIELDS | _HARMLESS_FIELDS | family.fields
    refused = {name: value for name, value in config.items() if name not in known and not _is_off(name, value)}
    if refused:
        fields = ", ".join(f"{name}={_shortened(value)}" for name, value in sorted(refused.items()))
        raise UnsupportedModel(
            f"the native decoder does not implement, for model_type={config['model_type']!r}: {fields}"
        )


def _is_off(name: str, value: object) -> bool:
    if name in _NEUTRAL_VALUES:
        return value is None or value == _NEUTRAL_VALUES[name]
    return value is None or value is False or value in ("", [], {})


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _max_positions(values: dict[str, Any], rope: RopeSettings) -> int:
    stated = _size(values, "max_position_embeddings")
    # YaRN is often switched on by adding rope_scaling alone, with max_position_embeddings left at the original.
    return max(stated, int(rope.original_positions * rope.factor)) if rope.rope_type == "yarn" else stated


def _windows(values: dict[str, Any], max_positions: int) -> tuple[int, ...]:
    layers = _size(values, "num_hidden_layers")
    if values["model_type"] == "mistral":
        kinds = ["sliding_attention"] * layers if values["sliding_window"] is not None else ["full_attention"] * layers
    elif values["model_type"] in ("qwen2", "qwen3"):
        kinds = _layer_types(values, layers)
    else:
        return (0,) * layers
    if "sliding_attention" not in kinds:
        return (0,) * layers
    window = _size(values, "sliding_window")
    window = window if window < max_positions else 0
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _layer_types(values: dict[str, Any], layers: int) -> list[str]:
    slides = bool(values.get("use_sliding_window")) and values["sliding_window"] is not None
    kinds = values.get("layer_types")
    if kinds is None:
        first = _size(values, "max_window_layers", least=0) if slides else layers
        return ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise UnsupportedModel(f"the native decoder does not implement layer_types with {sorted(unknown)}")
    if len(kinds) != layers:
        raise InvalidConfig(f"layer_types has {counted(len(kinds), 'entry', 'entries')}, num_hidden_layers={layers}")
    if "sliding_attention" in kinds and not slides:
        raise InvalidConfig(
            "layer_types has sliding_attention, but use_sliding_window and sliding_window do not allow it"
        )
    return kinds


def _size(values: dict[str, Any], name: str, default: int | None = None, least: int = 1) -> int:
    value = values.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidConfig(f"{name} must be an integer of at least {least}, got {value!r}")
    return value


def _positive(values: dict[str, Any], name: str, default: float) -> float:
    value = values.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise InvalidConfig(f"{name} must be a positive number, got {value!r}")
    return float(value)


def _flag(values: dict[str, Any], name: str) -> bool:
    value = values.get(name) or False
    if not isinstance(value, bool):
        raise InvalidConfig(f"{name} must be true or false, got {value!r}")
    return value
