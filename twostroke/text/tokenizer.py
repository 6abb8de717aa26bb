"""The tokenizer: text to token ids and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from ..checks import require_utf8
from ..errors import InvalidRequest, UnsupportedModel, shown
from .chat import ChatTemplate, Message, find_template

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that have a name in tokenizer_config.json and in chat templates."""

_ID_LIMIT = 1 << 32


class Tokenizer:
    """Text to token ids and back, equal to what transformers' tokenizer of the same files gives.

    Nothing in it changes after construction: safe to use from several threads.

    Args:
        backend: the tokenizer proper; owned by this object from now on.
        special_tokens: named special tokens (`bos_token`, ...) for the chat template.
        chat_template: the template's source, None for a model without one.

    Attributes:
        vocab_size: number of tokens, added ones included. A model may have more logits than that.
        special_ids: ids that `decode` skips.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str], chat_template: str | None = None
    ) -> None:
        # A tokenizer.json may carry the settings of a training run.
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._template = ChatTemplate(chat_template, special_tokens) if chat_template is not None else None
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self._special_texts = frozenset(token.content for token in added.values() if token.special)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`. Special tokens written in the text are read as such.

        Args:
            special_tokens: also add what the tokenizer puts around a text, such as a begin token.

        Raises:
            InvalidRequest: `text` is not a string, or not one that UTF-8 can hold (a lone surrogate).
        """
        if not isinstance(text, str):
            raise InvalidRequest(f"text must be a string, not {shown(text)}")
        require_utf8("text", text)
        return self._backend.encode(text, add_special_tokens=special_tokens).ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`. Ids that name no token, negative ones too, have no text."""
        return self._backend.decode(known_range(ids), skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        """The id of a token, as the vocabulary spells it; None if there is none."""
        return self._backend.token_to_id(token)

    def holds_special(self, text: str) -> bool:
        """Whether the text of a special token stands in `text`."""
        return any(token in text for token in self._special_texts)

    def to_json(self) -> str:
        """The tokenizer as the text of a tokenizer.json."""
        return self._backend.to_str()

    def apply_chat_template(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Return the token ids of a chat; the template alone decides on its special tokens.

        Raises:
            InvalidRequest: see `ChatTemplate.render`; also if the model has no chat template.
        """
        if self._template is None:
            raise InvalidRequest("messages: this model has no chat template")
        text = self._template.render(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, special_tokens=False)

    def tokens(self, ids: Iterable[int], *, skip_special_tokens: bool) -> list[str]:
        """Return the tokens, as the vocabulary spells them, that `decode` makes its text of."""
        tokens = (self._backend.id_to_token(id_) for id_ in known_range(ids))
        skipped = self._special_texts if skip_special_tokens else frozenset()
        return [token for token in tokens if token is not None and token not in skipped]

    def join(self, tokens: list[str]) -> str:
        """Return the text of `tokens`; `decode(ids)` is `join(tokens(ids))`."""
        decoder = self._backend.decoder
        return decoder.decode(tokens) if decoder is not None else " ".join(tokens)

    @cached_property
    def decoder_stages(self) -> list[dict[str, Any]]:
        """The steps from tokens to text, each a dict with a `type`; empty if tokens are joined by spaces."""
        decoder = self._backend.decoder
        return _flatten(json.loads(decoder.__getstate__())) if decoder is not None else []


def known_range(ids: Iterable[int]) -> list[int]:
    """The ids that fit the tokenizer's 32 unsigned bits; no other can be a token's."""
    return [int(id_) for id_ in ids if 0 <= id_ < _ID_LIMIT]


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [stage for part in decoder["decoders"] for stage in _flatten(part)]


def find_tokenizer(directory: Path | None) -> Tokenizer | None:
    """Return the tokenizer of a model directory; None if it has none.

    Raises:
        UnsupportedModel: it has one that can't be read.
    """
    files = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if directory is None or not any((directory / name).is_file() for name in files):
        return None
    return load_tokenizer(directory)


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load the tokenizer of a model directory.

    tokenizer.json is read directly. Any other format goes through transformers, which is imported only then.

    Raises:
        UnsupportedModel: the directory has no tokenizer that can be read.
    """
    file = directory / "tokenizer.json"
    try:
        return _load_json(directory, file) if file.is_file() else _load_through_transformers(directory)
    except Exception as error:  # the libraries that read it raise whatever they like
        raise UnsupportedModel(
            f"{directory} has no tokenizer that can be read: {type(error).__name__}: {error}"
        ) from error


def _load_json(directory: Path, file: Path) -> Tokenizer:
    settings = _read_settings(directory)
    backend = tokenizers.Tokenizer.from_file(str(file))
    special = {name: _content(settings[name]) for name in SPECIAL_NAMES if settings.get(name)}
    _add_tokens(backend, settings, special)
    return Tokenizer(backend, special, find_template(directory, settings))


def _load_through_transformers(directory: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(directory)
    return Tokenizer(
        loaded.backend_tokenizer, loaded.special_tokens_map, find_template(directory, _read_settings(directory))
    )


def _read_settings(directory: Path) -> dict[str, Any]:
    settings = _read_json(directory / "tokenizer_config.json")
    # Older model directories name their special tokens in a file of its own.
    legacy = {} if "added_tokens_decoder" in settings else _read_json(directory / "special_tokens_map.json")
    return settings | legacy


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _add_tokens(backend: tokenizers.Tokenizer, settings: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Give the backend the added tokens that only tokenizer_config.json knows, in the order that fixes their ids."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = sorted(settings.get("added_tokens_decoder", {}).items(), key=lambda entry: int(entry[0]))
    backend.add_tokens([AddedToken(**fields) for _, fields in listed if fields["content"] not in known])
    by_text = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    texts = [*special.values(), *map(_content, extra.values() if isinstance(extra, dict) else extra)]
    backend.add_special_tokens([by_text.get(text, AddedToken(text, normalized=False)) for text in texts])
