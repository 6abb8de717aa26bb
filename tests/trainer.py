"""What tests do to a server as a trainer does, and what they ask of it meanwhile."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from typing import Any

from serving import Response
from watching import PATIENCE

from twostroke import Engine, SamplingParams

PATH = "/v1/completions"
KEY = "key-of-the-trainer"
ADMIN = {"Authorization": f"Bearer {KEY}"}
PATHS = ("/pause", "/resume", "/sleep", "/wake", "/update_weights", "/reset_prefix_cache")
PROMPTS = [[5, 6, 7], list(range(20, 50)), [9]]
ARGUMENTS = {"device": "cpu", "num_blocks": 300, "max_rows": 4, "max_waiting": 3, "seed": 0}


def do(server: Any, path: str, **fields: Any) -> Response:
    return server.post(path, fields, **ADMIN)


def state(server: Any) -> dict[str, Any]:
    got = server.get("/state", **ADMIN)
    assert got.status == 200, got.data
    return got.json


def body(prompt: Any, max_tokens: int = 40, **fields: Any) -> dict[str, Any]:
    own = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "max_tokens": max_tokens}
    return own | fields


def answers(server: Any) -> list[list[int]]:
    choices = server.post(PATH, body(PROMPTS)).json["choices"]
    return [choice["token_ids"] for choice in choices]


def expected(engine: Engine, prompts: list[list[int]] = PROMPTS, max_tokens: int = 40) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return [output.token_ids for output in engine.generate(prompts, params)]


class Later:
    """A request on its way, by a thread."""

    def __init__(self, ask: Callable[[], Response]) -> None:
        self._ask = ask
        self._answer: Response | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def answer(self) -> Response:
        self._thread.join(PATIENCE)
        assert self._answer is not None
        return self._answer

    def _run(self) -> None:
        self._answer = self._ask()


def opened(server: Any, path: str, **fields: Any) -> socket.socket:
    """A request of the trainer's whose answer nobody reads yet."""
    data = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection(server.address, timeout=PATIENCE)
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection
