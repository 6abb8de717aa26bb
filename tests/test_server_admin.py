"""Pauses, sleep, and new weights of an engine that serves: G11 over HTTP, compared with an engine in this process."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
from maintained import save_model
from safetensors.torch import load_file, save_file
from serving import Response, hosted, parse_events
from trainer import ARGUMENTS, KEY, PATH, PROMPTS, Later, answers, body, do, expected, opened, state
from watching import PATIENCE, wait_until

from twostroke import Engine, EngineAsleep, InvalidRequest, InvalidWeights, SamplingParams

LONG = 300


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models of one shape."""
    folder = tmp_path_factory.mktemp("models")
    return [save_model(folder / str(seed), seed, tied=False) for seed in (1, 2)]


@pytest.fixture(scope="module", params=["sync", "async"])
def served_and_direct(request, models):
    """A server of the first model, and an engine of its own loop here."""
    arguments = ARGUMENTS | {"model": str(models[0]), "loop": request.param}
    with hosted(arguments, {"admin_keys": (KEY,)}) as server, Engine(**arguments) as engine:
        yield server, engine


@pytest.fixture
def direct(served_and_direct, models):
    _, engine = served_and_direct
    yield engine
    engine.update_weights(models[0])


@pytest.fixture
def server(served_and_direct, models):
    server, _ = served_and_direct
    yield server
    for path in ("/wake", "/resume"):
        assert do(server, path).status == 200
    assert do(server, "/update_weights", weights=str(models[0])).status == 200
    server.wait_until_idle()


class Stream:
    """A stream of many tokens that has begun; a thread reads it, as a client does."""

    def __init__(self, server: Any, prompt: list[int]) -> None:
        self._before = server.stats()["generated_tokens"]
        self._server = server
        self.tokens: list[int] = []
        self.last: Any = None
        self._connection = server.open(PATH, body(prompt, LONG, stream=True))
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        wait_until(lambda: len(self.tokens) > 3)

    def all_there(self) -> list[int]:
        """The tokens so far, with all that the engine has sampled."""
        wait_until(lambda: len(self.tokens) == self._server.stats()["generated_tokens"] - self._before)
        return list(self.tokens)

    def end(self) -> list[int]:
        self._thread.join(PATIENCE)
        assert self.last == "[DONE]", self.last
        return self.tokens

    def _read(self) -> None:
        with self._connection, self._connection.makefile("rb") as lines:
            for line in lines:
                for event in parse_events(line.strip()):
                    self.last = event
                    if event == "[DONE]":
                        return
                    self.tokens += event["choices"][0]["token_ids"]


# New weights


def test_new_weights_answer_like_an_engine_that_got_them(server, direct, models, tmp_path):
    """From a directory, a file, and some tensors alone; the version that is answered counts them."""
    file, some = tmp_path / "new.safetensors", tmp_path / "some.safetensors"
    first, second = (load_file(model / "model.safetensors") for model in models)
    save_file(second, file)
    save_file({name: tensor for name, tensor in first.items() if "k_proj" in name}, some)
    seen = [answers(server)]
    assert seen == [expected(direct)]
    version = state(server)["weight_version"]
    for weights, partial in ((models[1], False), (models[0], False), (file, False), (some, True)):
        version += 1
        got = do(server, "/update_weights", weights=str(weights), partial=partial)
        assert (got.status, got.json) == (200, {"paused": False, "asleep": False, "weight_version": version})
        direct.update_weights(weights, partial=partial)
        seen.append(answers(server))
        assert seen[-1] == expected(direct)
    assert seen[0] == seen[2]
    assert seen[1] == seen[3]
    assert seen[0] != seen[1] != seen[4] != seen[0]
    assert state(server)["weight_version"] == version


@pytest.mark.parametrize("recompute", [False, True])
def test_new_weights_amid_a_request(server, direct, models, recompute):
    """Between pause and resume, so that it is known which tokens are whose; recomputed, all before them is, too."""
    before = server.stats()["preemptions"]
    stream = Stream(server, PROMPTS[0])
    assert do(server, "/pause").json["paused"]
    early = stream.all_there()
    assert do(server, "/update_weights", weights=str(models[1]), recompute=recompute).status == 200
    assert do(server, "/resume").status == 200
    tokens = stream.end()
    assert len(tokens) == LONG
    (old,) = expected(direct, PROMPTS[:1], LONG)
    assert tokens[: len(early)] == early == old[: len(early)]
    assert tokens != old
    assert server.stats()["preemptions"] - before == recompute
    if recompute:
        direct.update_weights(models[1])
        assert tokens[len(early) :] == expected(direct, [PROMPTS[0] + early], LONG - len(early))[0]


def test_weights_that_do_not_fit_are_a_400_and_change_nothing(server, direct, models, tmp_path):
    name = "model.layers.1.self_attn.k_proj.weight"
    whole = load_file(models[1] / "model.safetensors")
    for kind, tensors in {
        "misshapen": {**whole, name: torch.ones(3, 32)},
        "missing": {key: tensor for key, tensor in whole.items() if key != name},
        "unexpected": {**whole, "model.extra": torch.ones(3)},
    }.items():
        save_file(tensors, tmp_path / kind)
    (tmp_path / "broken").write_bytes(b"\0" * 100)
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "model.safetensors.index.json").write_text('{"weight_map": {"a": 5}}')
    os.mkfifo(tmp_path / "pipe")
    version = state(server)["weight_version"]
    for weights, said in {
        "misshapen": f"{name} has shape [3, 32], the model's has [16, 32]",
        "missing": f"missing: {name}",
        "unexpected": "unexpected: model.extra",
        **dict.fromkeys(("broken", "index", "pipe", "nowhere", "x" * 300), "cannot be read"),
    }.items():
        refused = do(server, "/update_weights", weights=str(tmp_path / weights))
        check_refusal(refused, said)
    for weights in ("", "a\0b", "~nobody-of-that-name/x", "/"):
        check_refusal(do(server, "/update_weights", weights=weights), "cannot be read")
    assert state(server)["weight_version"] == version
    assert answers(server) == expected(direct)


