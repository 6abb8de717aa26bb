"""Faults known from other servers, over HTTP: texts cut and streamed, and requests that can never fit.

A grammar of one word makes the model say a given text, in whatever tokens it likes.
"""

from __future__ import annotations

import http.client
import json
from typing import Any

import pytest
from serving import hosted, parse_events, read_events

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "Hi"}]


def saying(text: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": "Hi", "structured": {"choice": [text]}, "max_tokens": 100, "return_token_ids": True} | fields


def streamed(server: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a stream's events."""
    with server.open(TEXT, body | {"stream": True}) as connection:
        *events, done = read_events(connection)
    assert done == "[DONE]"
    return [event["choices"][0] for event in events]


def whole(server: Any, body: dict[str, Any]) -> dict[str, Any]:
    answer = server.post(TEXT, body)
    assert answer.status == 200, answer.data
    return answer.json["choices"][0]


GREEK = " delta epsilon zeta eta theta iota"


@pytest.mark.parametrize(
    ("text", "stop", "left"),
    [
        pytest.param("The quick brown fox jumps", ["own fox"], "The quick br", id="D01"),
        pytest.param(GREEK, [" zeta eta theta"], " delta epsilon", id="D02"),
        pytest.param("It is brown", ["own fox", "wn foxes and dogs"], "It is brown", id="D04: held to the end"),
        pytest.param("🙂🙂 똻", ["🙂 never"], "🙂🙂 똻", id="D07, D04"),
        pytest.param("🙂🙃 똻!", ["똻"], "🙂🙃 ", id="D07, D01"),
    ],
)
def test_a_stream_shows_no_more_and_no_less_than_what_is_before_a_stop_string(server, text, stop, left):
    """D11: its pieces are the text, each once."""
    body = saying(text, stop=stop, temperature=2.0)
    for seed in range(3):
        choices = streamed(server, body | {"seed": seed})
        pieces = [choice["text"] for choice in choices]
        assert "".join(pieces) == left
        assert "\ufffd" not in "".join(pieces)
        assert choices[-1]["finish_reason"] == "stop"
        at_once = whole(server, body | {"seed": seed})
        assert at_once["text"] == left
        assert at_once["token_ids"] == [token for choice in choices for token in choice["token_ids"]]


def test_the_end_of_a_turn_is_never_visible(server):
    """D03: its marker is a token of the answer, and no part of any piece of the text."""
    chat = {"messages": USER, "structured": {"choice": ["Hello there"]}, "return_token_ids": True, "max_tokens": 50}
    with server.open(CHAT, chat | {"stream": True}) as connection:
        choices = [event["choices"][0] for event in read_events(connection)[:-1]]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Hello there"
    assert choices[-1]["token_ids"][-1] == 2
    assert server.post(CHAT, chat).json["choices"][0]["message"]["content"] == "Hello there"


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_amid_a_text(server, skip):
    """D10."""
    fields = {"allowed_token_ids": [0, 1, 2, 40], "ignore_eos": True, "skip_special_tokens": skip, "temperature": 5.0}
    body = {"prompt": "Hi", "max_tokens": 30, "seed": 1, "return_token_ids": True} | fields
    choices = streamed(server, body)
    tokens = [token for choice in choices for token in choice["token_ids"]]
    assert {0, 1, 2, 40} == set(tokens)
    told = server.post("/detokenize", {"tokens": tokens, "skip_special_tokens": skip}).json["prompt"]
    assert "".join(choice["text"] for choice in choices) == told
    assert ("<|" in told) is not skip


def test_tokens_of_thoughts_are_counted(server):
    """G12: usage has all tokens, thoughts and grammar or not."""
    body = {"messages": USER, "structured": {"choice": ["<think>so</think>yes"]}, "max_tokens": 50}
    answer = server.post(CHAT, body | {"return_token_ids": True}).json
    (choice,) = answer["choices"]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("so", "yes")
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])


def test_what_has_ended_is_ended_again(server):
    """G03: a call's end cancels its requests, which are over; the connection takes the next one."""
    connection = http.client.HTTPConnection(*server.address)
    headers = {"Content-Type": "application/json"}
    texts = []
    for stream in (True, False, True):
        body = saying("The quick brown fox", stream=stream)
        connection.request("POST", TEXT, json.dumps(body), headers)
        data = connection.getresponse().read()
        events = parse_events(data)[:-1] if stream else [json.loads(data)]
        texts.append("".join(event["choices"][0]["text"] for event in events))
    connection.close()
    assert texts == ["The quick brown fox"] * 3


# Requests that do not fit


@pytest.fixture(scope="module")
def short():
    """A server whose cache has 49 usable blocks of 16, and whose steps take 48 tokens."""
    arguments = {"model": "tiny", "device": "cpu", "seed": 0, "num_blocks": 50, "max_model_len": 2048}
    with hosted(arguments | {"max_step_tokens": 48, "max_rows": 8, "prefix_cache": False}) as server:
        yield server


def least(prompt: list[int], **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 5, "ignore_eos": True, "temperature": 0, "return_token_ids": True} | fields


def test_what_can_never_fit_is_refused_and_holds_up_nobody(short):
    """B01, B02, B03, B06, R02: with the numbers, and at once."""
    with short.open(TEXT, least([7] * 20, max_tokens=200, stream=True)) as connection:
        for _ in range(5):
            refused = short.post(TEXT, least([5] * 1002))
            assert refused.status == 400
            assert "63 blocks of 16" in refused.error["message"]
            assert "49" in refused.error["message"]
        assert len(whole(short, least([3, 4]))["token_ids"]) == 5
        assert read_events(connection)[-1] == "[DONE]"
    short.wait_until_idle()
    assert short.stats()["free_blocks"] == 49


def test_a_prompt_longer_than_a_step(short, tiny_engine):
    """B05: it is cut into chunks, and its answer is the same."""
    prompt = [3 + place % 90 for place in range(100)]
    with hosted(tiny_engine) as roomy:
        assert whole(short, least(prompt)) == whole(roomy, least(prompt))


def test_an_answer_that_outgrows_the_cache(short):
    """B15: it is refused, beyond the last token that there is room for."""
    refused = short.post(TEXT, least([5] * 20, max_tokens=1500))
    assert refused.status == 400
    assert refused.error["param"] == "max_tokens"
    longest = least([5] * 700, max_tokens=85)
    assert len(whole(short, longest)["token_ids"]) == 85
    assert short.post(TEXT, longest | {"max_tokens": 86}).status == 400
