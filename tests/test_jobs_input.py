"""The lines of a batch: their numbers, parts of the input, duplicates; and what a line may say."""

from __future__ import annotations

import gzip
import itertools
import json
import os
from pathlib import Path

import pytest

from twostroke import InvalidRequest
from twostroke.jobs import batch_input
from twostroke.jobs.batch_input import BatchInput, Line, Shard
from twostroke.jobs.batch_request import RequestReader
from twostroke.openai.errors import ApiError


def numbers(source):
    return [line.number for line in source.lines(source.survey())]


def make(folder, data, **options):
    path = folder / "in"
    path.write_bytes(data)
    return BatchInput(path, **options)


def test_blank_lines_count_and_are_skipped(tmp_path):
    source = make(tmp_path, b"\xef\xbb\xbf{}\n\n  \r\n{} \r\n{}")
    assert [(line.number, line.data) for line in source.lines(source.survey())] == [(1, b"{}"), (4, b"{}"), (5, b"{}")]
    assert source.survey().requests == 3


def test_gzip_is_known_by_its_bytes(tmp_path):
    plain, zipped = make(tmp_path, b"{}\n[]\n"), tmp_path / "zipped"
    zipped.write_bytes(gzip.compress(b"{}\n") + gzip.compress(b"[]\n"))
    again = BatchInput(zipped)
    assert list(again.lines(again.survey())) == list(plain.lines(plain.survey()))
    assert again.survey() == plain.survey()


@pytest.mark.parametrize(
    "data", [gzip.compress(b"x" * 1000, mtime=0)[:-9], b"\x1f\x8bnot at all", None], ids=["cut", "other", "missing"]
)
def test_what_cannot_be_read_is_refused(tmp_path, data):
    path = tmp_path / "in"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(InvalidRequest, match=r"^input='.*in' cannot be read"):
        BatchInput(path).survey()


