"""What the tests of the transformers adapter share: tiny models of its families, and steps over a paged cache."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from twostroke.attention.interface import Attention
from twostroke.kernels.step import StepInputs
from twostroke.model.adapter import TransformersModel

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
