"""What a model costs, from its configuration alone."""

from __future__ import annotations

from ..bench.floor import Cost
from ..errors import InvalidConfig
from ..model.presets import PRESETS


def cost_of_preset(name: str, dtype_bytes: int = 2) -> Cost:
    """The cost of a preset, with weights and cache of so many bytes an element.

    Raises:
        InvalidConfig: there is no such preset.
    """
    if name not in PRESETS:
        raise InvalidConfig(f"model={name!r} must be one of the presets {', '.join(PRESETS)}")
    shape = PRESETS[name]
    layers, hidden, head_dim = shape["num_hidden_layers"], shape["hidden_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    attention = hidden * head_dim * (heads + 2 * kv_heads) + heads * head_dim * hidden
    head_norms = 2 * head_dim if shape["model_type"] == "qwen3" else 0
    layer = attention + 3 * hidden * shape["intermediate_size"] + 2 * hidden + head_norms
    elements = layers * layer + hidden + shape["vocab_size"] * hidden
    return Cost(
        weight_bytes=elements * dtype_bytes,
        kv_bytes=layers * 2 * kv_heads * head_dim * dtype_bytes,
        token_flop=2.0 * elements,
        attention_flop=4.0 * layers * heads * head_dim,
    )