@pytest.mark.parametrize("make_path", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_what_cannot_be_read_twice_is_refused(tmp_path, make_path):
    """A shell makes such a pipe of `<(zcat in.gz)`; what is written into it would be lost."""
    make_path(tmp_path / "in")
    with pytest.raises(InvalidRequest, match=r"^input='.*in' is no regular file, .* comes in by - a copy is kept"):
        BatchInput(tmp_path / "in").survey()


def test_shards_part_the_limited_input(tmp_path):
    data = b"".join(b"%d\n\n" % n for n in range(40))
    parts = [numbers(make(tmp_path, data, limit=11, shard=Shard(index, 3))) for index in (1, 2, 3)]
    assert sorted(itertools.chain(*parts)) == numbers(make(tmp_path, data))[:11]
    assert [len(part) for part in parts] == [4, 4, 3]
    surveys = [make(tmp_path, data, limit=11, shard=Shard(index, 3)).survey() for index in (1, 2)]
    assert surveys[0].digest == surveys[1].digest
    assert make(tmp_path, data, limit=12).survey().digest != surveys[0].digest


@pytest.mark.parametrize("text", ["", "1", "0/3", "4/3", "a/b", "1/", "-1/3"])
def test_bad_shards(text):
    with pytest.raises(InvalidRequest, match=r"^shard="):
        Shard.parse(text)
    assert str(Shard.parse("2/3")) == "2/3"


def test_the_digest_tells_lines_apart_that_join_to_the_same_bytes(tmp_path):
    digests = {make(tmp_path, data).survey().digest for data in (b"ab\nc", b"a\nbc", b"abc", b"\nab\nc", b"ab\nC")}
    assert len(digests) == 5


def test_what_is_added_after_the_survey_is_not_read(tmp_path):
    source = make(tmp_path, b"1\n2\n")
    survey = source.survey()
    make(tmp_path, b"1\n2\n3\n")
    assert [line.number for line in source.lines(survey)] == [1, 2]


@pytest.mark.parametrize("collide", [False, True])
def test_duplicates_are_those_of_equal_ids(tmp_path, monkeypatch, collide):
    """With hashes that are all equal too; a line's own name, `line-4`, may be another's id."""
    if collide:
        monkeypatch.setattr(batch_input, "_hash", lambda text: 7)
    ids = ["a", "line-4", "b", None, "a", "a", 3]
    data = "\n".join(json.dumps({} if name is None else {"custom_id": name}) for name in ids)
    assert make(tmp_path, data.encode()).survey().duplicates == {4: 2, 5: 1, 6: 1}


def test_a_line_too_long_is_not_held(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_input, "MAX_LINE_BYTES", 10)
    source = make(tmp_path, b"1\n" + b"x" * 35 + b"\n2\n" + b"y" * 11)
    assert [(line.number, len(line.data)) for line in source.lines(source.survey())] == [
        (1, 1),
        (2, 11),
        (3, 1),
        (4, 11),
    ]


# What a line may say


def read(line, **options):
    reader = RequestReader(None, "tiny", 50, options.pop("seed", None), options.pop("duplicates", {}))
    return reader.read(Line(options.pop("number", 4), line if isinstance(line, bytes) else json.dumps(line).encode()))


def envelope(body, **fields):
    return {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body} | fields


def test_both_forms_say_the_same():
    body = {"prompt": [1, 2], "max_tokens": 7, "temperature": 0, "n": 2}
    wrapped, plain = read(envelope(body)), read(body)
    assert (wrapped.custom_id, plain.custom_id) == ("a", "line-4")
    assert wrapped.params == plain.params
    assert [list(ids) for request in (wrapped, plain) for ids in request.prompts] == [[1, 2], [1, 2]]
    assert (plain.tokens, plain.samples) == (7, 2)


def test_the_defaults_of_each_form():
    """A plain line has those of SamplingParams; OpenAI's form has OpenAI's."""
    assert read({"prompt": [1]}).params.max_tokens == 128
    assert read(envelope({"prompt": [1]})).params.max_tokens == 16
    assert read({"prompt": [1], "custom_id": "mine"}).custom_id == "mine"
    assert read({"prompt": [1], "custom_id": None}).custom_id == "line-4"
    assert read({"prompt": [1] * 20}).tokens == 30  # what the context leaves


def test_seeds_follow_from_the_line():
    seeds = [read({"prompt": [1]}, seed=5, number=number).params.seed for number in (4, 5, 4)]
    assert seeds[0] == seeds[2] != seeds[1]
    assert read({"prompt": [1], "seed": 9}, seed=5).params.seed == 9
    assert read({"prompt": [1]}).params.seed is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not a request"),
        (b'{"prompt": [1]} x', "not JSON"),
        (b"[1]", "not a request"),
        (b"\xff", "not JSON"),
        ({"prompt": [1], "messages": []}, 'needs "url" and "body"'),
        ({"input": "x"}, 'needs "url" and "body"'),
        ({"prompt": [1], "temprature": 0}, "temprature is not a parameter"),
        ({"prompt": [1], "top_p": 0}, "top_p=0"),
        ({"prompt": [1], "max_tokens": "7"}, "max_tokens='7'"),
        ({"prompt": [1], "stream": True}, "stream=true"),
        ({"prompt": [1], "stream_options": {}}, "stream_options"),
        (
            {"prompt": [1], "model": "my gpt"},
            "the model 'my gpt' does not exist here; there is 'tiny'; --served-model-name 'my gpt' lets",
        ),
        ({"prompt": [1], "model": "~no\0body" * 999}, "does not exist here"),
        ({"prompt": [1], "echo": True}, "echo needs a tokenizer"),
        ({"prompt": "text"}, "no tokenizer"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no tokenizer"),
        (envelope({"prompt": [1]}, url="/v1/embeddings"), "url='/v1/embeddings' must be one of /v1/chat"),
        (envelope({"prompt": [1]}, method="GET"), "not a request"),
        (envelope({"prompt": [1]}, custom_id=3), "custom_id=3 must be a string"),
        ({"prompt": [1], "custom_id": 3}, "custom_id=3 must be a string"),
        ({"prompt": [1], "custom_id": ["a"]}, r"custom_id=\['a'\] must be a string"),
        (b'{"prompt": [1], "custom_id": "a\xff"}', "not JSON"),
        (b'{"prompt": [1], "custom_id": %s}' % (b"9" * 5000), "not"),
        (envelope({"prompt": [1]}, extra=1), "not a request"),
        ({"url": "/v1/completions"}, "not a request"),
    ],
)
def test_what_is_no_request_is_refused(line, message):
    with pytest.raises(ApiError, match=message):
        read(line)


def test_a_duplicate_is_refused():
    with pytest.raises(ApiError, match="custom_id='line-4' is that of line 2 already"):
        read({"prompt": [1]}, duplicates={4: 2})
