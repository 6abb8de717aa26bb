"""Loading: names, files, dtypes, EOS ids, and the errors for what does not fit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from twostroke.errors import InvalidConfig, UnsupportedModel
from twostroke.model import load
from twostroke.model.decoder import Decoder
from twostroke.model.load import load_model
from twostroke.model.presets import PRESETS
from twostroke.model.weights import randomize

CPU = torch.device("cpu")
SMALL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "eos_token_id": 2,
}


def random_tensors(tied=False):
    """A checkpoint of `SMALL` under its Hugging Face names."""
    shapes = {"model.embed_tokens.weight": (40, 16), "model.norm.weight": (16,)}
    if not tied:
        shapes["lm_head.weight"] = (40, 16)
    for layer in ("model.layers.0", "model.layers.1"):
        shapes |= {
            f"{layer}.input_layernorm.weight": (16,),
            f"{layer}.post_attention_layernorm.weight": (16,),
            f"{layer}.self_attn.q_proj.weight": (16, 16),
            f"{layer}.self_attn.k_proj.weight": (8, 16),
            f"{layer}.self_attn.v_proj.weight": (8, 16),
            f"{layer}.self_attn.o_proj.weight": (16, 16),
            f"{layer}.mlp.gate_proj.weight": (24, 16),
            f"{layer}.mlp.up_proj.weight": (24, 16),
            f"{layer}.mlp.down_proj.weight": (16, 24),
        }
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write_model(directory, tensors=None, **changes):
    (directory / "config.json").write_text(json.dumps({**SMALL, **changes}))
    save_file(random_tensors() if tensors is None else tensors, directory / "model.safetensors")
    return directory


@pytest.fixture
def unpacked(monkeypatch):
    """Leaves the plain weights in place, to be looked at."""
    monkeypatch.setattr(Decoder, "pack", lambda decoder: None)


@pytest.fixture
def directory(tmp_path):
    return write_model(tmp_path)


def test_tensors_land_in_their_part_of_the_merged_matrices(directory, unpacked):
    tensors = load_file(directory / "model.safetensors")
    loaded = load_model(directory, device=CPU)
    assert (loaded.impl, loaded.directory, loaded.name) == ("native", directory, str(directory))
    model = loaded.model
    for index, block in enumerate(model.blocks):
        at = f"model.layers.{index}"
        qkv = torch.cat([tensors[f"{at}.self_attn.{part}_proj.weight"] for part in "qkv"])
        gate_up = torch.cat([tensors[f"{at}.mlp.{part}_proj.weight"] for part in ("gate", "up")])
        assert torch.equal(block.qkv.weight, qkv)
        assert torch.equal(block.gate_up.weight, gate_up)
        assert torch.equal(block.down.weight, tensors[f"{at}.mlp.down_proj.weight"])
    assert torch.equal(model.head.weight, tensors["lm_head.weight"])
    assert torch.equal(model.embedding, tensors["model.embed_tokens.weight"])


def test_a_sharded_checkpoint_equals_a_single_file(directory, tmp_path_factory, unpacked):
    tensors = random_tensors()
    sharded = tmp_path_factory.mktemp("sharded")
    (sharded / "config.json").write_text(json.dumps(SMALL))
    names = sorted(tensors)
    weight_map = {}
    for shard, part in enumerate((names[:9], names[9:])):
        file = f"model-{shard + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, sharded / file)
        weight_map |= dict.fromkeys(part, file)
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    one, two = load_model(directory, device=CPU).model, load_model(sharded, device=CPU).model
    assert torch.equal(one.embedding, two.embedding)
    assert torch.equal(one.blocks[1].gate_up.weight, two.blocks[1].gate_up.weight)

    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InvalidConfig, match="model-00002-of-00002"):
        load_model(sharded, device=CPU)


def test_a_tied_head_is_the_embedding(tmp_path, unpacked):
    model = load_model(write_model(tmp_path, random_tensors(tied=True), tie_word_embeddings=True), device=CPU).model
    assert model.head.weight is model.embedding


def test_known_harmless_tensors_are_passed_over(tmp_path):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "lm_head.weight": torch.ones(40, 16)}
    load_model(write_model(tmp_path, {**random_tensors(), **extra}, tie_word_embeddings=True), device=CPU)


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path):
    tensors = random_tensors()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(16)
    with pytest.raises(
        InvalidConfig, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight; unexpected: .*q_proj\.bias"
    ):
        load_model(write_model(tmp_path, tensors), device=CPU)
    tensors = {**random_tensors(), "model.norm.weight": torch.ones(17)}
    with pytest.raises(InvalidConfig, match=r"model\.norm\.weight has shape \[17\].*\[16\]"):
        load_model(write_model(tmp_path, tensors), device=CPU)
    tensors = {**random_tensors(), "lm_head.weight": torch.ones(40, 16, dtype=torch.int8)}
    with pytest.raises(InvalidConfig, match=r"lm_head\.weight has dtype torch.int8"):
        load_model(write_model(tmp_path, tensors), device=CPU)


def test_unreadable_files_are_named(tmp_path):
    write_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(InvalidConfig, match=r"model\.safetensors"):
        load_model(tmp_path, device=CPU)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InvalidConfig, match=r"model\.safetensors"):
        load_model(tmp_path, device=CPU)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidConfig, match=r"config\.json"):
        load_model(tmp_path, device=CPU)


def cut_weights(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def misshape_weights(directory):
    write_model(directory, {**random_tensors(), "model.norm.weight": torch.ones(17)})


def name_no_file(directory):
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text('{"metadata": {}, "weight_map": {"lm_head.weight": 5}}')


DAMAGE = {
    "no weights": lambda directory: (directory / "model.safetensors").unlink(),
    "weights cut short": cut_weights,
    "weights of another shape": misshape_weights,
    "an index that names no file": name_no_file,
    "a number for a list": lambda directory: write_model(directory, model_type="qwen2", layer_types=5),
    "a text for a number": lambda directory: write_model(directory, rms_norm_eps="x"),
    "a size below zero": lambda directory: write_model(directory, hidden_size=-4),
    "more than any memory": lambda directory: write_model(directory, vocab_size=10**13),
    "brackets without end": lambda directory: (directory / "config.json").write_text("[" * 100_000),
}


def test_of_a_file_its_folder_is_told(directory):
    with pytest.raises(InvalidConfig, match=r"^model='.*model\.safetensors' is a file, .* its folder, ") as caught:
        load_model(directory / "model.safetensors", device=torch.device("cpu"))
    assert str(caught.value).endswith(f"the model is its folder, {str(directory)!r}")
    (directory / "config.json").unlink()
    with pytest.raises(InvalidConfig, match=r"a model is a folder with config\.json$"):
        load_model(directory / "model.safetensors", device=torch.device("cpu"))


@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_refused_whoever_reads_them(directory, impl, damage):
    """One kind of error with the model's name, not whatever a library raised."""
    DAMAGE[damage](directory)
    with pytest.raises(
        (InvalidConfig, UnsupportedModel), match=re.escape(str(directory)) + "|must be|impl|qwen2|llama"
    ):
        load_model(directory, impl=impl, device=CPU)


