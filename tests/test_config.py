"""Reading config.json: both forms, family by family, and what must be refused."""

from __future__ import annotations

import json

import pytest

from twostroke.errors import InvalidConfig, UnsupportedModel
from twostroke.model.config import DecoderConfig
from twostroke.model.presets import PRESETS
from twostroke.model.rope import RopeSettings

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
}
MISTRAL = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
QWEN2 = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}
QWEN3 = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2}


def read(config, **changes):
    return DecoderConfig.from_dict({**config, **changes})


def test_llama_defaults():
    config = read(LLAMA)
    assert (config.heads, config.kv_heads, config.head_dim) == (4, 4, 8)
    assert config.windows == (0, 0, 0, 0)
    assert (config.norm_eps, config.max_positions, config.tied, config.dtype) == (1e-6, 8192, False, None)
    assert not any((config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm))
    assert config.rope == RopeSettings("default", 10000.0)


def test_an_older_config_says_the_same_as_a_newer_one():
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
        "rope_type": "llama3",
    }
    older = read(LLAMA, rope_theta=500000.0, rope_scaling=scaling, torch_dtype="bfloat16")
    newer = read(LLAMA, rope_parameters={**scaling, "rope_theta": 500000.0}, dtype="bfloat16")
    assert older == newer
    assert newer.dtype == "bfloat16"


def test_families_differ_in_biases_and_norms():
    assert [read(config).qkv_bias for config in (LLAMA, MISTRAL, QWEN2, QWEN3)] == [False, False, True, False]
    assert [read(config).qk_norm for config in (LLAMA, MISTRAL, QWEN2, QWEN3)] == [False, False, False, True]
    both = read(LLAMA, attention_bias=True, mlp_bias=True)
    assert all((both.qkv_bias, both.output_bias, both.mlp_bias))
    assert not read(QWEN2).output_bias


def test_absent_fields_mean_what_they_mean_in_transformers():
    from transformers import AutoConfig

    for config in (LLAMA, MISTRAL, QWEN2, QWEN3):
        known = {name: value for name, value in config.items() if name != "num_key_value_heads"}
        known |= {"num_attention_heads": 32, "hidden_size": 256}
        theirs, ours = AutoConfig.for_model(**known), read(known)
        assert ours.kv_heads == theirs.num_key_value_heads
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or 256 // 32)
        assert ours.norm_eps == theirs.rms_norm_eps
        assert ours.tied == theirs.tie_word_embeddings
        assert ours.initializer_range == theirs.initializer_range
        window = getattr(theirs, "sliding_window", None) or 0
        assert ours.windows == (window,) * 4


def test_mistral_windows():
    assert read(MISTRAL, sliding_window=100).windows == (100,) * 4
    assert read(MISTRAL, sliding_window=None).windows == (0,) * 4
    # A window that no position outgrows is no window.
    assert read(MISTRAL, sliding_window=8192).windows == (0,) * 4


@pytest.mark.parametrize("config", [QWEN2, QWEN3])
def test_qwen_windows(config):
    assert read(config, sliding_window=100, use_sliding_window=False).windows == (0,) * 4
    assert read(config, sliding_window=100, use_sliding_window=True).windows == (0,) * 4  # from layer 28 on
    sliding = {"sliding_window": 100, "use_sliding_window": True}
    assert read(config, **sliding, max_window_layers=3).windows == (0, 0, 0, 100)
    assert read(config, **sliding, max_window_layers=0).windows == (100,) * 4
    kinds = ["sliding_attention", "full_attention"] * 2
    assert read(config, **sliding, layer_types=kinds, max_window_layers=1).windows == (100, 0, 100, 0)


def test_layers_of_equal_window_share_a_group():
    specs = read(
        QWEN2, sliding_window=100, use_sliding_window=True, layer_types=["full_attention", "sliding_attention"] * 2
    ).layer_specs()
    assert [(spec.window, spec.group) for spec in specs] == [(0, 0), (100, 1), (0, 0), (100, 1)]
    assert specs[0].scale == 8**-0.5


def test_yarn_widens_the_context():
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    assert read(QWEN2, rope_scaling=scaling).max_positions == 32768
    assert read(QWEN2, rope_scaling=scaling, max_position_embeddings=40000).max_positions == 40000


