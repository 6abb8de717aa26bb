"""Text as it comes: the pushes together are the decode of all ids, for every kind of decoder.

D07 and D10 are ids of faults known from other engines.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from twostroke.text.detokenizer import Detokenizer
from twostroke.text.tokenizer import Tokenizer, load_tokenizer


def words(decoder: object, *tokens: str, special: Sequence[str] = ("<s>",)) -> Tokenizer:
    vocab = {token: id_ for id_, token in enumerate([*special, *tokens])}
    backend = Backend(models.WordLevel(vocab, unk_token=special[0]))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(list(special))
    return Tokenizer(backend, {})


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["▁", "▁▁", "▁Hello", "lo", "▁wor", "ld", ",", "똻", "�", "🙂", "é", "", " ", "<0x1>", "<0x+1>", *BYTES]


def sentencepiece(*tail: object, fuse: bool = True) -> Tokenizer:
    fused = [decoders.Fuse()] if fuse else []
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), *fused, *tail]
    return words(decoders.Sequence(stages), *PIECES)


SUBWORDS = ["play", "##ing", "##", "[", "##.", ".", "n't", "##'", "s", ",", "똻", "�", "<0x41>", "", " "]
STREAMED = {
    "llama": sentencepiece(decoders.Strip(" ", 1, 0)),
    "gemma": sentencepiece(),
    "strip two": sentencepiece(decoders.Strip(" ", 2, 0)),
    "strip each": sentencepiece(decoders.Strip(" ", 1, 0), fuse=False),
    "bytes, then metaspace": words(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]), *PIECES),
    "metaspace always": words(decoders.Metaspace(prepend_scheme="always"), *PIECES),
    "metaspace first": words(decoders.Metaspace(prepend_scheme="first"), *PIECES),
    "metaspace never": words(decoders.Metaspace(prepend_scheme="never"), *PIECES),
    "wordpiece": words(decoders.WordPiece(), *SUBWORDS),
    "wordpiece, no cleanup": words(decoders.WordPiece(cleanup=False), *SUBWORDS),
    "none": words(None, *SUBWORDS),
}
HELD = {
    "suffix": words(decoders.BPEDecoder(), "lo</w>", "he", "</w>", "x"),
    "ctc": words(decoders.CTC(), "a", "b", "|", "<pad>"),
    "pattern": words(decoders.Replace(Regex("a+"), "x"), "a", "ba"),
    "pattern across tokens": words(decoders.Sequence([decoders.Fuse(), decoders.Replace("yz", "w")]), "y", "z", "v"),
    "cleanup across tokens": words(decoders.Sequence([decoders.Fuse(), decoders.WordPiece()]), "a ", ".", " ", "n't"),
    "byte tokens made late": words(
        decoders.Sequence([decoders.Replace("-", "<"), decoders.ByteFallback()]), "-0xF0>", "<0x9F>", "a"
    ),
    "bytes after pieces": words(
        decoders.Sequence([decoders.WordPiece(), decoders.ByteFallback()]), "##<0xF0>", "##<0x9F>", "a"
    ),
    "removal": words(decoders.Sequence([decoders.Replace("|", ""), decoders.ByteFallback()]), "<|0xF0>", "<0x9F>", "a"),
}
SMALL = STREAMED | HELD


def deltas(tokenizer: Tokenizer, ids: Sequence[int], cuts: Sequence[int] = (), *, skip: bool = True) -> list[str]:
    """Push `ids` in the pieces that `cuts` gives, then one at a time."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    result, at = [], 0
    for size in [*cuts, *[1] * len(ids)]:
        result.append(detokenizer.push(ids[at : at + size]))
        at += size
    return [*result, detokenizer.finish()]


@pytest.fixture(scope="module")
def smollm2(smollm2_dir: Path) -> Tokenizer:
    return load_tokenizer(smollm2_dir)


