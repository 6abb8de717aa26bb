"""Signals that reach every process of a server at once, as a terminal's do and a service manager's."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from serving import read_events, served
from test_server_life import FLAGS, PATH, begun, body, tokens_of
from test_server_metrics import values
from trainer import KEY, do
from watching import PATIENCE, wait_until


@pytest.mark.parametrize(
    ("name", "processes"),
    [
        (signal.SIGINT, "1"),
        (signal.SIGINT, "2"),
        (signal.SIGTERM, "2"),
        pytest.param(signal.SIGTERM, "1", marks=pytest.mark.exhaustive),
    ],
)
def test_g07_a_signal_to_all_processes_lets_requests_finish(small_dir, tmp_path, name, processes):
    """Only the parent acts on it: no other process ends, and none prints a traceback."""
    log = tmp_path / "stderr"
    flags = (*FLAGS, "--shutdown-timeout", "60", "--api-processes", processes)
    with log.open("w") as stderr, served(small_dir, *flags, stderr=stderr) as server:
        whole = server.post(PATH, body(300, stream=False)).json["choices"][0]["token_ids"]
        streams = [begun(server, body(300)) for _ in range(2)]
        for _ in range(2):
            os.killpg(server.process.pid, name)
        for connection in streams:
            check_whole(read_events(connection), whole)
        assert server.process.wait(PATIENCE) == 0
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize("stop", ["/pause", "/sleep"])
def test_g07_the_end_of_a_server_whose_engine_rests(small_dir, tmp_path, stop):
    """A pause ends, so that what runs can; a sleep does not, so what runs is cancelled, and does not wait in vain."""
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    with served(small_dir, *FLAGS, "--shutdown-timeout", "3600", "--admin-key-file", str(keys)) as server:
        whole = server.post(PATH, body(300, stream=False)).json["choices"][0]["token_ids"]
        connection = begun(server, body(300))
        assert do(server, stop).status == 200
        late = server.open(PATH, body(300))
        wait_until(lambda: unfinished(server) == 2)
        server.terminate()
        events = read_events(connection)
        if stop == "/pause":
            check_whole(events, whole)
            check_whole(read_events(late), whole)
        else:
            assert events[-1]["error"]["code"] == "shutting_down"
            assert 0 < len(tokens_of(events)) < len(whole)
            assert read_events(late)[-1]["error"]["code"] == "shutting_down"
        assert server.process.wait(PATIENCE) == 0


def unfinished(server: Any) -> float:
    found = values(server)
    return found["num_requests_running"] + found["num_requests_waiting"]


def check_whole(events: list[Any], whole: list[int]) -> None:
    assert events[-1] == "[DONE]", events[-1]
    assert tokens_of(events[:-1]) == whole
