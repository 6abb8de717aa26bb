"""From a GGUF file's metadata to a model directory's tokenizer files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ..errors import UnsupportedModel
from .gguf_config import Metadata, need

_CONTROL, _USER_DEFINED = 3, 4
"""Token types of the format: special tokens, and others that are found whole in the text."""

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")

_GPT2_NAMES = frozenset({"gpt-2"})
_DIGIT_NAMES = frozenset({"smollm", "starcoder"})
_LLAMA3_NAMES = frozenset({"llama-bpe", "llama3", "llama-v3"})
_QWEN2_NAMES = frozenset({"qwen2", "deepseek-r1-qwen"})


def write_tokenizer(metadata: Metadata, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and, where the file has a template, chat_template.jinja.

    Raises:
        UnsupportedModel: not a byte-level BPE vocabulary, or one whose way to split text is not known.
    """
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    settings = json.dumps(_settings(metadata), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(settings, encoding="utf-8")
    if template := metadata.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_bytes(template.encode("utf-8"))


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """Return the tokenizer that the metadata describes; raises as `write_tokenizer`."""
    if (kind := need(metadata, "tokenizer.ggml.model")) != "gpt2":
        raise UnsupportedModel(f"tokenizer.ggml.model={kind!r}: only 'gpt2' (byte-level BPE) can be read from GGUF")
    name = need(metadata, "tokenizer.ggml.pre")
    tokens = need(metadata, "tokenizer.ggml.tokens")
    merges = [_merge(line) for line in need(metadata, "tokenizer.ggml.merges")]
    # Llama 3's vocabulary holds words that its merges do not lead to.
    model = models.BPE({token: id_ for id_, token in enumerate(tokens)}, merges, ignore_merges=name in _LLAMA3_NAMES)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(name)
    tokenizer.decoder = decoders.ByteLevel()
    if name in _QWEN2_NAMES:
        tokenizer.normalizer = normalizers.NFC()
    _mark_added(tokenizer, tokens, metadata.get("tokenizer.ggml.token_type", []))
    _add_ends(tokenizer, metadata, name)
    return tokenizer


def _merge(line: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    return left, right


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    if name in _GPT2_NAMES:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in _DIGIT_NAMES:
        # Digits first: the spaces before a number then are a piece of their own.
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    pattern = _LLAMA3 if name in _LLAMA3_NAMES else _QWEN2 if name in _QWEN2_NAMES else None
    if pattern is None:
        raise UnsupportedModel(f"tokenizer.ggml.pre={name!r}: how this vocabulary splits text is not known")
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _mark_added(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [token for token, type_ in zip(tokens, types, strict=False) if type_ == kind]
        tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in added])


def _add_ends(tokenizer: Tokenizer, metadata: Metadata, name: str) -> None:
    """Have the begin and end token put around a text where the file, or the vocabulary's custom, asks for it."""
    named = _named_tokens(metadata)
    begin = metadata.get("tokenizer.ggml.add_bos_token", name in _LLAMA3_NAMES)
    end = metadata.get("tokenizer.ggml.add_eos_token", False)
    before = [named["bos_token"]] if begin and "bos_token" in named else []
    after = [named["eos_token"]] if end and "eos_token" in named else []
    if before or after:
        ends = [(token, tokenizer.token_to_id(token)) for token in {*before, *after}]
        tokenizer.post_processor = processors.TemplateProcessing([*before, "$A", *after], special_tokens=ends)


def _named_tokens(metadata: Metadata) -> dict[str, str]:
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    tokens = need(metadata, "tokenizer.ggml.tokens")
    return {name: tokens[id_] for name, id_ in ids.items() if id_ is not None}


def _settings(metadata: Metadata) -> dict[str, Any]:
    return {
        # The one class of transformers that takes tokenizer.json as it is; the others rebuild parts of it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": need(metadata, f"{metadata['general.architecture']}.context_length"),
        "clean_up_tokenization_spaces": False,
        **_named_tokens(metadata),
    }
