"""Several API processes in front of one engine: they speak as one server, and none takes another with it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import time
from contextlib import suppress
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file
from serving import ServerProcess, read_events, served, stream
from test_server_metrics import values
from watching import PATIENCE, wait_until

from twostroke import Engine, InvalidConfig, SamplingParams
from twostroke.server.serve import bind_shared
from twostroke.server.settings import ServerSettings

PATH = "/v1/completions"
KEY = "key-of-the-trainer"
TOO_LONG = 1900
START = 90.0
"""Seconds that a process may take to start on a busy machine."""
ARGUMENTS = {"model": "tiny", "device": "cpu", "num_blocks": 1200, "max_rows": 16, "seed": 0}
FLAGS = ("--num-blocks", "1200", "--max-rows", "16", "--max-waiting", "110", "--api-processes", "2")


def body(prompt: Any, max_tokens: int, **fields: Any) -> dict[str, Any]:
    own = {"ignore_eos": True, "return_token_ids": True, "stream": True, "temperature": 0}
    return {"prompt": prompt, "max_tokens": max_tokens} | own | fields


def tokens_of(events: list[Any]) -> list[int]:
    return [token for event in events if "choices" in event for token in event["choices"][0]["token_ids"]]


class Processes:
    """A server of several API processes, and who they are."""

    def __init__(self, server: ServerProcess, log: Any) -> None:
        self.server = server
        self.log = log

    @property
    def api_pids(self) -> set[int]:
        return {pid for pid, listens in self._spawned().items() if listens}

    @property
    def engine_pid(self) -> int:
        (pid,) = (pid for pid, listens in self._spawned().items() if not listens)
        return pid

    def begin(self, count: int, max_tokens: int = TOO_LONG) -> dict[socket.socket, int]:
        """Streams whose first event has come but was not taken, each with the process that answers it.

        So many, and more until every process has one: it is the system that shares them out.
        """
        streams: dict[socket.socket, int] = {}
        while len(streams) < count or set(streams.values()) != self.api_pids:
            connection = self.server.open(PATH, body([3 + len(streams), 4], max_tokens))
            connection.settimeout(START)  # the process may be about to start
            while connection.recv(4096, socket.MSG_PEEK).count(b"data:") < 1:
                time.sleep(0.001)
            streams[connection] = self._who_has(connection)
        return streams

    def _spawned(self) -> dict[int, bool]:
        """The engine process and the API processes: does it listen."""
        children = psutil.Process(self.server.process.pid).children()
        return {
            child.pid: any(one.status == psutil.CONN_LISTEN for one in child.net_connections("tcp"))
            for child in children
            if "spawn_main" in " ".join(child.cmdline())
        }

    def _who_has(self, connection: socket.socket) -> int:
        ours = connection.getsockname()
        for pid in self.api_pids:
            if any(tuple(other.raddr) == ours for other in psutil.Process(pid).net_connections("tcp")):
                return pid
        raise AssertionError("nobody has the connection")

    def refuses(self) -> bool:
        """Whether a process of the system's choice admits nothing more, or all have ended."""
        with suppress(ConnectionError):
            answer = self.server.post(PATH, body([3], 2))
            return answer.status == 503 and answer.error["code"] == "shutting_down"
        return True

    def metrics(self) -> dict[str, float]:
        """The values of all metrics, from a process of the system's choice; see test_server_metrics."""
        return values(self.server)

    def do(self, path: str, **fields: Any) -> dict[str, Any]:
        """Have something done to the engine, by a process of the system's choice."""
        got = self.server.post(path, fields, Authorization=f"Bearer {KEY}")
        assert got.status == 200, got.data
        return got.json

    def state(self) -> dict[str, Any]:
        return self.server.get("/state", Authorization=f"Bearer {KEY}").json

    def wait_until_idle(self) -> None:
        wait_until(lambda: self.metrics()["num_requests_running"] == self.metrics()["num_requests_waiting"] == 0)


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """A server of two API processes."""
    folder = tmp_path_factory.mktemp("several")
    log, keys = folder / "stderr", folder / "keys"
    keys.write_text(KEY)
    flags = (*FLAGS, "--restart", "--admin-key-file", str(keys))
    with log.open("w") as stderr, served("tiny", *flags, stderr=stderr) as server:
        yield Processes(server, log)


