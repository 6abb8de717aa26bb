"""Replicas of the server on a Ray cluster of two nodes: prompts go where their beginning is, and replicas may die."""

from __future__ import annotations

import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from serving import MODEL, Client, read_events
from watching import wait_until

from twostroke import Engine, InvalidConfig, SamplingParams

pytest.importorskip("ray", reason="needs the packages of the extra ray")
pytestmark = pytest.mark.exhaustive

PATH = "/v1/completions"
ENGINE = {"num_blocks": 600, "max_rows": 8, "seed": 0}
REPLICAS = "ServeReplica:default:replica"


@pytest.fixture(scope="module")
def fleet(ray_cluster):
    """Two replicas, one on each node."""
    from ray import serve
    from ray_nodes import CPUS_OF_ENGINE

    from twostroke.fleet.app import FleetOptions, build

    serve.start(http_options={"port": 18273, "location": "HeadOnly"})
    options = FleetOptions(
        model="tiny",
        device="cpu",
        engine=ENGINE,
        server={"model_name": MODEL, "max_body_bytes": 50_000},
        gpus=0,
        cpus=CPUS_OF_ENGINE,
        replicas=2,
    )
    serve.run(build(options))
    yield Client("http://127.0.0.1:18273")
    serve.shutdown()


@pytest.fixture(scope="module")
def engine():
    with Engine("tiny", device="cpu", **ENGINE) as engine:
        yield engine


def body(prompt: list[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True} | fields


def prompt(number: int, length: int = 200) -> list[int]:
    return [3 + (number * 31 + place * (number + 1)) % 200 for place in range(length)]


def expected(engine: Engine, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return [output.token_ids for output in engine.generate(prompts, params)]


def cached(answer: Any) -> int:
    return answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_answers_are_those_of_the_engine(fleet, engine):
    prompts = [prompt(number) for number in range(6)]
    answers = [fleet.post(PATH, body(ids, 12, ignore_eos=True)) for ids in prompts]
    tokens = [answer.json["choices"][0]["token_ids"] for answer in answers]
    assert tokens == expected(engine, prompts, 12)
    with fleet.open(PATH, body(prompts[0], 12, ignore_eos=True, stream=True)) as connection:
        events = read_events(connection)
    assert events[-1] == "[DONE]"
    assert [token for event in events[:-1] for token in event["choices"][0]["token_ids"]] == tokens[0]


def test_prompts_go_where_their_beginning_is(fleet):
    """Sent in any order, each prompt that goes on from another finds what that one has computed."""
    first = [prompt(number, 400) for number in range(20, 32)]
    assert [cached(fleet.post(PATH, body(ids, 2))) for ids in first] == [0] * 12
    later = [cached(fleet.post(PATH, body([*ids, *prompt(50, 40)], 2))) for ids in reversed(first)]
    assert later == [400 // 16 * 16] * 12


def test_errors_are_those_of_the_server(fleet):
    for given, status, code in (
        (body([3], 2, model="other"), 404, "model_not_found"),
        (body([3], 0), 400, "invalid_value"),
        (b"{", 400, "invalid_json"),
        (body([3] * 30_000, 2), 413, "body_too_large"),
    ):
        answer = fleet.post(PATH, given)
        assert (answer.status, answer.error["code"]) == (status, code)
    assert fleet.get("/v1/models").json["data"][0]["id"] == MODEL
    assert fleet.get("/nowhere").status == 404
    assert fleet.get("/health", **{"X-Request-Id": "abc"}).headers["X-Request-Id"] == "abc"


def test_who_hangs_up_is_no_longer_worked_for(fleet):
    def cancelled() -> bool:
        lines = [line for line in fleet.get("/metrics").data.decode().splitlines() if 'reason="cancelled"' in line]
        return any("request_success_total" in line and float(line.split()[-1]) > 0 for line in lines)

    assert not cancelled()
    with fleet.open(PATH, body([3, 4], 1900, ignore_eos=True, stream=True)) as connection:
        assert connection.recv(9).startswith(b"HTTP/1.1 ")
    wait_until(cancelled)


def test_a_replica_dies(fleet, engine, ray_cluster, monkeypatch):
    """What had not begun is answered by the other one; streams that had begun say that they broke off."""
    from ray_nodes import START

    monkeypatch.setattr("serving.PATIENCE", START)
    prompts = [prompt(number) for number in range(60, 76)]
    replicas = ray_cluster.wait_for_workers(REPLICAS, 2)
    with ThreadPoolExecutor(16) as pool:
        streams = [fleet.open(PATH, body(ids, 600, ignore_eos=True, stream=True)) for ids in prompts[:8]]
        for stream in streams:
            assert stream.recv(9, socket.MSG_PEEK).startswith(b"HTTP/1.1 ")
        waiting = [pool.submit(fleet.post, PATH, body(ids, 60, ignore_eos=True)) for ids in prompts]
        os.kill(replicas[0].pid, signal.SIGKILL)
        answers = [answer.result() for answer in waiting]
        ends = [read_events(stream)[-1] for stream in streams]
    assert [answer.status for answer in answers] == [200] * 16
    assert [answer.json["choices"][0]["token_ids"] for answer in answers] == expected(engine, prompts, 60)
    broken = [end for end in ends if end != "[DONE]"]
    assert [end["error"]["code"] for end in broken] == ["engine_stopped"] * len(broken)
    assert 0 < len(broken) < 8
    ray_cluster.wait_for_workers(REPLICAS, 2)


def test_arguments_of_the_command_line_are_taken():
    import inspect

    from twostroke.fleet.app import FleetOptions, build

    kind = inspect.signature(build).parameters["options"].annotation
    assert kind is FleetOptions, "Ray Serve gives it a dictionary of strings otherwise"
    options = kind.model_validate({"model": "tiny", "replicas": "2", "gpus": "0", "device": "cpu"})
    assert (options.replicas, options.gpus, options.device) == (2, 0.0, "cpu")


def test_settings_that_replicas_do_not_have_are_refused():
    from twostroke.fleet.app import FleetOptions, build

    for name, value in (("port", 1), ("api_keys", ("x",)), ("restart", True), ("nonsense", 1)):
        with pytest.raises(InvalidConfig, match=name):
            build(FleetOptions(server={name: value}))
    with pytest.raises(InvalidConfig, match="max_samples=0"):
        build(FleetOptions(server={"max_samples": 0}))
