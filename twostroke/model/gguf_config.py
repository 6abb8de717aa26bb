"""From a GGUF file's metadata to a model's config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import UnsupportedModel

Metadata = Mapping[str, Any]

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_KNOWN = (
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "tensor_data_layout",
    "vocab_size",
)


def need(metadata: Metadata, key: str) -> Any:
    """Return `metadata[key]`; UnsupportedModel names the key if it is missing."""
    if key not in metadata:
        raise UnsupportedModel(f"the GGUF file has no {key!r}")
    return metadata[key]


def model_config(metadata: Metadata, vocab_size: int, tied: bool, rope_factors: np.ndarray | None) -> dict[str, Any]:
    """Return the contents of config.json.

    Args:
        vocab_size: rows of the embedding.
        tied: the output projection is the embedding.
        rope_factors: [head_dim / 2], what each rotary frequency is divided by; None for 1.

    Raises:
        UnsupportedModel: the metadata asks for something that can't be expressed; the message names the key.
    """
    arch = need(metadata, "general.architecture")
    _check_keys(metadata, arch)
    values = {key: _uniform(metadata, f"{arch}.{key}") for key in _KNOWN}
    heads = values["attention.head_count"]
    head_dim = values.get("attention.key_length") or values["embedding_length"] // heads
    _check_head(arch, values, head_dim)
    return {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": vocab_size,
        "hidden_size": values["embedding_length"],
        "intermediate_size": values["feed_forward_length"],
        "num_hidden_layers": values["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": values["attention.head_count_kv"] or heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": values["context_length"],
        "rms_norm_eps": _shortest(values["attention.layer_norm_rms_epsilon"]),
        "rope_parameters": _rope_parameters(arch, values, head_dim, rope_factors),
        "tie_word_embeddings": tied,
        "dtype": "float32",
        **token_ids(metadata),
    }


def token_ids(metadata: Metadata) -> dict[str, int]:
    """Return the ids of the begin, end and padding token, those that the file states."""
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    keys = {name: f"tokenizer.ggml.{key}_token_id" for name, key in names.items()}
    return {name: metadata[key] for name, key in keys.items() if key in metadata}


def _check_keys(metadata: Metadata, arch: str) -> None:
    if arch not in ARCHITECTURES:
        raise UnsupportedModel(f"general.architecture={arch!r}: only {', '.join(ARCHITECTURES)} can be read from GGUF")
    prefix = f"{arch}."
    for key, value in metadata.items():
        if key.startswith(prefix) and key.removeprefix(prefix) not in _KNOWN and value:
            raise UnsupportedModel(f"{key}={value!r} is not implemented")
    for name in ("embedding_length", "feed_forward_length", "block_count", "context_length", "attention.head_count"):
        need(metadata, prefix + name)
    need(metadata, f"{prefix}attention.layer_norm_rms_epsilon")


def _uniform(metadata: Metadata, key: str) -> Any:
    """A value that the format allows to differ from layer to layer, but here must not."""
    value = metadata.get(key)
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise UnsupportedModel(f"{key} differs between layers")
    return value[0]


def _check_head(arch: str, values: Metadata, head_dim: int) -> None:
    for key in ("attention.value_length", "rope.dimension_count"):
        if values[key] not in (None, head_dim):
            raise UnsupportedModel(f"{arch}.{key}={values[key]} differs from the head dimension, {head_dim}")


def _shortest(value: float) -> float:
    """The decimal number that the file's 32-bit float came from."""
    return float(str(np.float32(value)))


def _rope_parameters(arch: str, values: Metadata, head_dim: int, factors: np.ndarray | None) -> dict[str, Any]:
    theta = _shortest(values["rope.freq_base"] or 10000.0)
    kind = values["rope.scaling.type"] or "none"
    if factors is not None:
        return {"rope_theta": theta, **_llama3_scaling(theta, head_dim, factors)}
    if kind == "none":
        return {"rope_theta": theta, "rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"{arch}.rope.scaling.type={kind!r} is not implemented")
    scaled: dict[str, Any] = {"rope_type": kind, "factor": _shortest(values["rope.scaling.factor"] or 1.0)}
    if kind == "yarn" and values["rope.scaling.original_context_length"]:
        scaled["original_max_position_embeddings"] = values["rope.scaling.original_context_length"]
    return {"rope_theta": theta, **scaled}


def _llama3_scaling(theta: float, head_dim: int, factors: np.ndarray) -> dict[str, Any]:
    """The parameters of Llama 3.1's rope scaling, of which a GGUF file keeps only the resulting factors.

    All published models use the same three numbers besides the factor; whether they fit is checked.
    """
    scaling = {
        "rope_type": "llama3",
        "factor": _shortest(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = llama3_factors(theta, head_dim, float(factors.max()))
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise UnsupportedModel("rope_freqs.weight holds other factors than Llama 3.1's rope scaling gives")
    return scaling


def llama3_factors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """Return [head_dim / 2] divisors of the rotary frequencies (Llama 3.1's published scaling).

    Wavelengths under 8192 / 4 stay, those over 8192 / 1 are stretched by `factor`, between them the frequency is
    interpolated.
    """
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((8192 / wavelengths - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)