FACE = "🙂"
TROUBLE = b"\xf0\x9f\x99\x82\xed\xa0\xe0\xc0\xf4A"
CUTS = st.lists(st.integers(0, 4), max_size=6)
TEXT_PARTS = st.sampled_from([FACE, "똻", "日本", "�", "é", "a", " 12", "\n", "<|im_end|>", "👩‍👩‍👧", "\u00a0"])


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(-2, 49_200) | st.integers(0, 300), max_size=16), cuts=CUTS, skip=st.booleans())
def test_any_ids_of_the_default_model(smollm2: Tokenizer, ids: list[int], cuts: list[int], skip: bool) -> None:
    assert "".join(deltas(smollm2, ids, cuts, skip=skip)) == smollm2.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(parts=st.lists(TEXT_PARTS, max_size=8), drop=st.lists(st.integers(0, 30), max_size=3), cuts=CUTS)
def test_real_text_with_tokens_lost(smollm2: Tokenizer, parts: list[str], drop: list[int], cuts: list[int]) -> None:
    """Characters cut in the middle, and text that really holds U+FFFD."""
    ids = [id_ for place, id_ in enumerate(smollm2.encode("".join(parts))) if place not in drop]
    assert "".join(deltas(smollm2, ids, cuts)) == smollm2.decode(ids)


@settings(max_examples=300, deadline=None)
@given(
    raw=st.binary(max_size=12)
    | st.lists(st.sampled_from(b"\xf0\x9f\x99\x82\xed\xa0\xe0\xc0\xf4A"), max_size=9).map(bytes)
)
def test_any_bytes_decode_as_the_library_does(smollm2: Tokenizer, raw: bytes) -> None:
    """Python's and the library's replacement of invalid UTF-8 must agree, byte by byte."""
    ids = [byte_ids(smollm2)[byte] for byte in raw if byte in byte_ids(smollm2)]
    assert "".join(deltas(smollm2, ids)) == smollm2.decode(ids)


