"""What a server refuses: always with a 4xx in OpenAI's form that names the field, and it lives on."""

from __future__ import annotations

import socket

import pytest
from refused import CHAT, LEAST, RESPONSES, TEXT, USER, check, lives_on  # noqa: F401
from serving import hosted

from twostroke.openai.chat import ChatRequest
from twostroke.openai.completions import CompletionRequest
from twostroke.openai.responses import ResponsesRequest

BAD_FIELDS = [
    (TEXT, "prompt", "", "B10"),
    (TEXT, "prompt", [], "B10"),
    (TEXT, "prompt", [[]], "B10"),
    (TEXT, "prompt", [49152], "C19"),
    (TEXT, "prompt", [200000], "C19, R07"),
    (TEXT, "prompt", [-1], "C20"),
    (TEXT, "prompt", [1.5], "R07"),
    (TEXT, "prompt", [True], "R07"),
    (TEXT, "prompt", [2**63], "R07"),
    (TEXT, "prompt", [-(2**63)], "R07"),
    (TEXT, "prompt", ["a"] * 1_000_000, "more than the limit"),
    (TEXT, "prompt", [5] * 1_000_000, "R14"),
    (TEXT, "prompt", ["a", 1], "R07"),
    (TEXT, "prompt", [[1], ["a"]], "R07"),
    (TEXT, "prompt", {"a": 1}, ""),
    (TEXT, "prompt", None, ""),
    (TEXT, "prompt", [5] * 2048, "R14, B16"),
    (TEXT, "max_tokens", 0, "B09"),
    (TEXT, "max_tokens", "5", ""),
    (TEXT, "max_tokens", 2**70, "B07"),
    (TEXT, "temperature", -1, "C03"),
    (TEXT, "temperature", "hot", "C03"),
    (TEXT, "temperature", True, "C03"),
    (TEXT, "top_p", 0, "C03"),
    (TEXT, "top_p", 1.1, "C03"),
    (TEXT, "min_p", 2, "C03"),
    (TEXT, "seed", -1, ""),
    (TEXT, "seed", 2**64, ""),
    (TEXT, "stop", [""], ""),
    (TEXT, "stop", ["a"] * 65, ""),
    (TEXT, "stop", [None], ""),
    (TEXT, "stop_token_ids", [49152], ""),
    (TEXT, "best_of", 0, ""),
    (TEXT, "logprobs", 21, ""),
    (CHAT, "logprobs", 1, ""),
    (CHAT, "top_logprobs", 1, "without logprobs"),
    (TEXT, "n", 0, "G01"),
    (TEXT, "n", 2**60, "G01"),
    (TEXT, "stream", "yes", ""),
    (TEXT, "echo", 1, ""),
    (TEXT, "temprature", 1, "C24"),
    (TEXT, "stream_options", {"include_usage": True}, "without a stream"),
    (TEXT, "structured", {"regex": "("}, ""),
    (TEXT, "structured", {"regex": "a", "choice": ["a"]}, ""),
    (TEXT, "structured", {}, ""),
    (TEXT, "logits_processors", ["x"], "not for JSON"),
    (TEXT, "priority", 5, "needs another policy"),
    (TEXT, "queue_timeout", 0, ""),
    (TEXT, "max_thinking_tokens", -1, ""),
    (CHAT, "response_format", {"type": "json_schema"}, ""),
    (CHAT, "response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}, ""),
    (CHAT, "messages", [], ""),
    (CHAT, "messages", "Hi", ""),
    (CHAT, "messages", None, ""),
    (RESPONSES, "input", [], ""),
    (RESPONSES, "max_output_tokens", 0, ""),
    (RESPONSES, "service_tier", "priority", ""),
]


@pytest.mark.parametrize(("path", "field", "value", "rows"), BAD_FIELDS, ids=lambda value: str(value)[:20])
def test_a_bad_value_is_named(server, path, field, value, rows):
    error = check(server.post(path, LEAST[path] | {field: value}), field)
    assert error["message"].startswith(error["param"])


def test_an_empty_text_is_shown_as_it_was_given(server):
    """B10."""
    for prompt in ("", ["a", ""]):
        assert check(server.post(TEXT, {"prompt": prompt}), "prompt")["message"].startswith("prompt='' has no tokens")


UNSUPPORTED = [
    *((CHAT, field, value) for field, value in {
        "audio": {"voice": "x"}, "functions": [{"name": "f"}], "function_call": {"name": "f"}, "modalities": ["audio"],
        "prediction": {"type": "content"}, "reasoning_effort": "high", "verbosity": "low", "store": True,
        "web_search_options": {}, "metadata": {"a": "b"}, "prompt_cache_retention": "24h", "service_tier": "flex",
    }.items()),
    *((TEXT, field, value) for field, value in {"suffix": "end", "prompt_logprobs": 1}.items()),
    *((RESPONSES, field, value) for field, value in {
        "background": True, "include": ["x"], "previous_response_id": "resp_1", "conversation": "c", "prompt": {},
        "max_tool_calls": 1, "n": 2, "best_of": 2, "logprobs": 1, "top_logprobs": 1,
        "truncation": "auto", "max_tokens": 3,
    }.items()),
]  # fmt: skip


@pytest.mark.parametrize(("path", "field", "value"), UNSUPPORTED, ids=lambda value: str(value)[:20])
def test_what_is_not_supported_is_refused_by_name(server, path, field, value):
    """C24: nothing is accepted and ignored."""
    error = check(server.post(path, LEAST[path] | {field: value}), field)
    assert field in error["message"]


NEUTRAL = {
    CHAT: {
        "n": 1, "logprobs": False, "top_logprobs": 0, "frequency_penalty": 0, "presence_penalty": 0.0, "tools": [],
        "tool_choice": "auto", "response_format": {"type": "text"}, "modalities": ["text"], "store": False,
        "user": "me", "service_tier": "auto", "parallel_tool_calls": True, "logit_bias": None, "stop": [],
        "max_tokens": None, "max_completion_tokens": 2, "safety_identifier": "x", "prompt_cache_key": "y",
        "metadata": None,
    },
    TEXT: {"best_of": 1, "suffix": None, "logprobs": None, "user": "me", "max_tokens": 2**31, "stop": "a"},
    RESPONSES: {"store": False, "tools": [], "text": {"format": {"type": "text"}}, "truncation": "disabled"},
}  # fmt: skip


@pytest.mark.parametrize("path", NEUTRAL)
def test_values_that_ask_for_nothing_may_stand(server, path):
    """Clients that spell out OpenAI's defaults are served; B07: more tokens than fit are clamped."""
    for stream in (False, True):
        response = server.post(path, LEAST[path] | NEUTRAL[path] | {"stream": stream, "best_of": 1})
        assert response.status == 200, response.data
        assert b'"error":{' not in response.data


OPENAI_FIELDS = {
    ChatRequest: "messages model audio frequency_penalty function_call functions logit_bias logprobs "
    "max_completion_tokens max_tokens metadata modalities n parallel_tool_calls prediction presence_penalty "
    "prompt_cache_key prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier stop "
    "store stream stream_options temperature tool_choice tools top_logprobs top_p user verbosity web_search_options",
    CompletionRequest: "model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty "
    "seed stop stream stream_options suffix temperature top_p user",
    ResponsesRequest: "background context_management conversation include input instructions max_output_tokens "
    "max_tool_calls metadata model parallel_tool_calls previous_response_id prompt prompt_cache_key "
    "prompt_cache_retention reasoning safety_identifier service_tier store stream stream_options temperature text "
    "tool_choice tools top_logprobs top_p truncation user",
}


@pytest.mark.parametrize("kind", OPENAI_FIELDS, ids=lambda kind: kind.__name__)
def test_every_field_of_openais_is_known(kind):
    assert set(OPENAI_FIELDS[kind].split()) <= set(kind.model_fields)


def test_two_names_of_one_limit(server):
    check(server.post(CHAT, LEAST[CHAT] | {"max_completion_tokens": 3}), "max_tokens")
    only = {"messages": USER, "max_completion_tokens": 0}
    assert "max_completion_tokens=0" in check(server.post(CHAT, only), "max_completion_tokens")["message"]


def test_what_does_not_go_together(server):
    check(server.post(TEXT, LEAST[TEXT] | {"best_of": 3, "stream": True}), "best_of")
    check(server.post(TEXT, LEAST[TEXT] | {"echo": True, "logprobs": 1}), "logprobs")
    check(server.post(CHAT, LEAST[CHAT] | {"logprobs": True, "top_logprobs": 21}), "top_logprobs")


def test_two_ways_to_ask_for_a_format(server):
    both = LEAST[CHAT] | {"response_format": {"type": "json_object"}, "structured": {"choice": ["a"]}}
    check(server.post(CHAT, both), "response_format")
    check(server.post(RESPONSES, LEAST[RESPONSES] | {"text": {"format": {"type": "json_schema"}}}), "text.format")
    bad = {"structured": {"choice": ["a"], "x": 1}}
    check(server.post(TEXT, LEAST[TEXT] | bad), "structured.x")


def test_places_within_a_body_are_named(server):
    bad = [{"role": "user", "content": "Hi"}, {"role": "user", "content": [{"type": "image_url", "text": ""}]}]
    check(server.post(CHAT, {"messages": bad}), "messages[1].content[0].type")
    robot = check(server.post(CHAT, {"messages": [{"role": "robot", "content": "Hi"}]}), "messages[0].role")
    assert robot["code"] == "invalid_value"
    number = check(server.post(CHAT, {"messages": [{"role": "user", "content": 5}]}), "messages[0].content")
    assert number["code"] == "invalid_type"
    check(server.post(CHAT, {"messages": [{"role": "user"}]}), "messages[0].content")
    check(server.post(CHAT, {"messages": [{"role": "user", "content": "Hi", "x": 1}]}), "messages[0].x")
    check(server.post(TEXT, {"prompt": "a", "stream": True, "stream_options": {"x": 1}}), "stream_options.x")
    assert "messages" in check(server.post(CHAT, {}), "messages")["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, "/tokenize", "/detokenize"])
def test_a_query_is_refused_by_name(server, path):
    """Parameters belong in the body; who writes one elsewhere must not think that it was honoured."""
    error = check(server.post(f"{path}?temperature=0&max_tokens=", LEAST.get(path, {})), "temperature")
    assert error["code"] == "unknown_parameter"
    assert "'temperature', 'max_tokens'" in error["message"]


def test_other_paths_and_methods(server):
    check(server.get("/v1/none"), None, 404)
    check(server.get(TEXT), None, 405)
    check(server.request("DELETE", "/health"), None, 405)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\n" + b"".join(b"x-%d: %s\r\n" % (n, b"y" * 1000) for n in range(1000)),
        b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\n",
        b"GET /health HTTP/1.1\r\nx: " + b"y" * 1_000_000,
        b"GET /health HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"GET /health HTTP/1.1\r\nno colon\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x00" * 1000 + b"\r\n\r\n",
    ],
    ids=range(9),
)
def test_abuse_of_the_head(server, head):
    """A 400, or a closed connection; never memory without end."""
    with socket.create_connection(server.address, timeout=10) as connection:
        answer = b""
        try:
            connection.sendall(head)
            answer = connection.recv(1000)
        except ConnectionError:
            pass
        assert answer == b"" or answer.startswith(b"HTTP/1.1 400")


