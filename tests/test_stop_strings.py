"""The search for stop strings: found in any text however it is cut, with the tokens that belong to what is left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from calls import count_calls
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_detokenizer import SMALL, STREAMED
from test_detokenizer import words as make_tokenizer
from tokenizers import decoders

from twostroke.limits import Limits
from twostroke.request import Request
from twostroke.sampling_params import SamplingParams
from twostroke.text.detokenizer import Detokenizer
from twostroke.text.stop_strings import StopSearch, StopStream
from twostroke.text.tokenizer import Tokenizer, load_tokenizer

LIMITS = Limits(vocab_size=50_000, max_model_len=1000, block_size=16, usable_blocks=100)


def first_stop(text: str, stops: Sequence[str], start: int = 0) -> tuple[int, int] | None:
    """The first stop string by its end, the longest of several; its beginning and its end."""
    for end in range(start + 1, len(text) + 1):
        ending = [stop for stop in stops if text[start:end].endswith(stop)]
        if ending:
            return end - max(map(len, ending)), end
    return None


def held_back(text: str, stops: Sequence[str]) -> int:
    """The size of the longest end of `text` that is a proper beginning of a stop string."""
    beginnings = {stop[:size] for stop in stops for size in range(1, len(stop))}
    return max(size for size in range(len(text) + 1) if size == 0 or text[-size:] in beginnings)


class Expected(NamedTuple):
    ids: list[int]
    text: str
    stopped: bool


def expected(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    stops: Sequence[str],
    *,
    include: bool = False,
    min_tokens: int = 0,
    skip: bool = True,
) -> Expected:
    """What is left of `ids`, by the definition: from the decodes of all their beginnings."""
    texts = [tokenizer.decode(ids[:count], skip_special_tokens=skip) for count in range(len(ids) + 1)]
    whole = texts[-1]
    start = min((len(text) for text in texts[min_tokens:] if whole.startswith(text)), default=len(whole))
    match = first_stop(whole, stops, start)
    if match is None:
        return Expected(list(ids), whole, False)
    begin, end = match
    if include:
        count = min(count for count, text in enumerate(texts) if text.startswith(whole[:end]))
        return Expected(list(ids[:count]), whole[:end], True)
    count = max(count for count, text in enumerate(texts) if whole[:begin].startswith(text))
    return Expected(list(ids[:count]), whole[:begin], True)


# The search


LETTERS = st.text("ab", max_size=14)
FEW_STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=600, deadline=None)
@given(pieces=st.lists(LETTERS, max_size=6), stops=FEW_STOPS)
@example(pieces=["abab", "ac"], stops=["ababb"])
@example(pieces=["xab"], stops=["b", "ab"])
def test_the_search_finds_what_a_look_at_everything_finds(pieces: list[str], stops: list[str]) -> None:
    search, text = StopSearch(stops), ""
    for piece in pieces:
        search.push(piece)
        text += piece
        match = first_stop(text, stops)
        if match is None:
            assert (search.found, search.read) == (None, len(text))
            assert len(search.held) == held_back(text, stops)
            assert text.endswith(search.held)
        else:
            assert (search.found, search.read) == (text[match[0] : match[1]], match[1])


def test_the_first_by_its_end_and_then_the_longest() -> None:
    for text, stops, found, end in (
        ("abcd", ["abcd", "bc"], "bc", 3),  # what "abcd" needs may never come
        ("abcd", ["cd", "bcd", "d"], "bcd", 4),
        ("aab", ["ab", "aab"], "aab", 3),
        ("abab", ["abab", "ba"], "ba", 3),
    ):
        search = StopSearch(stops)
        search.push(text)
        assert (search.found, search.read) == (found, end)


# The stream


def make_request(stops: Sequence[str], *, include: bool = False, min_tokens: int = 0, skip: bool = True) -> Request:
    params = SamplingParams(
        stop=stops, include_stop=include, min_tokens=min_tokens, max_tokens=None, skip_special_tokens=skip
    )
    return Request.create("x", [1], params, 0, LIMITS)


class Taken(NamedTuple):
    ids: list[list[int]]
    texts: list[str]
    stream: StopStream


def take(tokenizer: Tokenizer, ids: Sequence[int], request: Request, cuts: Sequence[int] = ()) -> Taken:
    """Push `ids` in the pieces that `cuts` gives, then one at a time, and finish."""
    stream = StopStream(tokenizer, request)
    taken, at = Taken([], [], stream), 0
    for size in [*cuts, *[1] * len(ids)]:
        new_ids, text = stream.push(ids[at : at + size])
        taken.ids.append(new_ids)
        taken.texts.append(text)
        at += size
    new_ids, text = stream.finish(ids)
    return Taken([*taken.ids, new_ids], [*taken.texts, text], stream)


def check(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    stops: Sequence[str],
    *,
    cuts: Sequence[int] = (),
    include: bool = False,
    min_tokens: int = 0,
    skip: bool = True,
) -> Expected:
    """Compare the stream with the definition, and its pieces with what may be shown when; return the definition's."""
    rule = expected(tokenizer, ids, stops, include=include, min_tokens=min_tokens, skip=skip)
    request = make_request(stops, include=include, min_tokens=min_tokens, skip=skip)
    taken = take(tokenizer, ids, request, cuts)
    assert "".join(taken.texts) == taken.stream.text == rule.text
    assert [token for piece in taken.ids for token in piece] == rule.ids
    assert taken.stream.kept == (len(rule.ids) if rule.stopped else None)
    assert len(rule.ids) >= min(min_tokens, len(ids))
    # No token is shown before its text, unless nothing is left to come.
    shown, handed = "", 0
    for new_ids, text in zip(taken.ids[:-1], taken.texts[:-1], strict=True):
        shown, handed = shown + text, handed + len(new_ids)
        decoded = tokenizer.decode(ids[:handed], skip_special_tokens=skip)
        assert shown.startswith(decoded) or (taken.stream.kept == handed and include)
    return rule


