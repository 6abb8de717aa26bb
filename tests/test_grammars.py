"""Grammars by themselves, without an engine."""

from __future__ import annotations

import re
from itertools import product

import pytest

from twostroke import InvalidRequest, StructuredOutput
from twostroke.constraints.grammars import Grammars
from twostroke.text.tokenizer import load_tokenizer


def test_an_exclusive_bound_is_kept_or_refused(smollm2_dir):
    """However it is written, a number that the schema excludes is never a text of it; those within the bounds are."""
    tokenizer = load_tokenizer(smollm2_dir)
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [2])
    refusals = []
    for bound, distance in product((-10, -1, 0, 1, 9, 0.5, -1.5), (-1.5, -1, -0.5, -0.001, 0.001, 0.5, 1, 1.5)):
        name, other = ("exclusiveMinimum", "maximum") if distance > 0 else ("exclusiveMaximum", "minimum")
        number = {"type": "number", name: bound, other: round(bound + distance, 3)}
        try:
            matcher = grammars.compile(StructuredOutput(json_schema={"type": "array", "items": number}))
        except InvalidRequest as refusal:
            refusals.append(str(refusal))
            continue
        for text in {f"{bound}", f"{bound:.1f}", *(["-0"] if not bound else []), str(round(bound + distance / 2, 4))}:
            trial, ids = matcher.deep_copy(), tokenizer.encode(f"[{text}]", special_tokens=False)
            assert all(trial.consume_token(token) for token in ids) == (float(text) != bound), (number, text)
    assert 0 < len(refusals) < 20
    assert all(re.search(r"json_schema=.*: exclusiveM\w+=.* itself would be allowed", text) for text in refusals)


def test_a_grammar_that_takes_too_much_work_is_refused(smollm2_dir):
    grammars = Grammars(load_tokenizer(smollm2_dir), 49152, [2])
    with pytest.raises(InvalidRequest, match=r"cannot be followed: .*too many expressions"):
        grammars.compile(StructuredOutput(regex="(.{1,5000}){1,5000}"))