@pytest.mark.parametrize("name", ["~nobody-of-this-name/model", "x" * 300, "a\0b.gguf"])
def test_names_that_no_file_can_have_are_refused(name, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("no hub id"))
    with pytest.raises(InvalidConfig, match="model="):
        load_model(name, device=CPU)


def test_a_damaged_gguf_file_is_refused(tmp_path):
    """A bad byte in a value, for which the library that reads it raises an error of its own."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("token_embd.weight", torch.zeros(4, 32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    whole = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(whole.replace(b"llama", b"\xff" * 5))
    with pytest.raises(InvalidConfig, match=r"m\.gguf"):
        load_model(tmp_path / "m.gguf", device=CPU)


def test_bad_arguments_are_named(directory, tmp_path):
    with pytest.raises(InvalidConfig, match="impl='vllm'"):
        load_model(directory, impl="vllm", device=CPU)
    for dtype in ("int8", "float64", torch.float64):
        with pytest.raises(InvalidConfig, match=f"dtype={dtype!r}"):
            load_model(directory, dtype=dtype, device=CPU)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InvalidConfig, match=r"empty.*no config\.json"):
        load_model(empty, device=CPU)
    for absent in (tmp_path / "absent", str(tmp_path / "absent"), "./absent", tmp_path / "absent.gguf"):
        with pytest.raises(InvalidConfig, match="absent"):
            load_model(absent, device=CPU)


def test_native_refuses_with_the_reason_and_auto_takes_the_other_kind(tmp_path, monkeypatch):
    write_model(tmp_path, final_logit_softcapping=30.0)
    with pytest.raises(UnsupportedModel, match="final_logit_softcapping"):
        load_model(tmp_path, impl="native", device=CPU)
    asked = []
    monkeypatch.setattr(load, "_load_transformers", lambda *arguments: asked.append(arguments))
    assert load_model(tmp_path, device=CPU).impl == "transformers"
    write_model(tmp_path)
    assert load_model(tmp_path, impl="transformers", device=CPU).impl == "transformers"
    assert [arguments[1:] for arguments in asked] == [(tmp_path, CPU, torch.float32, 0, False)] * 2  # not compiled


def test_the_hub_is_asked_last_and_its_failure_names_the_model(monkeypatch, directory):
    import huggingface_hub

    asked = []

    def snapshot_download(name, **options):
        asked.append(name)
        if name != "owner/model":
            raise OSError("no route\nPlease look after your cables.")
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert load_model("owner/model", device=CPU).directory == directory
    with pytest.raises(InvalidConfig, match=r"model='owner/absent' .*smollm2-135m, .* tiny\b.*OSError: no route$"):
        load_model("owner/absent", device=CPU)
    with pytest.raises(InvalidConfig, match=r"^model='smollm' .*did you mean 'smollm2-135m'\?.*no route$"):
        load_model("smollm", device=CPU)
    load_model("tiny", device=CPU)
    assert asked == ["owner/model", "owner/absent", "smollm"]


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, (2,)),
        ({"temperature": 0.6}, (2,)),
        ({"eos_token_id": 7}, (7,)),
        ({"eos_token_id": [7, 9, 7], "top_k": 5}, (7, 9)),
        ({"eos_token_id": 0}, (0,)),
    ],
)
def test_eos_ids(directory, generation, expected):
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    assert load_model(directory, device=CPU).eos_ids == expected


def test_eos_ids_may_be_none_but_not_nonsense(tmp_path):
    assert load_model(write_model(tmp_path, eos_token_id=None), device=CPU).eos_ids == ()
    with pytest.raises(InvalidConfig, match="eos_token_id"):
        load_model(write_model(tmp_path, eos_token_id="</s>"), device=CPU)


def test_auto_dtype():
    def auto(device, **config):
        return load._resolve_dtype("auto", config, torch.device(device))

    assert auto("cpu", dtype="bfloat16") == torch.float32
    assert auto("cuda", dtype="bfloat16") == torch.bfloat16
    assert auto("cuda", torch_dtype="float16") == torch.float16
    assert auto("cuda", dtype="float32") == auto("cuda") == torch.bfloat16


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_weights_are_converted_to_the_dtype_asked_for(directory, dtype):
    model = load_model(directory, device=CPU, dtype=dtype).model
    assert model.dtype == model.embedding.dtype == model.blocks[0].qkv.weight.dtype == torch.bfloat16


def test_a_preset_is_random_by_its_seed(unpacked):
    first, again, other = (load_model("tiny", device=CPU, seed=seed) for seed in (1, 1, 2))
    assert (first.directory, first.eos_ids, first.impl, first.name) == (None, (2,), "native", "tiny")
    assert torch.equal(first.model.blocks[1].down.weight, again.model.blocks[1].down.weight)
    assert not torch.equal(first.model.blocks[1].down.weight, other.model.blocks[1].down.weight)
    assert not torch.equal(first.model.blocks[0].qkv.weight, first.model.blocks[1].qkv.weight)


def test_random_weights_have_the_stated_spread():
    model = load_model("tiny", device=CPU, dtype="bfloat16").model
    spread = PRESETS["tiny"]["initializer_range"]
    for weight in (model.embedding, model.head.weight, *(linear.weight for linear in model.blocks[0].linears)):
        assert weight.float().std().item() == pytest.approx(spread, rel=0.05)
        assert weight.float().mean().abs().item() < 0.1 * spread
    assert all((norm == 1).all() for block in model.blocks for norm in block.norms)


def test_random_biases_are_zero():
    from twostroke.model.config import DecoderConfig

    decoder = Decoder(DecoderConfig.from_dict({**SMALL, "attention_bias": True}), torch.float32, CPU)
    for block in decoder.blocks:
        block.qkv.bias.fill_(torch.nan)
        block.output.bias.fill_(torch.nan)
    randomize(decoder, 0)
    assert all(not linear.bias.any() for block in decoder.blocks for linear in (block.qkv, block.output))


def test_a_native_start_does_not_import_transformers(directory):
    """Importing transformers' models costs as much as all the rest of a start."""
    code = (
        "import sys, torch\n"
        "from twostroke.model.load import load_model\n"
        "assert load_model(sys.argv[1], device=torch.device('cpu')).impl == 'native'\n"
        "assert load_model('tiny', device=torch.device('cpu')).impl == 'native'\n"
        "loaded = [name for name in sys.modules if name.split('.')[0] == 'transformers']\n"
        "assert not loaded, loaded[:5]\n"
    )
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", code, str(directory)], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
