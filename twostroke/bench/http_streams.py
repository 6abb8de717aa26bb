"""A client of many streams at once, which only notes what comes when, and reads it afterwards.

It takes little time for each piece, so that it can keep up with a server that has other cores.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from ..errors import TwostrokeError, counted


@dataclass(frozen=True)
class Streamed:
    """An answer that came in pieces.

    Attributes:
        sent: when the request was sent, in seconds of `perf_counter`.
        tokens: ids. times: when each came; those of one event have one time.
    """

    sent: float
    tokens: list[int]
    times: list[float]


class _Stream(asyncio.Protocol):
    """One connection: sends a request as soon as it stands, and notes all that comes until its end."""

    def __init__(self, request: bytes) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sent = 0.0
        self.pieces: list[tuple[float, bytes]] = []
        self._request = request

    def connection_made(self, transport: Any) -> None:
        self.sent = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set_result(None)


def stream_all(url: str, path: str, bodies: Sequence[dict[str, Any]]) -> list[Streamed]:
    """Post all bodies at once, each on a connection of its own; return the answers once all have ended.

    Raises:
        TwostrokeError: an answer was no stream, or ended before its end.
    """
    address = urlsplit(url)
    host, port = address.hostname or "", address.port or 80
    requests = [_request(path, body) for body in bodies]

    async def run() -> list[_Stream]:
        loop = asyncio.get_running_loop()
        opening = (loop.create_connection(partial(_Stream, request), host, port) for request in requests)
        streams = [stream for _, stream in await asyncio.gather(*opening)]
        await asyncio.gather(*(stream.ended for stream in streams))
        return streams

    return [_read(stream) for stream in asyncio.run(run())]


def _request(path: str, body: dict[str, Any]) -> bytes:
    """A request of HTTP/1.0: the connection ends with the answer."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def _read(stream: _Stream) -> Streamed:
    tokens: list[int] = []
    times: list[float] = []
    ended = False
    for arrived, data in _events(stream.pieces):
        ended = data == b"[DONE]"
        if not ended:
            event = json.loads(data)
            if "error" in event:
                raise TwostrokeError(f"the server ended a stream with {event['error']}")
            came = [token for choice in event["choices"] for token in choice["token_ids"]]
            tokens += came
            times += [arrived] * len(came)
    if not ended:
        raise TwostrokeError(f"a stream broke off after {counted(len(tokens), 'token')}")
    return Streamed(stream.sent, tokens, times)


def _events(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Yield the data of each event, and when its last byte came."""
    rest, in_head = b"", True
    for arrived, piece in pieces:
        rest += piece
        if in_head and b"\r\n\r\n" in rest:
            head, _, rest = rest.partition(b"\r\n\r\n")
            if head.split()[1] != b"200":
                whole = rest + b"".join(piece for _, piece in pieces)
                raise TwostrokeError(f"the server answered {head.split()[1].decode()}: {whole[-500:].decode()}")
            in_head = False
        if not in_head:
            *events, rest = rest.split(b"\n\n")
            # NOTE: uvicorn cuts answers into chunks, an event each, for clients of HTTP/1.0 too.
            yield from ((arrived, event.partition(b"data: ")[2]) for event in events)