@pytest.fixture(scope="module")
def local():
    with Engine(**ARGUMENTS) as engine:
        yield engine


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def answers(engine: Engine, count: int, max_tokens: int) -> list[list[int]]:
    """What the streams of `Processes.begin` give."""
    prompts = [[3 + place, 4] for place in range(count)]
    return [output.token_ids for output in engine.generate(prompts, greedy(max_tokens))]


def run_at_once(several: Processes, local: Engine) -> None:
    """Have 100 streams, and compare them with the engine's own answers."""
    prompts = [[3 + place % 7, 5 + place % 11, 9] for place in range(100)]
    params = [SamplingParams(seed=place, max_tokens=20, ignore_eos=True) for place in range(100)]

    async def run() -> list[list[Any]]:
        bodies = [body(prompt, 20, seed=place, temperature=1) for place, prompt in enumerate(prompts)]
        return await asyncio.gather(*(stream(several.server.address, PATH, fields) for fields in bodies))

    expected = [output.token_ids for output in local.generate(prompts, params)]
    assert [tokens_of(events) for events in asyncio.run(run())] == expected


def test_many_streams_at_once(several, local):
    """Both processes number their requests from 0: no token is another's, lost or doubled; and each served some."""
    before = several.metrics()
    run_at_once(several, local)
    logged = re.findall(rf" (\d+) INFO POST {PATH} 200 ", several.log.read_text())
    assert {int(pid) for pid in logged} == several.api_pids
    assert min(logged.count(pid) for pid in set(logged)) > 10

    for _ in range(8):  # whoever is asked speaks for both
        after = several.metrics()
        for name, count in (
            *(("request_success_total{length}", 100), ("request_generation_tokens_sum", 2000)),
            *(("time_to_first_token_seconds_count", 100), ("generation_tokens_total", 2000)),
        ):
            assert after[name] - before[name] == count, name


def test_what_is_done_to_the_engine_holds_for_all_processes(several, local, tmp_path):
    """G11. Whoever is asked for it, and whoever has the requests."""
    norm = {"model.norm.weight": torch.linspace(-1, 1, local.model.weight_shapes()["model.norm.weight"][0])}
    first = {name: torch.ones_like(tensor) for name, tensor in norm.items()}  # what random weights begin with
    before = answers(local, 8, 40)
    for version, tensors in enumerate((norm, first), 1):
        weights = tmp_path / f"{version}.safetensors"
        save_file(tensors, weights)
        assert several.do("/pause")["paused"]
        assert all(several.state()["paused"] for _ in range(8))
        streams = [several.server.open(PATH, body([3 + place, 4], 40)) for place in range(8)]
        wait_until(lambda: several.metrics()["num_requests_waiting"] == 8)
        assert several.do("/update_weights", weights=str(weights), partial=True)["weight_version"] == version
        assert several.do("/resume") == {"paused": False, "asleep": False, "weight_version": version}
        assert {several.state()["weight_version"] for _ in range(8)} == {version}
        local.update_weights(tensors, partial=True)
        expected = answers(local, 8, 40)
        assert (expected == before) == (version == 2)
        assert [tokens_of(read_events(connection)) for connection in streams] == expected


def test_an_api_process_that_is_killed(several, local):
    """Its requests end in the engine, those of the other do not notice, and another process takes its place."""
    streams = several.begin(12, 600)
    victim = next(iter(streams.values()))
    queued = [several.server.open(PATH, body([3], TOO_LONG)) for _ in range(60)]
    before, counted = several.api_pids, several.metrics()
    os.kill(victim, signal.SIGKILL)
    for connection in queued:
        connection.close()
    for (connection, pid), tokens in zip(streams.items(), answers(local, len(streams), 600), strict=True):
        with connection:
            if pid != victim:
                assert tokens_of(read_events(connection)) == tokens
    wait_until(lambda: len(several.api_pids) == 2, START)
    (heir,) = several.api_pids - before
    streams = several.begin(8, 40)
    assert heir in streams.values()
    assert [tokens_of(read_events(connection)) for connection in streams] == answers(local, len(streams), 40)
    several.wait_until_idle()
    run_at_once(several, local)  # what the dead one had in the queue takes no room there
    after = several.metrics()
    assert all(after[name] >= counted[name] for name in counted if name.endswith(("_total", "_count", "_sum")))