CUTS = st.lists(st.integers(0, 4), max_size=4)


def draw_stops(data: st.DataObject, text: str) -> list[str]:
    """Pieces of the text, some with a character that ends them otherwise, so that near misses are many."""
    place = st.integers(0, max(0, len(text) - 1))
    piece = st.builds(lambda at, size, tail: text[at : at + size] + tail, place, st.integers(1, 5), TAILS)
    return data.draw(st.lists(piece.filter(bool), min_size=1, max_size=3))


TAILS = st.sampled_from(["", "", "", "a", "�", " "])


@pytest.mark.parametrize("name", SMALL)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_ids_of_every_decoder(name: str, data: st.DataObject) -> None:
    tokenizer = SMALL[name]
    head = st.integers(0, min(tokenizer.vocab_size, 16))
    ids = data.draw(st.lists(head | st.integers(0, tokenizer.vocab_size), min_size=1, max_size=12))
    skip, include = data.draw(st.booleans()), data.draw(st.booleans())
    min_tokens = data.draw(st.just(0) | st.integers(0, len(ids) + 1))
    stops = draw_stops(data, tokenizer.decode(ids, skip_special_tokens=skip))
    check(tokenizer, ids, stops, cuts=data.draw(CUTS), include=include, min_tokens=min_tokens, skip=skip)


@pytest.mark.parametrize("name", ["llama", "gemma", "strip each"])
@settings(max_examples=150, deadline=None)
@given(data=st.data(), text=st.text("日本🙂aé", max_size=5), raw=st.binary(max_size=2), tail=st.text("lo", max_size=2))
def test_runs_of_byte_tokens(name: str, data: st.DataObject, text: str, raw: bytes, tail: str) -> None:
    """Characters within one run have their own tokens, unless a bad byte turns the whole run into U+FFFD."""
    tokenizer = STREAMED[name]
    token = tokenizer._backend.token_to_id
    ids = [token(f"<0x{byte:02X}>") for byte in text.encode() + raw] + [token("lo")] * len(tail)
    stops = draw_stops(data, tokenizer.decode(ids))
    min_tokens = data.draw(st.just(0) | st.integers(0, len(ids)))
    check(tokenizer, ids, stops, include=data.draw(st.booleans()), min_tokens=min_tokens)


@pytest.fixture(scope="module")
def smollm2(smollm2_dir: Path) -> Tokenizer:
    return load_tokenizer(smollm2_dir)


WORDS = ["🙂", "똻", "日本", "�", "é", "a", " 12", "\n", "<|im_end|>", "👩‍👩‍👧", " the", "ab", "abab"]


@settings(max_examples=400, deadline=None)
@given(
    data=st.data(), parts=st.lists(st.sampled_from(WORDS), max_size=8), drop=st.lists(st.integers(0, 20), max_size=2)
)
def test_real_text_with_tokens_lost(smollm2: Tokenizer, data: st.DataObject, parts: list[str], drop: list[int]) -> None:
    """Characters of many tokens, also ones that are cut in the middle."""
    ids = [id_ for place, id_ in enumerate(smollm2.encode("".join(parts))) if place not in drop]
    skip, include = data.draw(st.booleans()), data.draw(st.booleans())
    stops = draw_stops(data, smollm2.decode(ids, skip_special_tokens=skip))
    min_tokens = data.draw(st.just(0) | st.integers(0, len(ids) + 1))
    check(smollm2, ids, stops, cuts=data.draw(CUTS), include=include, min_tokens=min_tokens, skip=skip)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), parts=st.lists(st.sampled_from(WORDS), min_size=1, max_size=8))
def test_held_back_is_only_what_may_become_a_stop_string(
    smollm2: Tokenizer, data: st.DataObject, parts: list[str]
) -> None:
    """D01, D02, D04: neither less nor more; with include_stop nothing. All of it comes at the end."""
    text = "".join(parts)
    ids, include = smollm2.encode(text), data.draw(st.booleans())
    stops = draw_stops(data, smollm2.decode(ids))
    stream = StopStream(smollm2, make_request(stops, include=include))
    detokenizer, final, shown = Detokenizer(smollm2), "", ""
    for token in ids:
        final += detokenizer.push([token])
        shown += stream.push([token])[1]
        if stream.kept is not None:
            return
        held = 0 if include else held_back(final, stops)
        assert shown == final[: len(final) - held]
    assert stream.finish(ids)[1] == smollm2.decode(ids)[len(shown) :]


@pytest.mark.parametrize(
    ("words", "stop", "visible"),
    [
        (["The", " quick", " br", "own", " fox"], "own fox", ["The", " quick", " br", "", ""]),
        ([" delta", " epsilon", " zeta", " eta", " theta"], " zeta eta theta", [" delta", " epsilon", "", "", ""]),
        (["a", "<|", "im", "_end", "|>"], "<|im_end|>", ["a", "", "", "", ""]),
        (["x", " ab", "c"], "bcd", ["x", " a", "", "bc"]),
    ],
    ids=["D01", "D02", "D03", "text before its token"],
)
def test_d01_no_part_of_a_stop_string_leaks(words: list[str], stop: str, visible: list[str]) -> None:
    tokenizer = make_tokenizer(decoders.Fuse(), *words)
    stream = StopStream(tokenizer, make_request([stop]))
    taken = [stream.push([token]) for token in range(1, len(words) + 1)]
    if stream.kept is None:
        taken.append(stream.finish(list(range(1, len(words) + 1))))
    assert [text for _, text in taken] == visible
    assert [token for ids, _ in taken for token in ids] == list(range(1, 1 + (stream.kept or len(words))))


def calls_of_tokens(tokenizer: Tokenizer, count: int, request: Request) -> int:
    """Python and C calls of a hundred tokens after `count` others."""
    stream, word = StopStream(tokenizer, request), tokenizer.encode(" the cat")
    for _ in range(count):
        stream.push(word)
    calls = count_calls(lambda: [stream.push(word) for _ in range(50)])
    assert stream.kept is None
    return calls


@pytest.mark.parametrize("min_tokens", [0, 5])
def test_the_work_of_a_token_does_not_grow(smollm2: Tokenizer, min_tokens: int) -> None:
    request = make_request([" the dog", "the cat sat", "x" * 256], min_tokens=min_tokens)
    assert calls_of_tokens(smollm2, 10, request) == calls_of_tokens(smollm2, 400, request)


def test_what_is_remembered_of_the_text_is_bounded(smollm2: Tokenizer) -> None:
    stream = StopStream(smollm2, make_request(["a" * 256]))
    token = smollm2.encode("ab")
    for _ in range(300):
        stream.push(token)
    assert len(stream._hidden) <= 256
    assert len(stream._ends) <= 256


# Parameters


def test_strings_are_taken_once_each() -> None:
    for stop, stops in ((None, ()), ([], ()), ((), ()), ("ab", ("ab",)), (["b", "a", "b"], ("b", "a"))):
        assert make_request(stop).terms.stops == stops
