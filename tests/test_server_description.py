"""The OpenAPI description is what the server does: requests made from it by schemathesis, and answers held against it.

What a number may be, what goes together, and what fits the model is checked beyond it: valid data may get a 400.
"""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks
from serving import hosted

from twostroke.server.app import create_app
from twostroke.server.service import Service
from twostroke.server.settings import ServerSettings

CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
    checks.allow_header_conformance,
    checks.ignored_auth,
]
KEY = "key-of-the-test"
KEYS = {"api_keys": (KEY,), "admin_keys": (KEY,)}
LIMITS = {"num_blocks": 100, "max_rows": 8, "max_model_len": 160}
"""Short answers, since most requests do not limit them."""


@pytest.fixture(scope="module")
def server(small_dir):
    with hosted({"model": str(small_dir), "device": "cpu", "seed": 0} | LIMITS, KEYS | {"max_samples": 4}) as server:
        yield server


def described(*, coverage: bool):
    """The description, without what never ends."""
    app = create_app(Service(None, ServerSettings(**KEYS)))
    schema = schemathesis.openapi.from_dict(app.openapi())
    schema.config.phases.coverage.enabled = coverage
    return schema.exclude(path="/live")


AUTHORIZED = {"Authorization": f"Bearer {KEY}"}


def check(case, server):
    case.call_and_validate(base_url=server.url, headers=AUTHORIZED, checks=CHECKS)
    if case.path in ("/pause", "/sleep"):
        for path in ("/resume", "/wake"):
            assert server.post(path, {}, **AUTHORIZED).status == 200


@described(coverage=False).parametrize()
@settings(max_examples=15, deadline=None, suppress_health_check=[*HealthCheck])
def test_requests_made_from_the_description(case, server):
    check(case, server)


@pytest.mark.exhaustive
@described(coverage=True).parametrize()
@settings(max_examples=100, deadline=None, suppress_health_check=[*HealthCheck])
def test_many_requests_made_from_the_description(case, server):
    check(case, server)


CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER = [{"role": "user", "content": "Hi"}]
WEATHER = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
ANSWERED: list[tuple[str, dict[str, Any] | None]] = [
    (CHAT, {"messages": USER, "max_tokens": 4}),
    (CHAT, {"messages": USER, "n": 2, "logprobs": True, "top_logprobs": 2, "return_token_ids": True, "max_tokens": 4}),
    (CHAT, {"messages": USER, "structured": {"choice": ["<think>a</think>b"]}}),
    (CHAT, {"messages": USER, "structured": {"choice": ['<tool_call>{"name": "f"}</tool_call>']}, "tools": [WEATHER]}),
    (TEXT, {"prompt": ["a", "b"], "n": 2, "logprobs": 2, "return_token_ids": True, "max_tokens": 4}),
    (TEXT, {"prompt": "a", "echo": True, "max_tokens": 4}),
    (RESPONSES, {"input": "Hi", "instructions": "x", "metadata": {"a": "b"}, "user": "u", "max_output_tokens": 4}),
    (RESPONSES, {"input": "Hi", "text": {"format": {"type": "json_object"}}, "structured": None}),
    ("/tokenize", {"messages": USER}),
    ("/detokenize", {"tokens": [5]}),
    *((path, {}) for path in ("/pause", "/resume", "/sleep", "/wake", "/reset_prefix_cache")),
    ("/state", None),
    *((path, None) for path in ("/health", "/ready", "/version", "/v1/models")),
]


@pytest.mark.parametrize(("path", "body"), ANSWERED, ids=lambda value: str(value)[-30:])
def test_answers_have_the_shape_that_is_described(server, path, body):
    """All of it: a field that the description does not know would be an error."""
    answer = server.get(path, **AUTHORIZED) if body is None else server.post(path, body, **AUTHORIZED)
    assert answer.status == 200, answer.data
    description = server.get("/openapi.json").json
    (operation,) = description["paths"][path].values()
    schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.validate(answer.json, description | schema)
