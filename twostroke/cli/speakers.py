"""Who answers in a chat: an engine of this process, or a server."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import InvalidConfig, InvalidRequest, TwostrokeError, shown
from ..request import FinishReason
from ..sampling_params import SamplingParams

if TYPE_CHECKING:
    from ..engine import Engine

Messages = Sequence[Mapping[str, Any]]

_REFUSED = (400, 404, 413, 415, 422)
"""What a server says of a request that is at fault itself."""


class Speaker(Protocol):
    """Answers chats. Who leaves the iteration early stops the answer."""

    def answer(self, messages: Messages) -> Iterator[str]:
        """Yield the answer piece by piece.

        Raises:
            InvalidRequest: the chat was refused. TwostrokeError: something went wrong.
        """


class EngineSpeaker:
    """An engine of this process."""

    def __init__(self, engine: Engine, params: SamplingParams) -> None:
        self._engine = engine
        self._params = params

    def answer(self, messages: Messages) -> Iterator[str]:
        handle = self._engine.stream([dict(message) for message in messages], self._params)
        for delta in handle:
            yield delta.text
        if handle.result().finish_reason is FinishReason.ERROR:
            raise TwostrokeError(handle.result().error or "the answer ended with an error")


class ServerSpeaker:
    """A server that speaks OpenAI's API.

    Args:
        url: where it is, with or without the `/v1`.
        key: of the API; None where none is needed.
        model: what the server calls it; None is the first that it has.
        params: `max_tokens`, and those that are not at their defaults, are sent.
    """

    def __init__(self, url: str, key: str | None, model: str | None, params: SamplingParams) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidConfig(f"url={shown(url)} must begin with http:// or https://")
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._fields = {"model": model or self._first_model(), "stream": True} | _as_json(params)

    def answer(self, messages: Messages) -> Iterator[str]:
        body = self._fields | {"messages": list(messages)}
        with self._open("/v1/chat/completions", json.dumps(body).encode()) as response:
            try:
                for event in _events(response):
                    for choice in event["choices"]:
                        yield choice["delta"].get("content") or ""
            except (OSError, http.client.HTTPException) as error:
                raise TwostrokeError(f"{self._url} broke off: {error}") from error

    def _first_model(self) -> str:
        with self._open("/v1/models") as response:
            return json.load(response)["data"][0]["id"]

    def _open(self, path: str, body: bytes | None = None) -> Any:
        try:
            return urllib.request.urlopen(urllib.request.Request(self._url + path, body, self._headers))
        except urllib.error.HTTPError as error:
            kind = InvalidRequest if error.code in _REFUSED else TwostrokeError
            raise kind(f"{self._url}: {_message(error)}") from error
        except urllib.error.URLError as error:
            raise TwostrokeError(f"{self._url}: {error.reason}") from error


def _events(lines: Iterable[bytes]) -> Iterator[Any]:
    for line in lines:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise TwostrokeError(event["error"]["message"])
            yield event


def _message(error: urllib.error.HTTPError) -> str:
    """What the server says, where it says it in OpenAI's form."""
    try:
        return json.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return str(error)


def _as_json(params: SamplingParams) -> dict[str, Any]:
    """The parameters that are not at their defaults; and `max_tokens`, for which a server has a default of its own."""
    usual = SamplingParams()
    given = {f.name: getattr(params, f.name) for f in fields(params)}
    given = {name: value for name, value in given.items() if value != getattr(usual, name) or name == "max_tokens"}
    if params.structured is not None:
        given["structured"] = {name: value for name, value in asdict(params.structured).items() if value}
    return given
