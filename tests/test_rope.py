"""Inverse frequencies and attention factors against transformers, in both forms of the settings."""

from __future__ import annotations

import pytest
import torch

from twostroke.errors import InvalidConfig, UnsupportedModel
from twostroke.model.rope import RopeSettings

HEAD_DIM = 64
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
SETTINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3,
    "llama3-steep": {**LLAMA3, "factor": 32.0, "high_freq_factor": 16.0},
    "yarn": YARN,
    "yarn-fraction": {**YARN, "factor": 1.7, "truncate": False},
    "yarn-betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-given-factor": {**YARN, "attention_factor": 0.8},
    "yarn-mscale": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn-one": {**YARN, "factor": 1.0},
    "yarn-no-context": {"rope_type": "yarn", "factor": 2.0},
    "yarn-no-factor": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 4096},
}


def expected_of(settings, theta):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=16384,
        rope_parameters={**settings, "rope_theta": theta},
    )
    if settings["rope_type"] == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[settings["rope_type"]](config, torch.device("cpu"))


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("name", SETTINGS)
def test_frequencies_equal_transformers(name, theta):
    settings = SETTINGS[name]
    frequencies, factor = expected_of(settings, theta)
    renamed = {"type" if field == "rope_type" else field: value for field, value in settings.items()}
    for config in (
        {"rope_parameters": {**settings, "rope_theta": theta}},
        {"rope_theta": theta, "rope_scaling": renamed},
        {"rope_theta": theta, "rope_scaling": None if name == "default" else settings},
    ):
        rope = RopeSettings.from_config({"max_position_embeddings": 16384, **config})
        ours = rope.inverse_frequencies(HEAD_DIM)
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, frequencies, rtol=1e-6, atol=0)
        assert rope.attention_factor == pytest.approx(factor, rel=1e-9)


def test_context_outside_the_rope_settings_wins():
    config = {
        "max_position_embeddings": 16384,
        "original_max_position_embeddings": 2048,
        "rope_parameters": {**YARN, "rope_theta": 10000.0},
    }
    assert RopeSettings.from_config(config).original_positions == 2048


def test_theta_defaults_to_ten_thousand():
    assert RopeSettings.from_config({}) == RopeSettings("default", 10000.0)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "proportional", "mrope", 7])
def test_other_rope_types_are_refused_by_name(rope_type):
    with pytest.raises(UnsupportedModel, match=f"rope_type={rope_type!r}"):
        RopeSettings.from_config({"rope_scaling": {"rope_type": rope_type, "factor": 2.0}})


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "factor"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12]}}, "mrope_section"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
    ],
)
def test_rope_fields_that_are_not_implemented_are_refused_by_name(config, name):
    with pytest.raises(UnsupportedModel, match=name):
        RopeSettings.from_config(config)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": "10000"}, "rope_theta"),
        ({"rope_scaling": "yarn"}, "yarn"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {**LLAMA3, "factor": -1.0}}, "factor"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
    ],
)
def test_senseless_values_are_refused_by_name(config, name):
    with pytest.raises(InvalidConfig, match=name):
        RopeSettings.from_config({"max_position_embeddings": 64, **config})
