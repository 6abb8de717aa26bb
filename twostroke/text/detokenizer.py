"""Incremental detokenization: the text of a growing list of token ids."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from typing import Any, Protocol

from .tokenizer import Tokenizer

# The decoder reads the two digits as any number parser does: a sign may stand before the last.
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f+][0-9A-Fa-f]>")
_BYTE_TOKEN_CHARS = frozenset("<0x123456789abcdefABCDEF+>")


class Detokenizer:
    """Turns token ids into text as they come.

    The pushes and the finish together give exactly `tokenizer.decode(all ids)`, however the ids were cut up, and no
    push ever takes a character back. How much has to be held back follows from the tokenizer's decoder:

    * byte-level: the bytes of an unfinished UTF-8 character;
    * others whose text of a token depends on what came before only by "is it the first" (Metaspace, WordPiece, byte
      fallback, ...): a run of byte tokens, because one bad byte turns the whole run into U+FFFD;
    * any other: everything.

    Neither the cost of a push nor the memory grows with the text that was handed out.

    Args:
        skip_special_tokens: as in `Tokenizer.decode`.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._assembler = _assembler(tokenizer)

    @property
    def holds(self) -> bool:
        """Whether the text of tokens that were pushed is held back."""
        return self._assembler.holds

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that became final with `ids`; may be empty, never ends within a character."""
        return self._assembler.push(self._tokenizer.tokens(ids, skip_special_tokens=self._skip_special_tokens))

    def finish(self) -> str:
        """Return what was held back; nothing may be pushed after it."""
        return self._assembler.finish()


def token_bytes(tokenizer: Tokenizer, id_: int) -> bytes:
    """Return the UTF-8 that a token alone stands for; of a byte-level vocabulary it may be a part of a character."""
    if _is_byte_level(tokenizer.decoder_stages):
        return b"".join(map(_spelled_bytes, tokenizer.tokens((id_,), skip_special_tokens=False)))
    return tokenizer.decode((id_,), skip_special_tokens=False).encode()


class _Assembler(Protocol):
    @property
    def holds(self) -> bool: ...
    def push(self, tokens: list[str]) -> str: ...
    def finish(self) -> str: ...


def _assembler(tokenizer: Tokenizer) -> _Assembler:
    stages = tokenizer.decoder_stages
    if _is_byte_level(stages):
        return _ByteStream()
    return _Window(tokenizer) if _is_local(stages) else _Whole(tokenizer)


def _is_byte_level(stages: list[dict[str, Any]]) -> bool:
    return [stage["type"] for stage in stages if stage["type"] != "Fuse"] == ["ByteLevel"]


class _ByteStream:
    """Byte-level vocabularies: a token spells bytes, one character each, and the text is the UTF-8 of all of them."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def holds(self) -> bool:
        return bool(self._utf8.getstate()[0])

    def push(self, tokens: list[str]) -> str:
        return self._utf8.decode(b"".join(map(_spelled_bytes, tokens)))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _Window:
    """Decodes the tokens since the last cut behind an anchor: a made-up token that stands for "not the first".

    Until the first text came there is no anchor: a decoder that strips the text's start has not done so yet.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._join = tokenizer.join
        self._anchor: list[str] = []
        self._anchor_text = ""
        self._next_anchor = _unused_character(tokenizer.decoder_stages)
        self._held: list[str] = []

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def push(self, tokens: list[str]) -> str:
        self._held += tokens
        # NOTE: also where the decoder knows no byte tokens: there a token that looks like one waits for the next.
        if not self._held or _BYTE_TOKEN.fullmatch(self._held[-1]):
            return ""
        text = self.finish()
        if text and not self._anchor:
            self._anchor, self._anchor_text = [self._next_anchor], self._join([self._next_anchor])
        if self._anchor:
            self._held = []
        return text

    def finish(self) -> str:
        return self._join(self._anchor + self._held)[len(self._anchor_text) :] if self._held else ""


class _Whole:
    """Decoders in which a later token may change the text of an earlier one: all text comes at the end."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._join = tokenizer.join
        self._held: list[str] = []

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def push(self, tokens: list[str]) -> str:
        self._held += tokens
        return ""

    def finish(self) -> str:
        return self._join(self._held)


def _is_local(stages: list[dict[str, Any]]) -> bool:
    """Whether text can be cut between any two tokens that are not both byte tokens.

    After `Fuse` a stage sees one long token, so it may look at single characters only.
    """
    fused = respelled = False
    for stage in stages:
        kind = stage["type"]
        if kind == "Fuse":
            fused = True
        elif kind == "Replace":
            if not _is_plain_replacement(stage, fused):
                return False
        elif kind == "Strip":
            if stage["stop"]:
                return False
        elif kind in ("Metaspace", "WordPiece", "ByteFallback") and not fused:
            if kind == "ByteFallback" and respelled:
                return False
            respelled = True
        else:
            return False
    return True


def _is_plain_replacement(stage: dict[str, Any], fused: bool) -> bool:
    """A fixed string, that can't make or break a byte token, replaced within a token."""
    pattern, content = stage["pattern"].get("String", ""), stage["content"]
    if not pattern or not content or _BYTE_TOKEN_CHARS.intersection(pattern + content):
        return False
    return len(pattern) == 1 or not fused


def _unused_character(stages: list[dict[str, Any]]) -> str:
    """A private-use character that no stage reacts to."""
    used = json.dumps(stages, ensure_ascii=False)
    return next(char for char in map(chr, range(0xE000, 0xF8FF)) if char not in used)


def _byte_spelling() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 stands for itself, the others follow from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_SPELLING = _byte_spelling()


def _spelled_bytes(token: str) -> bytes:
    try:
        return bytes([_SPELLING[char] for char in token])
    except KeyError:  # an added token, written as plain text
        return token.encode("utf-8")