def test_request_ids(server):
    """R03, B11: echoed where harmless, replaced where not, and two requests may have the same one."""
    assert server.get("/version", **{"X-Request-Id": "abc-1.2"}).headers["X-Request-Id"] == "abc-1.2"
    for bad in ("a b", "ä", "x" * 129, "<script>", '"'):
        given = server.request("GET", "/version", headers={"X-Request-Id": bad.encode("latin-1")})
        assert given.headers["X-Request-Id"] not in (None, bad)
    bodies = [LEAST[TEXT] | {"stream": True, "max_tokens": 200}] * 2
    sockets = [server.open(TEXT, body) for body in bodies]
    for connection in sockets:
        connection.close()
    same = [server.post(TEXT, LEAST[TEXT], **{"X-Request-Id": "same"}) for _ in range(2)]
    assert {response.headers["X-Request-Id"] for response in same} == {"same"}
    assert same[0].json["id"] != same[1].json["id"]


@pytest.fixture(scope="module")
def tiny(tiny_engine):
    """No tokenizer, limits, keys, and CORS."""
    settings = {
        "api_keys": ("key-one", "key-two"),
        "allow_origins": ("https://a.example",),
        "max_samples": 3,
        "max_body_bytes": 2000,
    }
    with hosted(tiny_engine, settings) as server:
        yield server