def check_refusal(refused: Response, said: str) -> None:
    assert refused.status == 400, refused.data
    assert (refused.error["type"], refused.error["param"]) == ("invalid_request_error", "weights")
    assert refused.error["code"] == "invalid_weights"
    assert said in refused.error["message"]


def test_the_prefix_cache_is_reset(server):
    prompt = list(range(100, 150))

    def cached() -> int:
        return server.post(PATH, body(prompt, 1)).json["usage"]["prompt_tokens_details"]["cached_tokens"]

    cached()
    assert cached() > 0
    assert do(server, "/reset_prefix_cache").status == 200
    assert cached() == 0


# Pause and sleep


@pytest.mark.parametrize(("stop", "go"), [("/pause", "/resume"), ("/sleep", "/wake")])
def test_requests_wait_and_lose_no_token(server, direct, stop, go):
    """Those that run, and those that come meanwhile: they have the queue's limit, and time out."""
    stream = Stream(server, PROMPTS[1])
    got = do(server, stop)
    assert (got.status, got.json["paused"], got.json["asleep"]) == (200, stop == "/pause", stop == "/sleep")
    assert do(server, stop).status == 200
    early, steps = stream.all_there(), server.stats()["steps"]
    timed_out = server.post(PATH, body([5], 2, queue_timeout=0.1))
    assert (timed_out.status, timed_out.error["code"]) == (503, "queue_timeout")
    late = [Later(lambda prompt=prompt: server.post(PATH, body(prompt))) for prompt in PROMPTS]
    commands = server.supervisor.engine._remote
    wait_until(lambda: server.supervisor.engine._submitted - commands.begun == 3)
    full = server.post(PATH, body([5], 2))
    assert (full.status, full.error["code"]) == (429, "queue_full")
    assert server.get("/health").status == server.get("/ready").status == 200
    other = {"/sleep": "/resume", "/pause": "/wake"}[stop]
    assert do(server, other).status == 200
    time.sleep(0.05)
    assert (server.stats()["steps"], stream.tokens) == (steps, early)
    assert not any(request.done for request in late)
    assert do(server, go).json == state(server) | {"paused": False, "asleep": False}
    assert stream.end() == expected(direct, PROMPTS[1:2], LONG)[0]
    assert [request.answer().json["choices"][0]["token_ids"] for request in late] == expected(direct)


def test_a_drain_is_answered_when_all_that_had_begun_has_ended(server, direct):
    stream = Stream(server, PROMPTS[0])
    draining = Later(lambda: do(server, "/pause", mode="drain"))
    wait_until(lambda: state(server)["paused"])
    late = Later(lambda: server.post(PATH, body(PROMPTS[2])))
    assert draining.answer().json["paused"]
    assert stream.end() == expected(direct, PROMPTS[:1], LONG)[0]
    assert not late.done
    assert do(server, "/resume").status == 200
    assert late.answer().json["choices"][0]["token_ids"] == expected(direct, PROMPTS[2:])[0]


def test_a_drain_does_not_bar_the_way_to_resume_and_outlives_its_client(server):
    stream = Stream(server, PROMPTS[0])
    with opened(server, "/pause", mode="drain"):
        wait_until(lambda: state(server)["paused"])
    assert state(server)["paused"]
    assert not do(server, "/resume").json["paused"]
    assert len(stream.end()) == LONG


def test_a_sleeping_engine_takes_no_weights(server, models):
    assert do(server, "/sleep").json["asleep"]
    refused = do(server, "/update_weights", weights=str(models[1]))
    assert (refused.status, refused.error["code"]) == (409, "engine_asleep")


def test_a_sleeping_engine_drains_nothing_that_has_begun(server, direct):
    stream = Stream(server, PROMPTS[0])
    assert do(server, "/sleep").json["asleep"]
    refused = do(server, "/pause", mode="drain")
    assert (refused.status, refused.error["code"]) == (409, "engine_asleep")
    assert not do(server, "/wake").json["paused"]
    assert stream.end() == expected(direct, PROMPTS[:1], LONG)[0]


def test_metrics_and_the_page_know(server):
    do(server, "/pause")
    text = server.get("/metrics").data.decode()
    assert 'twostroke:engine_paused{model_name="small"} 1.0' in text
    assert 'twostroke:engine_asleep{model_name="small"} 0.0' in text
    version = state(server)["weight_version"]
    assert f'twostroke:weight_version{{model_name="small"}} {float(version)}' in text


# The same from Python


def test_the_front_of_an_engine_in_another_process_has_the_engine_s_methods(server, direct, models):
    remote = server.supervisor.engine
    version = remote.weight_version
    remote.pause()
    handle = remote.submit(PROMPTS[0], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    assert remote.update_weights(models[1]) == version + 1 == remote.weight_version
    remote.sleep()
    with pytest.raises(EngineAsleep, match="sleeps"):
        remote.update_weights(models[0])
    remote.wake()
    assert not handle.done
    remote.reset_prefix_cache()
    remote.resume()
    direct.update_weights(models[1])
    assert handle.result(PATIENCE).token_ids == expected(direct)[0]
    with pytest.raises(InvalidRequest, match="mode='abort' must be 'keep' or 'drain'"):
        remote.pause("abort")
    with pytest.raises(InvalidRequest, match="mode='5'"):
        remote.pause(5)
    with pytest.raises(InvalidWeights, match="a dict cannot reach an engine in another process"):
        remote.update_weights({})
