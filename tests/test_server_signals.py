"""Signals that reach every process of a server at once, as a terminal's do and a service manager's."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from serving import read_events, served
from test_server_life import FLAGS, PATH, begun, body, tokens_of
from watching import PATIENCE


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGTERM])
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


def check_whole(events: list[Any], whole: list[int]) -> None:
    assert events[-1] == "[DONE]", events[-1]
    assert tokens_of(events[:-1]) == whole
