"""Many clients at once, clients that vanish, clients that do not read: nobody else notices."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from contextlib import ExitStack
from typing import Any

import openai
import psutil
import pytest
from serving import MODEL, hosted, parse_events, read_events, served, stream

from twostroke import Engine, SamplingParams
from twostroke.bench.http_streams import stream_all
from twostroke.server.app import create_app
from twostroke.server.service import Service
from twostroke.server.settings import ServerSettings

PATH = "/v1/completions"
TOO_LONG = 1800
ARGUMENTS = {"model": "tiny", "device": "cpu", "num_blocks": 1200, "max_rows": 64, "seed": 0}


def body(prompt: Any, max_tokens: int = TOO_LONG, **fields: Any) -> dict[str, Any]:
    own = {"ignore_eos": True, "return_token_ids": True, "stream": True}
    return {"prompt": prompt, "max_tokens": max_tokens} | own | fields


def tokens_of(events: list[Any], index: int = 0) -> list[int]:
    assert events[-1] == "[DONE]"
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    return [token for choice in choices if choice["index"] == index for token in choice["token_ids"]]


@pytest.fixture(scope="module")
def server():
    with hosted(ARGUMENTS, {"request_timeout": 60.0}) as server:
        yield server


@pytest.fixture(scope="module")
def local():
    with Engine(**ARGUMENTS) as engine:
        yield engine


def test_256_streams_at_once(server, local):
    """No token is lost, doubled, or another's; G06: nothing is left behind."""
    prompts = [[3 + place % 7, 5 + place % 11, 9] for place in range(256)]
    params = [SamplingParams(seed=place, max_tokens=30, ignore_eos=True) for place in range(256)]

    async def run():
        bodies = [body(prompt, 30, seed=place) for place, prompt in enumerate(prompts)]
        return await asyncio.gather(*(stream(server.address, PATH, fields) for fields in bodies))

    expected = [output.token_ids for output in local.generate(prompts, params)]
    assert [tokens_of(events) for events in asyncio.run(run())] == expected
    server.wait_until_idle()
    engine = server.supervisor.engine
    assert not engine._delivery._handles
    assert not engine._remote._samples
    assert not engine._remote._numbers


@pytest.mark.exhaustive
def test_memory_is_flat_over_20000_requests():
    """G06: once every size of a step has been met, neither process grows."""
    one_arena = {"MALLOC_ARENA_MAX": "1"}  # what several keep for later is much, and no growth
    with served("tiny", "--num-blocks", "4000", "--max-rows", "256", "--no-log-requests", **one_arena) as server:
        processes = [psutil.Process(pid) for pid in (server.process.pid, server.engine_pid)]

        def megabytes_after(requests: int) -> list[float]:
            for start in range(0, requests, 250):
                bodies = [body([3 + place % 500, place // 500], 8) for place in range(start, start + 250)]
                assert all(len(answer.tokens) == 8 for answer in stream_all(server.url, PATH, bodies))
            return [process.memory_info().rss / 2**20 for process in processes]

        before, after = megabytes_after(10_000), megabytes_after(10_000)
        assert all(there < here + 40 for here, there in zip(before, after, strict=True)), (before, after)


def hang_up(connection: socket.socket) -> None:
    """Close with a reset, as a process that dies may do."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.fixture
def beside(server, local):
    """A stream that runs meanwhile and must not notice; at the end the engine is idle, long before `TOO_LONG`."""
    with server.open(PATH, body([5, 6, 7], 200, seed=1)) as connection:
        yield
        steps = server.stats()["steps"]
        got = tokens_of(read_events(connection))
    expected = local.generate([5, 6, 7], SamplingParams(seed=1, max_tokens=200, ignore_eos=True))
    assert got == expected[0].token_ids
    server.wait_until_idle()
    assert server.stats()["steps"] < steps + 600


@pytest.mark.parametrize("how", [socket.socket.close, hang_up], ids=["closed", "reset"])
@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_hangs_up_ends_its_request(server, beside, caplog, how, streaming):
    """D13, D14: amid the answer, whole or in pieces; and no error is logged."""
    connection = server.open(PATH, body([3, 4], stream=streaming))
    if streaming:
        assert connection.recv(100)
    else:
        before = server.stats()["steps"]
        while server.stats()["steps"] < before + 5:
            pass
    how(connection)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_client_that_hangs_up_before_the_first_token(server, beside):
    """D15."""
    for _ in range(10):
        server.open(PATH, body([7] * 1500, 500)).close()


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions", "/tokenize", "/update_weights", "/pause"])
def test_a_client_that_hangs_up_amid_its_body(server, path):
    """D13: no error comes out of the application, which the server would log; the status says what happened."""
    settings = ServerSettings(model_name=MODEL, admin_keys=("key",))
    app, sent = create_app(Service(server.supervisor, settings)), []
    messages = [{"type": "http.request", "body": b'{"', "more_body": True}, {"type": "http.disconnect"}]

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"content-length", b"9"), (b"authorization", b"Bearer key")]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": b"", "query_string": b"", "headers": headers}
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 499


def test_a_client_that_stops_reading_a_stream(server, beside):
    """D17: the openai client's iteration is left."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        extra = {"ignore_eos": True}
        for _ in client.completions.create(model=MODEL, prompt=[3], max_tokens=TOO_LONG, stream=True, extra_body=extra):
            break


def test_2048_clients_hang_up_at_once(server):
    """B14: idle and usable within seconds."""
    with ExitStack() as connections:
        for place in range(2048):
            connections.enter_context(server.open(PATH, body([3 + place % 500])))
    assert tokens_of(server_events(server, body([3], 3)))
    server.wait_until_idle()
    assert server.get("/ready").status == 200
    assert server.stats()["steps"] > 0


def server_events(server: Any, fields: dict[str, Any]) -> list[Any]:
    with server.open(PATH, fields) as connection:
        return read_events(connection)


def test_a_client_that_reads_slowly(server, local):
    """R15: while it does not read, its tokens are merged, others get theirs, and nothing of its own is lost."""
    app = create_app(Service(server.supervisor, ServerSettings(model_name=MODEL)))
    slow_body, fast_body = body([5, 6], 500, seed=1), body([8, 9], 500, seed=2)
    sent: list[bytes] = []

    async def run():
        reads_again = asyncio.Event()
        request = [{"type": "http.request", "body": json.dumps(slow_body).encode()}]

        async def receive():
            return request.pop() if request else await asyncio.Event().wait()

        async def send(message):
            sent.append(message.get("body", b""))
            if len(sent) == 3:
                await reads_again.wait()

        headers = [(b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": PATH,
            "raw_path": b"",
            "query_string": b"",
            "headers": headers,
        }
        slow = asyncio.ensure_future(app(scope, receive, send))
        while len(sent) < 3:
            await asyncio.sleep(0.01)
        fast = await stream(server.address, PATH, fast_body)
        await asyncio.to_thread(server.wait_until_idle)
        reads_again.set()
        await slow
        return fast

    fast, slow = asyncio.run(run()), parse_events(b"".join(sent))
    params = [SamplingParams(max_tokens=500, ignore_eos=True, seed=seed) for seed in (1, 2)]
    expected = local.generate([[5, 6], [8, 9]], params)
    assert [tokens_of(slow), tokens_of(fast)] == [output.token_ids for output in expected]
    assert len(slow) < 10
