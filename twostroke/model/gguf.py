"""Reading GGUF files: once converted to an ordinary model directory, they load like any other."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from ..errors import UnsupportedModel
from .cache_folder import cached_place, make_once
from .gguf_config import Metadata, model_config, token_ids
from .gguf_tokenizer import write_tokenizer
from .safetensors_file import write_float32

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"


def convert_gguf(path: Path, target: Path | None = None) -> Path:
    """Convert a GGUF file into a model directory with float32 weights; return the directory.

    Args:
        path: a Llama-architecture file (`llama`, `qwen2`, `qwen3`) with a byte-level BPE vocabulary.
        target: the directory; by default one in the cache folder that belongs to this version of this file. A model
            directory that is there already is taken as it is.

    Raises:
        UnsupportedModel: not such a file; the message names what is not supported.
        OSError: a file can't be read or written.
    """
    return make_once(target or _place_of(path), functools.partial(_convert, path))


def _place_of(path: Path) -> Path:
    stat = path.stat()
    return cached_place(f"{path.stem}-{stat.st_size}-{stat.st_mtime_ns}")


def _convert(path: Path, folder: Path) -> None:
    reader = _open(path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    factors = tensors.pop(_ROPE_FACTORS, None)
    config = model_config(
        metadata,
        vocab_size=int(_find(tensors, "token_embd.weight").shape[-1]),
        tied="output.weight" not in tensors,
        rope_factors=_values(factors) if factors is not None else None,
    )
    shapes = {_new_name(name, config): tuple(map(int, tensor.shape[::-1])) for name, tensor in tensors.items()}
    write_tokenizer(metadata, folder)
    _write_json(folder / "generation_config.json", _generation_config(metadata))
    write_float32(folder / "model.safetensors", shapes, _converted(tensors, config))
    _write_json(folder / "config.json", config)


def _open(path: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError) as error:
        raise UnsupportedModel(f"{path} is not a GGUF file that can be read: {error}") from error


def _find(tensors: dict[str, Any], name: str) -> Any:
    if name not in tensors:
        raise UnsupportedModel(f"the GGUF file has no tensor {name!r} (is it one part of several?)")
    return tensors[name]


def _new_name(name: str, config: dict[str, Any]) -> str:
    """The tensor's name in a Hugging Face checkpoint."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match and match[2] in _LAYER_NAMES and (match[3] == "weight" or _has_bias(match[2], config)):
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    raise UnsupportedModel(f"tensor {name!r} is not implemented for the {config['model_type']} architecture")


def _has_bias(part: str, config: dict[str, Any]) -> bool:
    return config["model_type"] == "qwen2" and part in ("attn_q", "attn_k", "attn_v")


def _converted(tensors: dict[str, Any], config: dict[str, Any]) -> Iterator[np.ndarray]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, tensor in tensors.items():
        part = name.split(".")[-2]
        values = _values(tensor)
        yield _half_split(values, heads[part]) if config["model_type"] == "llama" and part in heads else values


def _values(tensor: Any) -> np.ndarray:
    """The tensor's values, float32."""
    try:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise UnsupportedModel(f"tensor {tensor.name!r}: {error}") from error
    return values.astype(np.float32, copy=False).reshape(tuple(tensor.shape[::-1]))


def _half_split(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder a projection's rows [heads * head_dim, hidden] from pairs of neighbours to pairs half a head apart.

    GGUF files of the llama architecture rotate dimensions 2i and 2i+1 together; Hugging Face's models rotate i and
    i + head_dim / 2.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _generation_config(metadata: Metadata) -> dict[str, Any]:
    """The special ids; a file that also names an end of turn has two ends."""
    ids: dict[str, Any] = dict(token_ids(metadata))
    turn = metadata.get("tokenizer.ggml.eot_token_id")
    if turn is not None and "eos_token_id" in ids and turn != ids["eos_token_id"]:
        ids["eos_token_id"] = [ids["eos_token_id"], turn]
    return ids


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
