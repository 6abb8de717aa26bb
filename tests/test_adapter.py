"""Unmodified models of transformers over paged attention give the logits that transformers gives."""

import json
import logging

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from twostroke.attention.interface import Attention, LayerSpec
from twostroke.errors import UnsupportedModel
from twostroke.kernels.step import StepInputs
from twostroke.model.adapter import StepAttention, TransformersModel
from twostroke.model.hook import IMPLEMENTATION, NO_WINDOW_PATTERN, _window_of

BLOCK = 4
BLOCKS_PER_ROW = 16
ROWS = 2

SMALL = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GQA = SMALL | {"num_key_value_heads": 2, "max_position_embeddings": 64}

FAMILIES = {
    "llama": GQA | {"model_type": "llama", "initializer_range": 0.2},
    # learned positions, a scale that differs by layer
    "gpt2": {"model_type": "gpt2", "vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    | {"scale_attn_by_inverse_layer_idx": True, "initializer_range": 0.2},
    # learned positions with an offset, scaled queries
    "opt": {"model_type": "opt", "vocab_size": 97, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "max_position_embeddings": 64, "word_embed_proj_dim": 24, "init_std": 0.2},
    # parallel attention, partial rotation, merged QKV
    "gpt_neox": SMALL
    | {"model_type": "gpt_neox", "max_position_embeddings": 64, "rotary_pct": 0.5, "initializer_range": 0.2},
    # parallel attention, normed queries and keys, interleaved rotation
    "cohere": GQA | {"model_type": "cohere", "logit_scale": 0.25, "use_qk_norm": True, "initializer_range": 0.2},
    # heads that do not make up the hidden size
    "gemma": GQA | {"model_type": "gemma", "head_dim": 24, "initializer_range": 0.2},
    # scaling factors everywhere
    "granite": GQA
    | {"model_type": "granite", "attention_multiplier": 0.7, "logits_scaling": 2.0, "initializer_range": 0.2},
    # does not announce the attention interface, and uses it
    "stablelm": GQA | {"model_type": "stablelm", "initializer_range": 0.2},
    # a window in each layer
    "mistral": GQA | {"model_type": "mistral", "sliding_window": 5, "initializer_range": 0.2},
    # a window in some layers, with a rotation of their own
    "gemma3_text": GQA
    | {"model_type": "gemma3_text", "head_dim": 12, "sliding_window": 6, "query_pre_attn_scalar": 17}
    | {"layer_types": ["sliding_attention", "full_attention"], "initializer_range": 0.2},
}

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


class LoopAttention(Attention):
    """Paged attention one token at a time, straight from the words of the interface."""

    def forward(self, layer, q, k, v, step):
        spec = self.layers[layer]
        slots = step.cache_slots[spec.group]
        self.keys[layer][slots // BLOCK, :, slots % BLOCK] = k
        self.values[layer][slots // BLOCK, :, slots % BLOCK] = v
        rows = step.lane_rows.tolist()
        for row, tokens in zip(step.chunk_rows.tolist(), step.chunk_offsets.diff().tolist(), strict=True):
            rows += [row] * tokens
        tables = step.block_tables[spec.group].long()
        return torch.stack(
            [self._attend(layer, q[i], tables[row], int(step.positions[i])) for i, row in enumerate(rows)]
        )

    def _attend(self, layer, q, table, position):
        spec = self.layers[layer]
        first = max(0, position - spec.window + 1) if spec.window else 0
        k, v = (
            cache[layer][table].transpose(0, 1).flatten(1, 2)[:, first : position + 1]
            for cache in (self.keys, self.values)
        )
        q = q.reshape(spec.kv_heads, -1, spec.head_dim)
        return ((q @ k.transpose(1, 2) * spec.scale).softmax(-1) @ v).reshape(spec.heads, spec.head_dim)


class Batch:
    """Two rows of blocks that lie mixed in the cache, and the steps that run over them."""

    def __init__(self, model: TransformersModel) -> None:
        self.model = model
        groups = 1 + max(layer.group for layer in model.layers)
        count = groups * ROWS * BLOCKS_PER_ROW
        self.attention = LoopAttention(model.layers, 1 + count, BLOCK, model.dtype, model.device)
        blocks = 1 + torch.randperm(count, generator=torch.Generator().manual_seed(1))
        dummy = torch.zeros(groups, 1, BLOCKS_PER_ROW)
        self.tables = torch.cat([blocks.reshape(groups, ROWS, -1), dummy], 1).to(torch.int32)

    def step(self, lanes=(), chunks=(), sample_index=None) -> torch.Tensor:
        """Run one step; `lanes` are (row, position, token), `chunks` are (row, position, tokens)."""
        pieces = [(row, start, [token]) for row, start, token in lanes] + list(chunks)
        tokens = torch.tensor([token for _, _, ids in pieces for token in ids])
        positions = torch.cat([torch.arange(start, start + len(ids)) for _, start, ids in pieces])
        rows = torch.cat([torch.full((len(ids),), row) for row, _, ids in pieces])
        slots = self.tables[:, rows, positions // BLOCK].long() * BLOCK + positions % BLOCK

        def ints(values):
            return torch.tensor(values, dtype=torch.int32)

        lengths = [len(ids) for _, _, ids in chunks]
        step = StepInputs(
            tokens,
            positions,
            slots,
            lane_rows=ints([row for row, _, _ in lanes]),
            lane_lengths=ints([start + 1 for _, start, _ in lanes]),
            chunk_rows=ints([row for row, _, _ in chunks]),
            chunk_starts=ints([start for _, start, _ in chunks]),
            chunk_offsets=ints([len(lanes) + sum(lengths[:i]) for i in range(len(lengths) + 1)]),
            block_tables=self.tables,
            sample_index=sample_index,
            max_length=max((start + 1 for _, start, _ in lanes), default=0),
            max_chunk=max(lengths, default=0),
        )
        return self.model.forward(step, self.attention)


def adapted(config: dict, dtype=torch.float32) -> TransformersModel:
    return TransformersModel.from_config(dict(config), device="cpu", dtype=dtype, seed=3)


def plain(config: dict) -> torch.nn.Module:
    """The same weights, made and run by transformers alone."""
    parsed = AutoConfig.for_model(**config)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(parsed, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def sequences() -> list[list[int]]:
    return torch.randint(97, (2, 21), generator=torch.Generator().manual_seed(2)).tolist()


def plain_logits(config: dict) -> torch.Tensor:
    with torch.no_grad():
        return plain(config)(input_ids=torch.tensor(sequences()), use_cache=False).logits


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_chunks_and_decode_steps_give_the_logits_of_transformers(family):
    config = FAMILIES[family]
    a, b = sequences()
    expected = plain_logits(config)
    batch = Batch(adapted(config))

    close(batch.step(chunks=[(0, 0, a)]), expected[0])

    batch = Batch(batch.model)
    batch.step(chunks=[(1, 0, b[:9]), (0, 0, a[:6])])
    found = batch.step(lanes=[(1, 9, b[9])], chunks=[(0, 6, a[6:15])])
    close(found, torch.cat([expected[1, 9:10], expected[0, 6:15]]))
    for i in range(5):
        found = batch.step(lanes=[(0, 15 + i, a[15 + i]), (1, 10 + i, b[10 + i])])
        close(found, torch.stack([expected[0, 15 + i], expected[1, 10 + i]]))


def test_sample_index_picks_the_tokens_in_its_order():
    model = adapted(FAMILIES["gpt2"])
    a, b = sequences()
    chunks = [(0, 0, a), (1, 0, b)]
    every = Batch(model).step(chunks=chunks)
    index = torch.tensor([41, 3, 20])
    close(Batch(model).step(chunks=chunks, sample_index=index), every[index])


@pytest.mark.parametrize(
    ("family", "extra", "windows"),
    [
        ("mistral", {"sliding_window": 5}, [5, 5]),
        ("mistral", {"sliding_window": None}, [0, 0]),
        ("mistral", {"sliding_window": 40, "max_position_embeddings": 32}, [0, 0]),
        ("mistral", {"sliding_window": 4096, "max_position_embeddings": 32768}, [4096, 4096]),
        ("gemma3_text", {}, [6, 0]),
        (
            "llama",
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
            [0, 9],
        ),
        ("llama", {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 9}, [0, 0]),
        ("llama", {"model_type": "phi3", "sliding_window": 17, "pad_token_id": 0}, [17, 17]),
        ("llama", {"model_type": "cohere2", "sliding_window": 7}, [7, 7]),
    ],
)
def test_windows_are_those_of_the_masks_that_transformers_makes(family, extra, windows):
    assert [layer.window for layer in adapted(FAMILIES[family] | extra).layers] == windows


def test_a_mask_that_is_no_causal_window_is_seen_though_it_looks_like_one_at_the_end():
    cpu = torch.device("cpu")

    def chunked(_b, _h, q, k):
        return (k <= q) & (k // 8 == q // 8)

    assert _window_of(chunked, 64, cpu) == NO_WINDOW_PATTERN
    assert _window_of(lambda _b, _h, q, k: k < 1000, 64, cpu) == NO_WINDOW_PATTERN
    assert _window_of(lambda _b, _h, q, k: (k <= q) & (k > q - 8), 64, cpu) == 8
    assert _window_of(lambda _b, _h, q, k: k <= q, 64, cpu) == 0


def test_layers_tell_heads_sizes_and_scale():
    assert adapted(FAMILIES["granite"]).layers == [LayerSpec(4, 2, 8, 0.7)] * 2
    gpt2 = adapted(FAMILIES["gpt2"]).layers
    assert [layer.scale for layer in gpt2] == pytest.approx([8**-0.5, 8**-0.5 / 2])


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


def test_two_models_in_one_process_keep_apart():
    a, _ = sequences()
    batches = {family: Batch(adapted(FAMILIES[family])) for family in ("llama", "mistral")}
    for batch in batches.values():
        batch.step(chunks=[(0, 0, a[:10])])
    for family, batch in batches.items():
        expected = plain_logits(FAMILIES[family])
        close(batch.step(lanes=[(0, 10, a[10])]), expected[:1, 10])


class EchoAttention(Attention):
    def forward(self, layer, q, k, v, step):
        return q.contiguous()


class NoHostRead(TorchDispatchMode):
    """Fails on operators that would make the CPU wait for a GPU: reading a number, or a shape that data decides."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in {"_local_scalar_dense", "nonzero", "masked_select", "unique", "equal"}, name
        indices = args[1] if name == "index" else ()
        assert all(index is None or index.dtype != torch.bool for index in indices), "index with a mask"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_reads_nothing_back_from_the_device(family):
    batch = Batch(adapted(FAMILIES[family]))
    batch.attention = EchoAttention(batch.model.layers, 1, BLOCK, torch.float32, torch.device("cpu"))
    seen = []
    own = batch.model.forward

    def forward(step, attention):
        with NoHostRead():
            seen.append(own(step, attention))

    batch.model.forward = forward
    batch.step(chunks=[(0, 0, [1, 2, 3])], sample_index=torch.tensor([2]))
    assert seen[0].shape == (1, 97)


def test_running_builds_no_mask(monkeypatch):
    batch = Batch(adapted(FAMILIES["mistral"]))
    seen = []
    own = StepAttention.__call__

    def attend(self, call):
        seen.append(call.mask)
        return own(self, call)

    monkeypatch.setattr(StepAttention, "__call__", attend)
    batch.step(chunks=[(0, 0, [1, 2, 3])])
    assert seen == [None, None]


def test_a_model_outside_of_its_engine_is_an_error():
    model = adapted(FAMILIES["llama"])
    with pytest.raises(RuntimeError, match="outside of its engine"):
        model._model(input_ids=torch.zeros(1, 4, dtype=torch.int64))


def test_what_the_engine_asks_of_a_model():
    model = adapted(FAMILIES["llama"] | {"tie_word_embeddings": False}, torch.bfloat16)
    tied = adapted(FAMILIES["llama"] | {"tie_word_embeddings": True}, torch.bfloat16)
    layer = 32 * 32 * 2 + 16 * 32 * 2 + 3 * 32 * 48 + 2 * 32
    assert model.weight_bytes == tied.weight_bytes == 2 * (2 * layer + 32 + 97 * 32)
    assert (model.vocab_size, model.max_positions) == (97, 64)
    assert (model.dtype, model.device) == (torch.bfloat16, torch.device("cpu"))
    assert Batch(model).step(chunks=[(0, 0, [5, 6])]).dtype == torch.bfloat16
    assert adapted(FAMILIES["gpt2"]).max_positions == 64


def test_weights_are_a_function_of_the_seed_alone():
    config = FAMILIES["llama"]
    state = torch.random.get_rng_state()
    first, again = adapted(config), adapted(config)
    other = TransformersModel.from_config(config, device="cpu", dtype=torch.float32, seed=4)
    assert torch.equal(torch.random.get_rng_state(), state)
    weights = [model._model.get_input_embeddings().weight for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.fixture
def directory(tmp_path):
    plain(FAMILIES["gpt_neox"]).save_pretrained(tmp_path)
    return tmp_path


def test_a_directory_gives_the_saved_weights(directory):
    a, _ = sequences()
    model = TransformersModel.from_directory(directory, device="cpu", dtype=torch.float32)
    close(Batch(model).step(chunks=[(0, 0, a)]), plain_logits(FAMILIES["gpt_neox"])[0])


def test_a_directory_that_lacks_weights_is_refused(directory):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(UnsupportedModel, match=r"gpt_neox: the files lack \d+ weights"):
        TransformersModel.from_directory(directory, device="cpu", dtype=torch.float32)


def test_code_beside_the_weights_is_never_run(directory):
    ran = directory / "ran"
    (directory / "custom.py").write_text(f"open({str(ran)!r}, 'w')\n")
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_type": "nonsense", "auto_map": {"AutoConfig": "custom.C", "AutoModelForCausalLM": "custom.M"}}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel):
        TransformersModel.from_directory(directory, device="cpu", dtype=torch.float32)
    assert not ran.exists()


def test_the_log_stays_clean_and_the_settings_of_transformers_stay_as_they_were(directory, capfd):
    before = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.WARNING)
    model = TransformersModel.from_directory(directory, device="cpu", dtype=torch.float32)
    for _ in range(2):
        Batch(model).step(chunks=[(0, 0, [1, 2, 3])])
    assert capfd.readouterr() == ("", "")
    assert transformers_logging.get_verbosity() == logging.WARNING
    assert transformers_logging.is_progress_bar_enabled() == before[1]
    transformers_logging.set_verbosity(before[0])
    assert model._model.config._attn_implementation == IMPLEMENTATION