KEY = {"Authorization": "Bearer key-two"}


def test_keys(tiny):
    for headers in (
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer key"},
        {"Authorization": "Basic key-one"},
    ):
        for method, path in (("GET", "/v1/models"), ("POST", TEXT), ("POST", "/tokenize"), ("GET", "/version")):
            response = tiny.request(method, path, None, headers)
            assert check(response, None, 401)["type"] == "authentication_error"
            assert response.headers["WWW-Authenticate"] == "Bearer"
    assert tiny.get("/v1/models", Authorization="bearer key-one").status == 200
    assert tiny.get("/v1/models", **KEY).status == 200
    assert tiny.get("/v1/models", Authorization="Bearer k\xe9y").status == 401
    assert tiny.get("/health").status == tiny.get("/ready").status == 200


def test_cors(tiny):
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    allowed = tiny.request("OPTIONS", TEXT, headers={"Origin": "https://a.example"} | ask)
    assert (allowed.status, allowed.headers["Access-Control-Allow-Origin"]) == (200, "https://a.example")
    assert tiny.request("OPTIONS", TEXT, headers={"Origin": "https://b.example"} | ask).status == 400


def test_a_model_without_a_tokenizer(tiny):
    body = {"prompt": [3, 4], "max_tokens": 3, "return_token_ids": True, "ignore_eos": True}
    choice = tiny.post(TEXT, body, **KEY).json["choices"][0]
    assert (choice["text"], len(choice["token_ids"])) == ("", 3)
    for path, bad in ((TEXT, {"prompt": "a"}), (CHAT, {"messages": USER}), ("/detokenize", {"tokens": [1]})):
        assert tiny.post(path, bad, **KEY).error["code"] == "no_tokenizer"
    assert tiny.post(TEXT, body | {"echo": True}, **KEY).error["code"] == "no_tokenizer"
    check(tiny.post(TEXT, body | {"stop": "a"}, **KEY), "stop")


def test_limits(tiny):
    assert tiny.post(TEXT, {"prompt": [[3]] * 3, "max_tokens": 1}, **KEY).status == 200
    assert "3" in check(tiny.post(TEXT, {"prompt": [[3]] * 4}, **KEY), "prompt")["message"]
    assert "8" in check(tiny.post(TEXT, {"prompt": [3], "n": 8}, **KEY), "n")["message"]
    check(tiny.post(TEXT, {"prompt": [3] * 1000}, **KEY), None, 413)


def test_the_description_names_every_endpoint_and_body(server):
    described = server.get("/openapi.json").json
    assert {CHAT, TEXT, RESPONSES, "/tokenize", "/health", "/v1/models/{name}"} <= set(described["paths"])
    schemas = described["components"]["schemas"]
    body = described["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "min_p" in schemas[body["$ref"].rpartition("/")[2]]["properties"]