def test_the_death_of_the_engine(several, local):
    """G10, with --restart: every open request of every process gets an error, then all have another engine."""
    streams = several.begin(8)
    generated = several.metrics()["generation_tokens_total"]
    os.kill(several.engine_pid, signal.SIGKILL)
    for connection in streams:
        with connection:
            assert read_events(connection)[-1]["error"]["code"] == "engine_stopped"
    wait_until(lambda: all(several.server.get("/health").status == 200 for _ in range(16)), START)
    streams = several.begin(8, 40)
    assert [tokens_of(read_events(connection)) for connection in streams] == answers(local, len(streams), 40)
    several.wait_until_idle()
    totals = {several.metrics()["generation_tokens_total"] for _ in range(8)}
    assert len(totals) == 1
    assert totals.pop() >= generated + 8 * 40


def test_sigterm_lets_the_requests_of_all_processes_end(several, local):
    """G07. It ends the server."""
    streams = several.begin(8, 600)
    children = psutil.Process(several.server.process.pid).children()
    several.server.terminate()
    wait_until(lambda: all(several.refuses() for _ in range(16)))
    assert [tokens_of(read_events(connection)) for connection in streams] == answers(local, len(streams), 600)
    assert several.server.process.wait(PATIENCE) == 0
    wait_until(lambda: not any(child.is_running() for child in children))


def test_a_server_whose_engine_has_died_and_ctrl_c(tmp_path):
    """G10, G07: no process is healthy any more; the signals of a terminal reach every process, and the parent acts."""
    with served("tiny", *FLAGS[:-1], "3") as server:
        processes = Processes(server, None)
        pids = processes.api_pids
        assert len(pids) == 3
        waiting = [server.open(PATH, body([3, 4], TOO_LONG, stream=False)) for _ in range(6)]
        wait_until(lambda: processes.metrics()["num_requests_running"] == 6)
        os.kill(processes.engine_pid, signal.SIGKILL)
        for connection in waiting:
            with connection:
                assert connection.recv(4096).startswith(b"HTTP/1.1 500")
        wait_until(lambda: processes.metrics()["engine_up"] == 0)
        for path in ("/health", "/ready") * 8:
            assert server.get(path).status == 503
        assert server.post(PATH, body([3], 2)).error["code"] == "engine_stopped"
        for pid in (*pids, server.process.pid):
            os.kill(pid, signal.SIGINT)
        assert server.process.wait(PATIENCE) == 0


# The setting


@pytest.mark.parametrize("value", [0, -1, 65, 10**6])
def test_numbers_of_processes_that_are_refused(value):
    """So many as the last had the system run out of files, with no word of the setting."""
    with pytest.raises(InvalidConfig, match=rf"api_processes={value} must be in \[1, 64\]"):
        ServerSettings(api_processes=value).validate()


def test_one_process_is_all_that_other_systems_have(monkeypatch):
    monkeypatch.setattr("twostroke.server.settings.sys.platform", "darwin")
    ServerSettings(api_processes=1).validate()
    with pytest.raises(InvalidConfig, match="api_processes=2 needs Linux"):
        ServerSettings(api_processes=2).validate()


def test_an_address_in_use_is_noticed():
    """Sockets that share an address would let two servers share it."""
    for listener in (taken := bind_shared("127.0.0.1", 0, 2)):
        listener.listen()
    port = taken[0].getsockname()[1]
    with pytest.raises(OSError, match=f"port {port}: Address already in use"):
        bind_shared("127.0.0.1", port, 2)
    for listener in taken:
        listener.close()
