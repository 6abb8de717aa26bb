"""Models of transformers that paged attention would change are refused, by name."""

import pytest
import torch
from adapted import FAMILIES, GQA, adapted

from twostroke.errors import UnsupportedModel

UNSUPPORTED = {
    "mamba": (
        {"model_type": "mamba", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2},
        "linear_attention|2 of",
    ),
    "lfm2": (GQA | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, "conv"),
    "gemma2": (GQA | {"model_type": "gemma2", "head_dim": 8}, "softcap"),
    "gpt_oss": (GQA | {"model_type": "gpt_oss", "head_dim": 8, "num_local_experts": 2}, "s_aux"),
    "bloom": ({"model_type": "bloom", "vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "interface"),
    "t5": ({"model_type": "t5", "vocab_size": 97, "d_model": 32, "num_layers": 2, "num_heads": 4}, "encoder-decoder"),
    "vit": ({"model_type": "vit"}, "no causal language model"),
    "nonsense": ({"model_type": "nonsense"}, "does not know"),
    "llama": (
        GQA | {"model_type": "llama", "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "dynamic",
    ),
    "llama4_text": (
        GQA | {"model_type": "llama4_text", "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 32},
        "chunked_attention",
    ),
    "deepseek_v3": (
        GQA
        | {"model_type": "deepseek_v3", "n_routed_experts": 2, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1}
        | {"moe_intermediate_size": 16, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8}
        | {"qk_nope_head_dim": 8, "v_head_dim": 8},
        "value heads of size 8",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_paging_would_change_is_refused_by_name(name):
    config, reason = UNSUPPORTED[name]
    with pytest.raises(UnsupportedModel, match=reason) as refusal:
        adapted(config)
    assert name in str(refusal.value)


def test_gemma2_runs_when_its_attention_is_not_capped():
    extra = {"model_type": "gemma2", "head_dim": 8, "attn_logit_softcapping": None, "sliding_window": 18}
    assert [layer.window for layer in adapted(GQA | extra).layers] == [18, 0]


def test_a_model_that_mixes_tokens_in_a_way_nobody_knows_is_refused(monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaMLP

    own = LlamaMLP.forward

    def shifting(self, x):
        return own(self, x + x.roll(1, dims=1))

    monkeypatch.setattr(LlamaMLP, "forward", shifting)
    with pytest.raises(UnsupportedModel, match=r"llama: its logits change"):
        adapted(FAMILIES["llama"])


def test_a_model_that_ignores_position_ids_is_refused(monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    own = LlamaRotaryEmbedding.forward

    def counting(self, x, position_ids):
        return own(self, x, torch.arange(x.shape[1])[None])

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", counting)
    with pytest.raises(UnsupportedModel, match=r"llama: its logits change"):
        adapted(FAMILIES["llama"])