def byte_ids(tokenizer: Tokenizer) -> dict[int, int]:
    """The tokens of one byte each, found through the library alone: they lead and close known characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelling = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    ids = {byte: tokenizer._backend.token_to_id(char) for byte, char in spelling.items()}
    return {byte: id_ for byte, id_ in ids.items() if id_ is not None}


@pytest.mark.parametrize("name", SMALL)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_ids_of_every_decoder(name: str, data: st.DataObject) -> None:
    tokenizer = SMALL[name]
    head = st.integers(0, min(tokenizer.vocab_size, 16))
    ids = data.draw(st.lists(head | st.integers(0, tokenizer.vocab_size), min_size=1, max_size=12))
    cuts, skip = data.draw(CUTS), data.draw(st.booleans())
    got = deltas(tokenizer, ids, cuts, skip=skip)
    assert "".join(got) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert all(delta == "" for delta in got[:-1]) or name in STREAMED


def test_a_strip_of_the_end_waits_for_it() -> None:
    # Not among the random ids: the library fails on a text shorter than what is to be stripped.
    tokenizer = words(decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]), "a ", " b", "c ")
    for ids in ([1, 2, 3], [3, 3], [1, 3, 2]):
        assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["llama", "gemma", "strip each", "bytes, then metaspace"])
@settings(max_examples=100, deadline=None)
@given(raw=st.binary(max_size=6), text=st.text(max_size=3), cuts=CUTS)
@example(raw=b"\xff", text=FACE, cuts=[])
def test_runs_of_byte_tokens(name: str, raw: bytes, text: str, cuts: list[int]) -> None:
    """One bad byte turns all of its run into U+FFFD, the good characters before it too."""
    tokenizer = STREAMED[name]
    run = [1 + PIECES.index(f"<0x{byte:02X}>") for byte in text.encode() + raw]
    ids = [*run, 1 + PIECES.index("lo"), *run]
    assert "".join(deltas(tokenizer, ids, cuts)) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["smollm2", *SMALL])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_nothing_held_is_all_text_given(smollm2: Tokenizer, name: str, data: st.DataObject) -> None:
    """At such a moment the text so far is the decode of the ids so far, which may be asked for."""
    tokenizer = smollm2 if name == "smollm2" else SMALL[name]
    ids = data.draw(st.lists(st.integers(0, min(tokenizer.vocab_size, 300)), min_size=1, max_size=12))
    detokenizer, text = Detokenizer(tokenizer), ""
    assert not detokenizer.holds
    for count, token in enumerate(ids, 1):
        text += detokenizer.push([token])
        assert detokenizer.holds or text == tokenizer.decode(ids[:count])


def test_half_a_character_is_held(smollm2: Tokenizer) -> None:
    ids, detokenizer = smollm2.encode("a" + FACE + "b"), Detokenizer(smollm2)
    held = []
    for token in ids:
        detokenizer.push([token])
        held.append(detokenizer.holds)
    assert held == [False, *[True] * (len(ids) - 3), False, False]


@pytest.mark.parametrize("name", STREAMED)
def test_text_streams(name: str) -> None:
    """D11: held back is only what may still change: each ordinary token brings its own text at once, and once."""
    tokenizer = STREAMED[name]
    word = 1 + (PIECES.index("lo") if tokenizer.vocab_size > 100 else SUBWORDS.index("play"))
    got = deltas(tokenizer, [word] * 5)
    assert all(delta.strip() in ("lo", "play") for delta in got[:-1])
    detokenizer = Detokenizer(tokenizer)
    detokenizer.push([word])
    assert not detokenizer.holds
    assert got[-1] == ""


def test_a_start_that_is_stripped_in_pieces() -> None:
    space = 1 + PIECES.index("▁")
    for size in range(5):
        ids = [space] * size + [1 + PIECES.index("lo")]
        assert "".join(deltas(STREAMED["strip two"], ids)) == " " * (size - 2) + "lo"


def test_d07_characters_of_several_tokens(smollm2: Tokenizer) -> None:
    for text in (FACE * 2, "똻", "a똻" + FACE):
        ids = smollm2.encode(text)
        got = deltas(smollm2, ids)
        assert len(ids) > len(text)
        assert "".join(got) == text
        assert "�" not in "".join(got[:-1])
        assert got[-1] == ""


def test_d07_a_cut_character_shows_only_at_the_end(smollm2: Tokenizer) -> None:
    ids = smollm2.encode(FACE)[:-1]
    assert deltas(smollm2, ids) == [""] * len(ids) + ["�"]


def test_a_real_replacement_character_is_text(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("a�")
    got = deltas(smollm2, ids)
    assert "".join(got[:-1]) == "a�"


@pytest.mark.parametrize("name", ["smollm2", "llama", "wordpiece"])
def test_d10_special_and_impossible_ids_do_not_disturb(smollm2: Tokenizer, name: str) -> None:
    tokenizer = smollm2 if name == "smollm2" else STREAMED[name]
    word = tokenizer._backend.token_to_id({"smollm2": "hello", "llama": "lo", "wordpiece": "play"}[name])
    ids = [-1, 0, word, 2**32, 0, tokenizer.vocab_size, -(2**40), word]
    assert "".join(deltas(tokenizer, ids)) == tokenizer.decode([word, word])


def test_special_tokens_are_text_on_request(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("<|im_start|>hi<|im_end|>")
    assert "".join(deltas(smollm2, ids, skip=False)) == "<|im_start|>hi<|im_end|>"
    assert "".join(deltas(smollm2, ids)) == "hi"


@pytest.mark.parametrize("name", ["smollm2", *STREAMED])
def test_the_work_of_a_push_does_not_grow(smollm2: Tokenizer, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = smollm2 if name == "smollm2" else STREAMED[name]
    joined: list[int] = []
    join = Tokenizer.join
    monkeypatch.setattr(Tokenizer, "join", lambda self, tokens: joined.append(len(tokens)) or join(self, tokens))
    detokenizer = Detokenizer(tokenizer)
    for place in range(2000):
        detokenizer.push([1 + place % (tokenizer.vocab_size - 1)])
    assert sum(joined) <= 3 * 2000
    detokenizer.finish()
    held = getattr(detokenizer._assembler, "_held", [])
    assert sys.getsizeof(held) < 4000


def test_a_byte_level_tokenizer_with_text_outside_its_alphabet() -> None:
    backend = Backend(models.BPE({"a": 0, "Ġb": 1, "ð": 2}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    backend.add_tokens(["<思考>", "two words"])
    tokenizer = Tokenizer(backend, {})
    ids = [0, 3, 1, 2, 4, 2]
    assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids) == "a<思考> b�two words�"