@pytest.mark.parametrize("config", [LLAMA, MISTRAL, QWEN2, QWEN3])
def test_a_full_dump_of_transformers_is_accepted(config):
    from transformers import AutoConfig

    for use_diff in (True, False):
        dumped = json.loads(AutoConfig.for_model(**config).to_json_string(use_diff=use_diff))
        assert DecoderConfig.from_dict(dumped) == read(config)


def test_bookkeeping_and_sampling_defaults_are_accepted():
    read(
        LLAMA,
        is_llama_config=True,
        rope_interleaved=False,
        use_mrope=False,
        **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
        temperature=0.6,
        pretraining_tp=1,
        quantization_config=None,
        is_causal=True,
    )


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (LLAMA, {"hidden_act": "gelu"}),
        (LLAMA, {"quantization_config": {"quant_method": "awq"}}),
        (LLAMA, {"final_logit_softcapping": 30.0}),
        (LLAMA, {"attn_logit_softcapping": 50.0}),
        (LLAMA, {"num_local_experts": 8}),
        (LLAMA, {"embedding_multiplier": 12.0}),
        (LLAMA, {"logit_scale": 0.0625}),
        (LLAMA, {"residual_multiplier": 0.22}),
        (LLAMA, {"partial_rotary_factor": 0.5}),
        (LLAMA, {"rope_interleaved": True}),
        (LLAMA, {"sliding_window": 128}),
        (LLAMA, {"is_causal": False}),
        (LLAMA, {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}}),
        (LLAMA, {"some_later_idea": 0}),
        (LLAMA, {"model_type": "mixtral"}),
        (LLAMA, {"model_type": None}),
        (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}),
        (MISTRAL, {"attention_bias": True}),
        (MISTRAL, {"layer_types": ["sliding_attention"] * 4}),
        (QWEN2, {"mlp_bias": True}),
        (QWEN2, {"layer_types": ["chunked_attention"] * 4}),
        (QWEN3, {"num_experts": 128}),
        (QWEN3, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    ],
    ids=str,
)
def test_what_is_not_implemented_is_refused_by_name(base, changes):
    with pytest.raises(UnsupportedModel, match="|".join([*changes, "rope_type"])):
        read(base, **changes)


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (LLAMA, {"hidden_size": None}),
        (LLAMA, {"vocab_size": -1}),
        (LLAMA, {"num_hidden_layers": "4"}),
        (LLAMA, {"num_key_value_heads": 3}),
        (LLAMA, {"head_dim": 7}),
        (LLAMA, {"rms_norm_eps": 0.0}),
        (LLAMA, {"tie_word_embeddings": 1}),
        (MISTRAL, {"sliding_window": 0}),
        (QWEN2, {"layer_types": ["full_attention"] * 3}),
        (QWEN2, {"layer_types": ["sliding_attention"] * 4}),
    ],
    ids=str,
)
def test_senseless_values_are_refused_by_name(base, changes):
    with pytest.raises(InvalidConfig, match="|".join(changes)):
        read(base, **changes)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_read_alike_by_transformers(name):
    from transformers import AutoConfig

    ours, theirs = DecoderConfig.from_dict(PRESETS[name]), AutoConfig.for_model(**PRESETS[name])
    assert (ours.heads, ours.kv_heads, ours.head_dim) == (
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
        theirs.head_dim,
    )
    assert (ours.tied, ours.vocab_size) == (theirs.tie_word_embeddings, theirs.vocab_size)


@pytest.mark.parametrize(
    ("name", "billions"), [("llama-3.1-8b", 8.03), ("llama-3.2-1b", 1.24), ("qwen3-8b", 8.19), ("qwen3-0.6b", 0.596)]
)
def test_presets_have_the_published_number_of_parameters(name, billions):
    config = DecoderConfig.from_dict(PRESETS[name])
    heads = (2 * config.heads + 2 * config.kv_heads) * config.head_dim
    layer = config.hidden_size * (heads + 3 * config.intermediate_size)
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tied else 2)
    assert len(config.windows) * layer + embeddings == pytest.approx(billions * 1e9, rel=4e-3)
