"""Servers for tests: as a command of its own, or in a thread where the test can look at its engine; and raw HTTP."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from watching import PATIENCE, wait_until

from twostroke.server.http_server import serve_until
from twostroke.server.remote_engine import RemoteEngine
from twostroke.server.serve import bind
from twostroke.server.settings import ServerSettings
from twostroke.server.supervisor import Supervisor

MODEL = "small"
"""What the served model is called."""


@dataclass
class Response:
    status: int
    headers: http.client.HTTPMessage
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]


class Client:
    """HTTP without a library that would repair what a test breaks."""

    def __init__(self, url: str) -> None:
        self.url = url
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self.address = parts.hostname, parts.port

    def request(self, method: str, path: str, body: bytes | None = None, headers: Any = None) -> Response:
        connection = http.client.HTTPConnection(*self.address, timeout=PATIENCE)
        try:
            connection.request(method, path, body, headers or {})
            got = connection.getresponse()
            return Response(got.status, got.headers, got.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Response:
        return self.request("GET", path, headers=headers)

    def post(self, path: str, body: Any, **headers: str) -> Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", path, data, {"Content-Type": "application/json"} | headers)

    def open(self, path: str, body: Any) -> socket.socket:
        """Send a request, and leave the answer to be read."""
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        connection = socket.create_connection(self.address, timeout=PATIENCE)
        connection.sendall(head.encode() + data)
        return connection


def read_events(connection: socket.socket) -> list[Any]:
    """Read a stream to its end; the data of its events, `[DONE]` as a string."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    assert response.status == 200, response.read()
    return parse_events(response.read())


def parse_events(data: bytes) -> list[Any]:
    lines = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(line) if line != b"[DONE]" else "[DONE]" for line in lines]


async def stream(address: tuple[str, int], path: str, fields: dict[str, Any]) -> list[Any]:
    """Send a request, and return the events of its whole answer."""
    reader, writer = await asyncio.open_connection(*address)
    data = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    answer = await reader.read()
    writer.close()
    return parse_events(answer)


class ServerProcess(Client):
    """A server that was started as a command."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        super().__init__(url)
        self.process = process

    @property
    def engine_pid(self) -> int:
        """The id of the engine process."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(child.pid for child in children if "spawn_main" in " ".join(child.cmdline()))

    def terminate(self) -> None:
        os.kill(self.process.pid, signal.SIGTERM)


@contextmanager
def served(model: Any, *flags: str, stderr: Any = None, **environment: str) -> Iterator[ServerProcess]:
    """Run `twostroke serve`; ended with SIGTERM, and by force if that does not do."""
    command = [
        sys.executable,
        "-m",
        "twostroke",
        "serve",
        "--model",
        os.fspath(model),
        "--device",
        "cpu",
        "--port",
        "0",
    ]
    command += ["--served-model-name", MODEL, *flags]
    root = Path(__file__).parent.parent
    environ = os.environ | {"PYTHONPATH": os.fspath(root)} | environment
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environ, cwd=root, start_new_session=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http\S+", line)
        assert found, line
        yield ServerProcess(process, found.group())
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(PATIENCE)
        finally:
            process.kill()
            process.wait()


class Hosted(Client):
    """A server that runs in a thread."""

    def __init__(self, url: str, supervisor: Supervisor, stop: Callable[[], object]) -> None:
        super().__init__(url)
        self.supervisor = supervisor
        self.stop = stop

    def stats(self) -> dict[str, Any]:
        assert self.supervisor.engine is not None
        return self.supervisor.engine.ask_stats().result(PATIENCE)

    def wait_until_idle(self) -> None:
        wait_until(lambda: self.stats()["running"] == self.stats()["waiting"] == 0)


@contextmanager
def engine_process(arguments: dict[str, Any], *, restart: bool = False) -> Iterator[Supervisor]:
    """Run an engine in a process, for one server or, one after the other, for several."""
    supervisor = Supervisor(lambda end: RemoteEngine(arguments, on_end=end), restart=restart)
    try:
        yield supervisor
    finally:
        supervisor.close()


@contextmanager
def hosted(engine: Supervisor | dict[str, Any], settings: dict[str, Any] | None = None) -> Iterator[Hosted]:
    """Run a server in a thread, of an engine that runs already, or of one that is started with these arguments."""
    made = ServerSettings(**{"port": 0, "model_name": MODEL, "shutdown_timeout": 0.0} | (settings or {}))
    if not isinstance(engine, Supervisor):
        with engine_process(engine, restart=made.restart) as supervisor, hosted(supervisor, settings) as server:
            yield server
        return
    urls: list[str] = []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    def end() -> None:
        loop.call_soon_threadsafe(stop.set)

    with bind("127.0.0.1", 0) as listener:
        work = serve_until(stop, made, engine, listener, urls.append)
        thread = threading.Thread(target=lambda: loop.run_until_complete(work), daemon=True)
        thread.start()
        try:
            wait_until(lambda: bool(urls))
            server = Hosted(urls[0], engine, end)
            server.wait_until_idle()
            yield server
        finally:
            end()
            thread.join(PATIENCE)
            loop.close()
