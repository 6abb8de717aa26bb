"""The life of a server: its start, its limits, the death of its engine, its end."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from typing import Any

import psutil
import pytest
from serving import hosted, parse_events, read_events, served
from watching import PATIENCE, wait_until

from twostroke import EngineDead, InvalidConfig
from twostroke.server.settings import ServerSettings, read_api_keys

PATH = "/v1/completions"
TINY = {"model": "tiny", "device": "cpu", "num_blocks": 600, "max_rows": 2, "seed": 0}
START = 90.0
"""Seconds that an engine process may take to start on a busy machine."""
FLAGS = ("--num-blocks", "600", "--max-rows", "4")


def body(max_tokens: int, **fields: Any) -> dict[str, Any]:
    own = {"prompt": [3, 4], "ignore_eos": True, "return_token_ids": True, "stream": True, "temperature": 0}
    return own | {"max_tokens": max_tokens} | fields


def tokens_of(events: list[Any]) -> list[int]:
    return [token for event in events if "choices" in event for token in event["choices"][0]["token_ids"]]


def begun(server: Any, fields: dict[str, Any]) -> socket.socket:
    """A stream whose first event has come, but was not taken."""
    connection = server.open(PATH, fields)
    while connection.recv(4096, socket.MSG_PEEK).count(b"data:") < 1:
        time.sleep(0.01)
    return connection


# Limits


@pytest.fixture(scope="module")
def narrow():
    """Two rows, and room for one that waits."""
    with hosted(TINY | {"max_waiting": 1}) as server:
        yield server


def test_a_full_queue_is_a_429(narrow):
    narrow.wait_until_idle()
    commands = narrow.supervisor.engine._remote
    before = commands.begun
    with ExitStack() as connections:
        for begun_before in (0, 1, 2):  # the last of them waits
            wait_until(lambda: commands.begun == before + begun_before)  # noqa: B023
            connections.enter_context(narrow.open(PATH, body(1900)))
        wait_until(lambda: narrow.stats()["waiting"] == 1)
        refused = narrow.post(PATH, body(2, stream=False))
        assert (refused.status, refused.error["type"], refused.headers["Retry-After"]) == (429, "rate_limit_error", "1")
        connections.close()
        wait_until(lambda: narrow.post(PATH, body(2, stream=False)).status == 200)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_waits_too_long(narrow, stream):
    narrow.wait_until_idle()
    with begun(narrow, body(1900)), begun(narrow, body(1900)):
        late = narrow.post(PATH, body(2, queue_timeout=0.1, stream=stream))
        error = parse_events(late.data)[-1]["error"] if stream else late.error
        assert error["code"] == "queue_timeout"
        assert late.status == (200 if stream else 503)


def test_a_request_that_takes_too_long(tiny_engine):
    with hosted(tiny_engine, {"request_timeout": 0.3}) as server:
        late = server.post(PATH, body(1900, stream=False))
        assert (late.status, late.error["code"]) == (504, "timeout")
        with server.open(PATH, body(1900)) as connection:
            events = read_events(connection)
        assert events[-1]["error"]["code"] == "timeout"
        assert 0 < len(tokens_of(events)) < 1900
        server.wait_until_idle()
        assert server.post(PATH, body(2, stream=False)).status == 200


# The engine's death


def test_the_death_of_the_engine_is_noticed_at_once(small_dir):
    """G10, over HTTP: every open request gets an error, later ones too, and the probes fail."""
    with served(small_dir, *FLAGS) as server:
        streaming = begun(server, body(1900))
        waiting = [server.open(PATH, body(1900, stream=False)) for _ in range(5)]
        os.kill(server.engine_pid, signal.SIGKILL)
        events = read_events(streaming)
        assert events[-1]["error"]["code"] == "engine_stopped"
        for connection in waiting:
            assert connection.recv(4096).startswith(b"HTTP/1.1 500")
            connection.close()
        assert server.get("/health").status == server.get("/ready").status == 503
        refused = server.post(PATH, body(2))
        assert (refused.status, refused.error["code"]) == (503, "engine_stopped")
        server.terminate()
        assert server.process.wait(PATIENCE) == 0


def test_another_engine_is_started_if_asked_for():
    with hosted(TINY, {"restart": True}) as server:
        first = server.supervisor.engine
        expected = server.post(PATH, body(9, stream=False)).json["choices"][0]["token_ids"]
        os.kill(first.pid, signal.SIGKILL)
        wait_until(lambda: server.get("/health").status == 503)
        wait_until(lambda: server.get("/health").status == 200, START)
        assert server.post(PATH, body(9, stream=False)).json["choices"][0]["token_ids"] == expected
        with pytest.raises(EngineDead):
            first.submit([3])


# The end


def test_sigterm_lets_requests_finish(small_dir):
    """G07: no more are admitted, those that run get their whole output, and a second signal changes nothing."""
    with served(small_dir, *FLAGS, "--shutdown-timeout", "60") as server:
        whole = server.post(PATH, body(300, stream=False)).json["choices"][0]["token_ids"]
        connection = begun(server, body(300))
        server.terminate()
        wait_until(lambda: server.get("/ready").status == 503)
        assert server.post(PATH, body(2)).error["code"] == "shutting_down"
        assert server.get("/health").status == 200
        server.terminate()
        events = read_events(connection)
        assert events[-1] == "[DONE]"
        assert tokens_of(events[:-1]) == whole
        assert server.process.wait(PATIENCE) == 0


def test_requests_that_take_too_long_are_cancelled_at_the_end(small_dir):
    """G07, D06, and Ctrl-C: they get what there is, text that was held back for a stop string too, and an error."""
    with served(small_dir, *FLAGS, "--shutdown-timeout", "0.5") as server:
        text = server.post(PATH, body(20, stream=False)).json["choices"][0]["text"]
        held = begun(server, body(1900, stop=text[:15] + "never"))
        waiting = server.open(PATH, body(1900, stream=False))
        time.sleep(0.5)
        os.kill(server.process.pid, signal.SIGINT)
        events = read_events(held)
        assert events[-1]["error"]["code"] == "shutting_down"
        said = "".join(event["choices"][0]["text"] for event in events[:-1])
        assert said.startswith(text[:15])
        assert waiting.recv(4096).startswith(b"HTTP/1.1 503")
        waiting.close()
        assert server.process.wait(PATIENCE) == 0


# The start


@pytest.mark.parametrize(
    ("name", "to_all", "processes"),
    [(signal.SIGTERM, False, "1"), (signal.SIGINT, True, "1"), (signal.SIGTERM, True, "2")],
)
def test_g07_a_signal_before_the_engine_is_ready(name, to_all, processes):
    """It ends the start as it would end the server: one for the parent alone, and those that reach every process."""
    command = [sys.executable, "-m", "twostroke", "serve", "--model", "tiny", "--device", "cpu", "--port", "0"]
    with subprocess.Popen(
        [*command, "--api-processes", processes],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        children: list[psutil.Process] = []
        while not any("spawn_main" in " ".join(child.cmdline()) for child in children):
            assert process.poll() is None
            children = psutil.Process(process.pid).children()
        (os.killpg if to_all else os.kill)(process.pid, name)
        said, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, said, errors) == (0, "", "")
    wait_until(lambda: not any(child.is_running() for child in children))


def start(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "twostroke", "serve", "--device", "cpu", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=START, env=os.environ | environment)


def test_what_a_server_does_not_start_with(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("one\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for flags, code, message in (
            (("--model", "tiny", "--max-model-len", "99999"), 2, "max_model_len=99999"),
            (("--port", str(taken.getsockname()[1])), 1, "in use"),
            (("--api-key-file", str(keys), "--admin-key-file", str(keys)), 2, "admin_key_file="),
        ):
            ended = start(*flags)
            assert (ended.returncode, ended.stdout) == (code, "")
            assert message in ended.stderr
            assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"port": 70000}, "port=70000"),
        ({"max_samples": 0}, "max_samples=0"),
        ({"max_body_bytes": 0}, "max_body_bytes=0"),
        ({"request_timeout": 0.0}, "request_timeout=0.0"),
        ({"shutdown_timeout": -1.0}, "shutdown_timeout=-1.0"),
        ({"shutdown_timeout": float("nan")}, "shutdown_timeout=nan"),
        ({"otlp_traces_endpoint": "localhost:4318"}, "otlp_traces_endpoint"),
        ({"gpu_price": float("nan")}, "gpu_price=nan"),
        ({"ssl_certfile": "x"}, "ssl_keyfile"),
    ],
)
def test_settings_are_checked(fields, message):
    with pytest.raises(InvalidConfig, match=message):
        ServerSettings(**fields).validate()


def test_where_keys_come_from(tmp_path, monkeypatch):
    monkeypatch.setenv("TWOSTROKE_API_KEY", "outer")
    file = tmp_path / "keys"
    file.write_text("one\n\n  two  \n")
    assert read_api_keys(None) == ("outer",)
    assert read_api_keys(file) == ("outer", "one", "two")
    monkeypatch.delenv("TWOSTROKE_API_KEY")
    assert read_api_keys(None) == ()
    file.write_text("\n")
    for bad in (file, tmp_path / "none"):
        with pytest.raises(InvalidConfig, match="api_key_file"):
            read_api_keys(bad)
    assert "hidden" not in repr(ServerSettings(api_keys=("hidden",)))


def test_neither_prompts_nor_keys_are_logged(tmp_path):
    log = tmp_path / "log"
    tls = make_certificate(tmp_path)
    flags = ("--ssl-certfile", tls[0], "--ssl-keyfile", tls[1]) if tls else ()
    key = {"Authorization": "Bearer hidden-key"}
    with log.open("w") as stderr, served("tiny", *flags, stderr=stderr, TWOSTROKE_API_KEY="hidden-key") as server:
        context = ssl._create_unverified_context()

        def ask(path: str, **fields: Any) -> int:
            data = json.dumps(fields).encode()
            headers = key | {"Content-Type": "application/json", "X-Request-Id": "mine"}
            request = urllib.request.Request(f"{server.url}{path}", data, headers)
            with urllib.request.urlopen(request, context=context) as answer:
                return answer.status

        assert server.url.startswith("https" if tls else "http")
        assert ask(PATH, prompt=[7, 8, 9], max_tokens=2) == 200
        for path, prompt in ((PATH, "hidden-prompt"), (f"{PATH}?hidden=hidden-query", [7])):
            with pytest.raises(urllib.error.HTTPError):
                ask(path, prompt=prompt)
    written = log.read_text()
    for status, count in ((200, 1), (400, 2)):
        assert len(re.findall(rf"POST {PATH} {status} [0-9.]+s mine$", written, re.MULTILINE)) == count
    assert "hidden" not in written


def make_certificate(folder: Any) -> tuple[str, str] | None:
    """A certificate and its key; None where openssl is not at hand, and then the server speaks plainly."""
    if shutil.which("openssl") is None:
        return None
    certificate, key = os.fspath(folder / "cert.pem"), os.fspath(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "1"]
    subprocess.run([*command, "-out", certificate, "-keyout", key], check=True, capture_output=True)
    return certificate, key
