"""The native decoder against transformers, on small random models of every family it covers."""

from __future__ import annotations

import pytest
import torch

from twostroke.attention.interface import Attention
from twostroke.kernels.step import StepInputs
from twostroke.model.load import load_model

BLOCK = 4
BLOCKS_PER_ROW = 8
CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
MODELS = {
    "llama": {"model_type": "llama"},
    "llama3": {"model_type": "llama", "rope_parameters": LLAMA3},
    "llama-yarn": {"model_type": "llama", "rope_parameters": YARN},
    "llama-linear": {"model_type": "llama", "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-head-dim": {"model_type": "llama", "head_dim": 12},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral-window": {"model_type": "mistral", "sliding_window": 5},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3-window-bias": {
        "model_type": "qwen3",
        "head_dim": 8,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


class LoopAttention(Attention):
    """The interface read literally: one query after the other."""

    def forward(self, layer, q, k, v, step):
        spec = self.layers[layer]
        slots = step.cache_slots[spec.group]
        self.keys[layer][slots // self.block_size, :, slots % self.block_size] = k
        self.values[layer][slots // self.block_size, :, slots % self.block_size] = v
        rows = [int(row) for row in step.lane_rows]
        for chunk, row in enumerate(step.chunk_rows):
            rows += [int(row)] * int(step.chunk_offsets[chunk + 1] - step.chunk_offsets[chunk])
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for token, row in enumerate(rows):
            blocks = step.block_tables[spec.group, row].long()
            end = int(step.positions[token]) + 1
            seen = slice(max(0, end - spec.window) if spec.window else 0, end)
            out[token] = self._attend(layer, q[token], blocks, seen)
        return out

    def _attend(self, layer, query, blocks, seen):
        spec = self.layers[layer]
        groups = spec.heads // spec.kv_heads
        keys, values = (
            cache[layer][blocks].transpose(0, 1).flatten(1, 2)[:, seen].repeat_interleave(groups, dim=0).float()
            for cache in (self.keys, self.values)
        )
        weights = torch.einsum("hd,hpd->hp", query.float() * spec.scale, keys).softmax(dim=-1)
        return torch.einsum("hp,hpd->hd", weights, values)


def make_step(model, lanes, chunks, sample_index=None):
    """A step over `lanes` [(row, position, token)] and `chunks` [(row, first position, tokens)]."""
    groups = 1 + max(layer.group for layer in model.layers)
    rows = 4
    # The groups' tables differ, so that a layer that uses another group's is found out.
    tables = torch.arange(1, 1 + groups * rows * BLOCKS_PER_ROW, dtype=torch.int32)
    tables = tables.flip(0).view(groups, rows, BLOCKS_PER_ROW)
    places = [(row, position, token) for row, position, token in lanes]
    for row, first, tokens in chunks:
        places += [(row, first + offset, token) for offset, token in enumerate(tokens)]
    slots = [[int(table[row, p // BLOCK]) * BLOCK + p % BLOCK for row, p, _ in places] for table in tables]
    ends = torch.tensor([len(lanes)] + [len(tokens) for _, _, tokens in chunks]).cumsum(0)
    return StepInputs(
        input_ids=torch.tensor([token for _, _, token in places]),
        positions=torch.tensor([position for _, position, _ in places]),
        cache_slots=torch.tensor(slots),
        lane_rows=torch.tensor([row for row, _, _ in lanes], dtype=torch.int32),
        lane_lengths=torch.tensor([position + 1 for _, position, _ in lanes], dtype=torch.int32),
        chunk_rows=torch.tensor([row for row, _, _ in chunks], dtype=torch.int32),
        chunk_starts=torch.tensor([first for _, first, _ in chunks], dtype=torch.int32),
        chunk_offsets=ends.to(torch.int32),
        block_tables=tables,
        sample_index=None if sample_index is None else torch.tensor(sample_index),
        max_length=0,
        max_chunk=max([len(tokens) for _, _, tokens in chunks], default=0),
    )


def make_attention(model):
    groups = 1 + max(layer.group for layer in model.layers)
    return LoopAttention(model.layers, 1 + groups * 4 * BLOCKS_PER_ROW, BLOCK, model.dtype, CPU)


def save_random_model(settings, directory):
    """A transformers model with random weights, biases and norms included, saved to `directory`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**SMALL, **settings})).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    reference.save_pretrained(directory)
    return reference


def random_tokens(count, seed):
    return torch.randint(0, SMALL["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


@pytest.fixture(params=MODELS)
def pair(request, tmp_path):
    """(the native model, its transformers twin)"""
    with torch.inference_mode(False):
        reference = save_random_model(MODELS[request.param], tmp_path)
    return load_model(tmp_path, impl="native", device=CPU).model, reference


def test_logits_equal_transformers(pair):
    model, reference = pair
    tokens = random_tokens(20, seed=1)
    expected = reference(torch.tensor([tokens])).logits[0]
    assert expected.std() > 0.3  # else the tolerance says nothing

    whole = model.forward(make_step(model, [], [(0, 0, tokens)]), make_attention(model))
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)

    attention = make_attention(model)
    pieces = [
        model.forward(make_step(model, [], [(2, first, tokens[first:end])]), attention)
        for first, end in ((0, 7), (7, 8), (8, 15))
    ]
    pieces += [model.forward(make_step(model, [(2, p, tokens[p])], []), attention) for p in range(15, 20)]
    torch.testing.assert_close(torch.cat(pieces), expected, atol=1e-4, rtol=1e-4)


def test_rows_of_a_step_do_not_mix(tmp_path):
    with torch.inference_mode(False):
        reference = save_random_model(MODELS["qwen2-window"], tmp_path)
    model = load_model(tmp_path, impl="native", device=CPU).model
    first, second, third = (random_tokens(count, seed=count) for count in (12, 9, 10))
    attention = make_attention(model)
    model.forward(make_step(model, [], [(0, 0, first[:11]), (1, 0, second[:8])]), attention)
    mixed = make_step(model, [(1, 8, second[8]), (0, 11, first[11])], [(3, 0, third)], sample_index=[1, 0, 11, 4])
    logits = model.forward(mixed, attention)
    expected = [reference(torch.tensor([tokens])).logits[0] for tokens in (first, second, third)]
    expected = torch.stack([expected[0][11], expected[1][8], expected[2][9], expected[2][2]])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_groups_have_one_window_and_equally_many_layers(tmp_path):
    with torch.inference_mode(False):
        save_random_model(MODELS["qwen3-window-bias"], tmp_path)
    model = load_model(tmp_path, impl="native", device=CPU).model
    assert [(layer.window, layer.group) for layer in model.layers] == [(6, 0), (0, 1), (6, 2)]


def test_weight_bytes_count_each_matrix_once():
    shape = {"hidden": 64, "inner": 128, "vocabulary": 512, "layers": 2}
    layer = (4 + 2 + 2) * 16 * 64 + 64 * 64 + 3 * 64 * 128 + 2 * 64
    model = load_model("tiny", device=CPU).model
    assert model.weight_bytes == 4 * (shape["layers"] * layer + 64 + shape["vocabulary"] * shape["hidden"])


def test_weight_bytes_of_a_tied_model_count_the_embedding(tmp_path):
    with torch.inference_mode(False):
        reference = save_random_model(MODELS["llama-tied"], tmp_path)
    model = load_model(tmp_path, impl="native", device=CPU).model
    assert model.weight_bytes == sum(parameter.nbytes for parameter in reference.parameters())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_stay_near_float32(tmp_path, dtype):
    with torch.inference_mode(False):
        reference = save_random_model({**MODELS["qwen3"], "initializer_range": 0.1}, tmp_path)
    model = load_model(tmp_path, impl="native", device=CPU, dtype=dtype).model
    attention = make_attention(model)
    tokens = random_tokens(12, seed=3)
    logits = model.forward(make_step(model, [], [(0, 0, tokens)]), attention)
    expected = reference(torch.tensor([tokens])).logits[0]
    assert logits.dtype == model.dtype == getattr(torch, dtype)
    assert (logits.float() - expected).abs().max() < 0.08 * expected.abs().max()
