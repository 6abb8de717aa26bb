"""What the tests of a server's refusals share: least bodies, and the form of an error."""

from __future__ import annotations

from typing import Any

import pytest

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER = [{"role": "user", "content": "Hi"}]
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "max_tokens": 2},
    TEXT: {"prompt": "Hi", "max_tokens": 2},
    RESPONSES: {"input": "Hi", "max_output_tokens": 2},
}


@pytest.fixture(autouse=True)
def lives_on(server):
    """Whatever a test sends, the next request is answered."""
    yield
    assert server.post(TEXT, LEAST[TEXT]).status == 200


def check(response: Any, param: str | None, status: int = 400) -> dict[str, Any]:
    assert response.status == status, response.data
    assert set(response.json) == {"error"}
    assert set(response.error) == {"message", "type", "param", "code"}
    named = response.error["param"]
    assert named == param or (param is not None and named.startswith((f"{param}[", f"{param}."))), response.error
    assert response.headers["Content-Type"] == "application/json"
    return response.error
