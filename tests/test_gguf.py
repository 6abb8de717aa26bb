"""GGUF files written here, converted, and read back through transformers."""

import hashlib
import json
import os
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from twostroke.errors import UnsupportedModel
from twostroke.model.cache_folder import make_once
from twostroke.model.gguf import convert_gguf
from twostroke.model.gguf_config import llama3_factors
from twostroke.model.gguf_tokenizer import build_tokenizer
from twostroke.model.safetensors_file import write_float32
from twostroke.text.tokenizer import load_tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["Ġ Ġ", "h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "12 3", "Ì ģ", "e Ìģ"]
WORDS = [merge.replace(" ", "") for merge in MERGES]
TOKENS = ["<s>", "</s>", "<think>", *ALPHABET, *WORDS, "unreachable"]
SIZES = {
    "vocab_size": len(TOKENS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
LAYER_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def make_model(arch: str, **changes):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[arch](**{**SIZES, "tie_word_embeddings": False, **changes}))
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:  # made as ones and zeros, which would hide a mix-up
            torch.nn.init.normal_(parameter)
    return model.eval()


def gguf_name(name: str) -> str:
    top = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
    if name in top:
        return f"{top[name]}.weight"
    parts = name.split(".")
    return f"blk.{parts[2]}.{LAYER_PARTS[parts[-2]]}.{parts[-1]}"


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row 2i of a head is its row i, row 2i + 1 its row i + head_dim / 2."""
    out = np.empty_like(weight)
    size = weight.shape[0] // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = weight[head * size + i]
            out[head * size + 2 * i + 1] = weight[head * size + size // 2 + i]
    return out


def write_gguf(path: Path, arch: str = "llama", model=None, *, tensors=None, pre="smollm", kv=(), drop=()) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    add_sizes(writer, dict(kv), drop)
    add_vocabulary(writer, pre)
    weights = {gguf_name(name): value.numpy() for name, value in model.state_dict().items()} if model else {}
    weights.setdefault("token_embd.weight", np.zeros((len(TOKENS), 32), np.float32))
    for name, value in {**weights, **(tensors or {})}.items():
        heads = {"attn_q": 4, "attn_k": 2}.get(name.split(".")[-2])
        writer.add_tensor(name, interleave(value, heads) if heads and arch == "llama" else value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_sizes(writer: gguf.GGUFWriter, kv: dict, drop: tuple) -> None:
    values = {
        "block_count": 2,
        "context_length": 64,
        "embedding_length": 32,
        "feed_forward_length": 48,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 8,
        "rope.freq_base": 10000.0,
        "attention.layer_norm_rms_epsilon": 1e-6,
        **kv,
    }
    adders = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for key, value in values.items():
        if key not in drop:
            name = key if key.startswith("tokenizer.") else f"{writer.arch}.{key}"
            (writer.add_bool if isinstance(value, bool) else adders[type(value)])(name, value)


def add_vocabulary(writer: gguf.GGUFWriter, pre: str) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 4, *[1] * (len(TOKENS) - 3)])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ bos_token }}\r\n{{ messages[0].content }}")


def logits(model, ids=(5, 9, 200, 3, 17, 44)) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("arch", CONFIGS)
def test_the_model_computes_what_it_did(tmp_path: Path, arch: str, tied: bool) -> None:
    model = make_model(arch)
    path = write_gguf(tmp_path / "m.gguf", arch, model)
    if tied:
        model = make_model(arch, tie_word_embeddings=True)
        weights = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
        tensors = {gguf_name(name): value.numpy() for name, value in weights.items()}
        path = write_gguf(tmp_path / "t.gguf", arch, tensors=tensors)
    folder = convert_gguf(path, tmp_path / "out")
    read = AutoModelForCausalLM.from_pretrained(folder)
    assert read.config.tie_word_embeddings is tied
    assert (read.config.eos_token_id, read.config.bos_token_id) == (1, 0)
    assert read.config.rms_norm_eps == 1e-6
    assert all(torch.equal(value, read.state_dict()[name]) for name, value in model.state_dict().items())
    assert torch.equal(logits(read), logits(model))


def test_the_weights_begin_at_an_aligned_place(tmp_path: Path) -> None:
    """The format asks for it, so that mapped tensors are aligned."""
    for length in range(1, 10):
        write_float32(tmp_path / "w", {"n" * length: (2,)}, [np.ones(2, np.float32)])
        header = int.from_bytes((tmp_path / "w").read_bytes()[:8], "little")
        assert header % 8 == 0
        assert load_file(tmp_path / "w")["n" * length].tolist() == [1, 1]


@pytest.mark.parametrize("tensors", [[], [np.ones(3, np.float32)], [np.ones(2)], [np.ones(2, np.float32)] * 2])
def test_a_tensor_other_than_announced_is_an_error(tmp_path: Path, tensors: list[np.ndarray]) -> None:
    with pytest.raises(ValueError, match=r"shorter|longer|instead"):
        write_float32(tmp_path / "w", {"n": (2,)}, tensors)


def test_quantized_tensors_become_float32(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((len(TOKENS), 32)).astype(np.float32)
    writer_type = gguf.GGMLQuantizationType.Q8_0
    path = tmp_path / "q.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    add_sizes(writer, {}, ())
    add_vocabulary(writer, "smollm")
    writer.add_tensor("token_embd.weight", gguf.quants.quantize(values, writer_type), raw_dtype=writer_type)
    writer.add_tensor("output_norm.weight", values[0].astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = load_file(convert_gguf(path, tmp_path / "out") / "model.safetensors")
    assert read["model.embed_tokens.weight"].shape == values.shape
    assert np.abs(read["model.embed_tokens.weight"] - values).max() < 0.03
    assert np.array_equal(read["model.norm.weight"], values[0].astype(np.float16).astype(np.float32))


@pytest.mark.parametrize(
    ("kv", "expected"),
    [
        ({"rope.freq_base": 500000.0}, {"rope_type": "default", "rope_theta": 500000.0}),
        ({"rope.scaling.type": "none"}, {"rope_type": "default", "rope_theta": 10000.0}),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.original_context_length": 32},
            {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_the_rotary_settings(tmp_path: Path, kv: dict, expected: dict) -> None:
    folder = convert_gguf(write_gguf(tmp_path / "m.gguf", kv=kv), tmp_path / "out")
    assert json.loads((folder / "config.json").read_text())["rope_parameters"] == expected
    read = AutoConfig.from_pretrained(folder).rope_parameters
    assert {key: read[key] for key in expected} == expected


def test_llama3_scaling_is_recognized_by_its_factors(tmp_path: Path) -> None:
    factors = llama3_factors(500000.0, 8, 32.0).astype(np.float32)
    path = write_gguf(tmp_path / "m.gguf", tensors={"rope_freqs.weight": factors}, kv={"rope.freq_base": 500000.0})
    config = AutoConfig.from_pretrained(convert_gguf(path, tmp_path / "out"))
    assert (config.rope_parameters["rope_type"], config.rope_parameters["factor"]) == ("llama3", 32.0)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** (-torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(plain / frequencies, torch.from_numpy(factors))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"arch": "gemma2"}, "gemma2"),
        ({"kv": {"expert_count": 8}}, "llama.expert_count=8"),
        ({"kv": {"attention.sliding_window": 4096}}, "sliding_window"),
        ({"kv": {"rope.dimension_count": 4}}, "rope.dimension_count=4"),
        ({"kv": {"attention.value_length": 16}}, "attention.value_length=16"),
        ({"kv": {"rope.scaling.type": "longrope"}}, "longrope"),
        ({"kv": {"attention.head_count_kv": [2, 1]}}, "attention.head_count_kv differs"),
        ({"drop": ("context_length",)}, "llama.context_length"),
        ({"tensors": {"blk.0.attn_q.bias": np.ones((32, 1), np.float32)}}, "blk.0.attn_q.bias"),
        ({"tensors": {"blk.0.ffn_gate_inp.weight": np.ones((2, 32), np.float32)}}, "ffn_gate_inp"),
        ({"tensors": {"rope_freqs.weight": np.array([1, 2, 3, 9], np.float32)}}, "rope_freqs.weight"),
        ({"pre": "tekken"}, "tekken"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(tmp_path: Path, arguments: dict, named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        convert_gguf(write_gguf(tmp_path / "m.gguf", **arguments), tmp_path / "out")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m.gguf"]


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model='llama'"),
        ({"tokenizer.ggml.model": "gpt2"}, "tokenizer.ggml.pre"),
        ({}, "tokenizer.ggml.model"),
    ],
)
def test_other_vocabularies_are_refused_by_name(metadata: dict, named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        build_tokenizer(metadata)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all, but long enough to be read"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(UnsupportedModel, match=r"m\.gguf is not a GGUF file"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")


def test_a_missing_file_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        convert_gguf(tmp_path / "m.gguf")


def test_conversions_are_cached_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "m.gguf")
    first = convert_gguf(path)
    made = (first / "model.safetensors").stat().st_mtime_ns
    assert first.parent == tmp_path / "cache" / "twostroke" / "models"
    assert convert_gguf(path) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == made
    os.utime(path, (1, 1))
    assert convert_gguf(path) != first
    assert len(list(first.parent.iterdir())) == 2


def test_a_folder_is_made_once_by_two_at_once(tmp_path: Path) -> None:
    together, made, drafts = threading.Barrier(2), [], []

    def fill(folder: Path) -> None:
        together.wait(10)
        drafts.append(folder)
        (folder / "config.json").write_text(threading.current_thread().name)
        (folder / "weights").write_text(threading.current_thread().name)

    threads = [threading.Thread(target=lambda: made.append(make_once(tmp_path / "x" / "m", fill))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [tmp_path / "x" / "m"] * 2
    assert len(set(drafts)) == 2
    assert (made[0] / "config.json").read_text() == (made[0] / "weights").read_text()
    assert list((tmp_path / "x").iterdir()) == [tmp_path / "x" / "m"]


def test_a_half_made_folder_is_never_seen(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        assert not (tmp_path / "m").exists()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_once(tmp_path / "m", fail)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "mine").write_text("x")
    with pytest.raises(OSError, match="m"):
        make_once(tmp_path / "m", lambda folder: (folder / "config.json").write_text("{}"))
    assert [file.name for file in tmp_path.rglob("*")] == ["m", "mine"]


def tokenizer_of(tmp_path: Path, pre: str, **kv: object):
    return load_tokenizer(convert_gguf(write_gguf(tmp_path / f"{pre}.gguf", pre=pre, kv=kv), tmp_path / pre))


def spelled(tokenizer, text: str) -> list[str]:
    return [TOKENS[id_] for id_ in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["Ġhello", "Ġ", "Ġ", "123", "e", "Ìģ"]),
        ("smollm", ["Ġhello", "ĠĠ", "1", "2", "3", "e", "Ìģ"]),
        ("llama-bpe", ["<s>", "Ġhello", "Ġ", "Ġ", "123", "e", "Ìģ"]),
        ("qwen2", ["Ġhello", "Ġ", "Ġ", "1", "2", "3", "Ã", "©"]),
    ],
)
def test_each_vocabulary_splits_text_its_own_way(tmp_path: Path, pre: str, expected: list[str]) -> None:
    assert spelled(tokenizer_of(tmp_path, pre), " hello  123e\u0301") == expected


def test_words_without_merges_are_found_by_llama3_only(tmp_path: Path) -> None:
    assert spelled(tokenizer_of(tmp_path, "llama-bpe"), "unreachable") == ["<s>", "unreachable"]
    assert spelled(tokenizer_of(tmp_path, "qwen2"), "unreachable") == list("unreachable")


@pytest.mark.parametrize(
    ("begin", "end", "expected"), [(True, False, [0, 2]), (False, True, [2, 1]), (True, True, [0, 2, 1])]
)
def test_begin_and_end_tokens(tmp_path: Path, begin: bool, end: bool, expected: list[int]) -> None:
    flags = {"tokenizer.ggml.add_bos_token": begin, "tokenizer.ggml.add_eos_token": end}
    tokenizer = tokenizer_of(tmp_path, "llama-bpe", **flags)
    assert tokenizer.encode("<think>") == expected
    assert tokenizer.special_ids == {0, 1}
    assert AutoTokenizer.from_pretrained(tmp_path / "llama-bpe").encode("<think>") == expected


def test_the_chat_template_is_kept_to_the_byte(tmp_path: Path) -> None:
    tokenizer_of(tmp_path, "smollm")
    assert b"{{ bos_token }}\r\n{{" in (tmp_path / "smollm" / "chat_template.jinja").read_bytes()


def test_an_end_of_turn_is_an_end_too(tmp_path: Path) -> None:
    tokenizer_of(tmp_path, "smollm", **{"tokenizer.ggml.eot_token_id": 2})
    assert json.loads((tmp_path / "smollm" / "generation_config.json").read_text())["eos_token_id"] == [1, 2]


def test_a_conversion_is_the_same_every_time(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", make_model("llama"))
    folders = [convert_gguf(path, tmp_path / name) for name in "ab"]
    digests = [
        {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()} for folder in folders
    ]
    assert digests[0] == digests[1]
    assert set(digests[0]) == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
