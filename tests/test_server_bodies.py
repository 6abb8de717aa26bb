"""Bodies that a server refuses: too large, without end, of another type, or no request at all; and it lives on."""

from __future__ import annotations

import http.client
import json
import socket

import pytest
from refused import CHAT, LEAST, RESPONSES, TEXT, USER, check, lives_on  # noqa: F401

from twostroke.server.unread import MAX_UNREAD_BYTES


@pytest.mark.parametrize(
    "data",
    [
        *(
            b"",
            b"{",
            b"null",
            b"[]",
            b'"x"',
            b"{'a': 1}",
            b'{"prompt": "\xff"}',
            b"\xff\xfe{",
            b'{"prompt": "\\ud800"}',
        ),
        pytest.param(b"[" * 100_000, id="brackets"),
        pytest.param(b'{"prompt":' * 100_000, id="objects"),
        pytest.param(b'{"max_tokens":' + b"9" * 100_000 + b"}", id="digits"),
        *(b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": 1e999}'),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, "/tokenize", "/detokenize"])
def test_bodies_that_are_no_request(server, path, data):
    response = server.post(path, data)
    assert response.status == 400, response.data
    assert response.error["message"]


def test_a_chat_of_thirty_thousand_messages_holds_up_nobody(server):
    with server.open(CHAT, {"messages": USER * 30_000}) as connection:
        assert server.post(TEXT, LEAST[TEXT]).status == 200
        assert b" 400 " in connection.recv(100)


def test_a_body_that_is_too_large(server):
    check(server.post(TEXT, {"prompt": "a" * 10_000_000}), None, 413)


def test_a_body_that_grows_too_large(server):
    """One whose size is not told beforehand, and that does not end, is refused once it has passed the limit."""
    with socket.create_connection(server.address) as connection:
        head = (
            f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        connection.sendall(head.encode())
        piece = b"100000\r\n" + b"a" * 0x100000 + b"\r\n"
        for _ in range(12):
            connection.sendall(piece)
        assert b" 413 " in connection.recv(100)


@pytest.mark.parametrize(
    ("path", "kind", "status"), [(TEXT, "application/json", 413), (TEXT, "text/plain", 415), ("/none", "a/b", 404)]
)
@pytest.mark.parametrize("sent", ["kept", "closed", "in chunks"])
def test_who_sends_all_before_reading_gets_the_answer(server, path, kind, status, sent):
    """The connection was reset amid the body, and the answer lost."""
    data = b"a" * 20_000_000
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\n"
    if sent == "in chunks":
        data = b"".join(b"100000\r\n" + data[:0x100000] + b"\r\n" for _ in range(20)) + b"0\r\n\r\n"
        head += "Transfer-Encoding: chunked\r\n"
    else:
        head += f"Content-Length: {len(data)}\r\n" + "Connection: close\r\n" * (sent == "closed")
    with socket.create_connection(server.address, timeout=10) as connection:
        connection.sendall(f"{head}\r\n".encode() + data)
        assert connection.recv(100).startswith(f"HTTP/1.1 {status}".encode())
        if sent != "closed":
            connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert b"HTTP/1.1 200" in http.client.HTTPResponse(connection).fp.read()


def test_who_asks_before_sending_a_body_is_told_at_once(server):
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\nContent-Length: 5000\r\n"
    with socket.create_connection(server.address, timeout=10) as connection:
        connection.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert (answer.status, answer.headers["Connection"]) == (415, "close")
        assert answer.read()
        assert connection.recv(1) == b""


def test_a_refused_body_without_end_is_not_read_for_ever(server):
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\nContent-Length: {10**12}\r\n\r\n"
    with socket.create_connection(server.address, timeout=10) as connection, pytest.raises(ConnectionError):
        connection.sendall(head.encode() + bytes(3 * MAX_UNREAD_BYTES))


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx"])
def test_other_content_types(server, kind):
    """A web page can make a browser post these here without asking."""
    headers = {} if kind is None else {"Content-Type": kind}
    check(server.request("POST", TEXT, json.dumps(LEAST[TEXT]).encode(), headers), None, 415)
