"""Who may do what to an engine that serves, and an update amid which its client, its engine or the server ends."""

from __future__ import annotations

import os
import signal

import pytest
from maintained import save_model
from serving import hosted
from slow_weights import run_slow_engine
from trainer import ADMIN, ARGUMENTS, KEY, PATH, PATHS, Later, answers, body, do, expected, opened, state
from watching import wait_until

from twostroke import Engine, InvalidConfig
from twostroke.errors import shown
from twostroke.server.remote_engine import RemoteEngine
from twostroke.server.settings import ServerSettings, read_admin_keys
from twostroke.server.supervisor import Supervisor


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models of one shape."""
    folder = tmp_path_factory.mktemp("models")
    return [save_model(folder / str(seed), seed, tied=False) for seed in (1, 2)]


# Who may


def test_other_keys_do_not_open_it_and_without_one_there_is_nothing(tiny_engine):
    with hosted(tiny_engine, {"api_keys": ("key-of-a-user",), "admin_keys": (KEY,)}) as server:
        for headers in ({}, {"Authorization": "Bearer key-of-a-user"}):
            for path in PATHS:
                refused = server.post(path, {}, **headers)
                assert (refused.status, refused.error["type"]) == (401, "authentication_error")
            assert server.get("/state", **headers).status == 401
        assert server.post(PATH, body([3], 2), **ADMIN).status == 401
        assert not state(server)["paused"]
    with hosted(tiny_engine, {"api_keys": (KEY,)}) as server:
        assert {server.post(path, {}, **ADMIN).status for path in PATHS} == {404}
        assert server.get("/state", **ADMIN).status == 404
        assert not {*PATHS, "/state"} & {*server.get("/openapi.json").json["paths"]}


def test_options_are_honoured_or_refused(tiny_engine):
    with hosted(tiny_engine, {"admin_keys": (KEY,)}) as server:
        check_options(server)


def check_options(server):
    assert server.request("POST", "/resume", None, ADMIN).status == 200
    for path, fields, param, code in (
        ("/pause", {"mode": "abort"}, "mode", "invalid_value"),
        ("/pause", {"tags": []}, "tags", "unknown_parameter"),
        ("/sleep", {"level": 1}, "level", "unknown_parameter"),
        ("/update_weights", {}, "weights", "missing_required_parameter"),
        ("/update_weights", {"weights": 5}, "weights", "invalid_type"),
        ("/update_weights", {"weights": "x", "partial": "yes"}, "partial", "invalid_type"),
        *((f"{path}?mode=drain", {}, "mode", "unknown_parameter") for path in PATHS),
    ):
        refused = do(server, path, **fields)
        assert (refused.status, refused.error["param"], refused.error["code"]) == (400, param, code)
    assert server.post("/pause?mode=drain", {}).status == 401
    assert server.request("POST", "/pause", b"mode=drain", ADMIN).status == 415
    assert not state(server)["paused"]


def test_where_admin_keys_come_from(tmp_path):
    file = tmp_path / "keys"
    file.write_text("one\n")
    assert read_admin_keys(file, api_key_file=None) == ("one",)
    assert read_admin_keys(None, api_key_file=None) == ServerSettings().admin_keys == ()
    assert "hidden" not in repr(ServerSettings(admin_keys=("hidden",)))


def test_a_key_of_both_kinds_is_refused(tmp_path, monkeypatch):
    """A user's key must not open what is done to the engine; no message shows it."""
    users, admins = tmp_path / "users", tmp_path / "admins"
    users.write_text("one\nhidden\n")
    admins.write_text("hidden\ntwo\n")
    with pytest.raises(InvalidConfig) as refused:
        read_admin_keys(admins, api_key_file=users)
    said = str(refused.value)
    assert shown(str(users)) in said
    assert shown(str(admins)) in said
    assert "hidden" not in said
    users.write_text("one\n")
    assert read_admin_keys(admins, api_key_file=users) == ("hidden", "two")
    monkeypatch.setenv("TWOSTROKE_API_KEY", "two")
    with pytest.raises(InvalidConfig, match="TWOSTROKE_API_KEY"):
        read_admin_keys(admins, api_key_file=users)
    with pytest.raises(InvalidConfig, match="admin_keys") as refused:
        ServerSettings(api_keys=("hidden",), admin_keys=("hidden",)).validate()
    assert "hidden" not in str(refused.value)


# What happens amid an update


@pytest.fixture
def slow(request, models, tmp_path):
    """A server whose engine, of the loop that is its parameter, reads new weights until it is told to go on."""
    arguments = ARGUMENTS | {"model": str(models[0]), "loop": request.param, "folder": str(tmp_path)}
    supervisor = Supervisor(lambda end: RemoteEngine(arguments, on_end=end, target=run_slow_engine), restart=False)
    try:
        with hosted(supervisor, {"admin_keys": (KEY,)}) as server:
            yield server
    finally:
        (tmp_path / "go").touch()
        supervisor.close()


@pytest.mark.parametrize("slow", ["sync", "async"], indirect=True)
def test_a_client_that_leaves_amid_an_update(slow, models, tmp_path):
    """All is replaced, or nothing; others are served meanwhile, and who wants the engine asleep waits."""
    with Engine(models[0], **ARGUMENTS) as engine:
        old = expected(engine)
        engine.update_weights(models[1])
        new = expected(engine)
    with opened(slow, "/update_weights", weights=str(models[1])):
        wait_until((tmp_path / "reading").exists)
    assert answers(slow) == old
    sleeping = Later(lambda: do(slow, "/sleep"))
    assert state(slow) == {"paused": False, "asleep": False, "weight_version": 0}
    (tmp_path / "go").touch()
    assert sleeping.answer().json == {"paused": False, "asleep": True, "weight_version": 1}
    assert do(slow, "/wake").status == 200
    assert answers(slow) == new != old


@pytest.mark.parametrize("slow", ["async"], indirect=True)
@pytest.mark.parametrize("end", ["death", "shutdown"])
def test_the_end_of_the_engine_or_of_the_server_amid_an_update(slow, models, tmp_path, end):
    """G10: nobody waits for ever."""
    updating = [Later(lambda: do(slow, "/update_weights", weights=str(models[1]))) for _ in range(2)]
    wait_until((tmp_path / "reading").exists)
    if end == "death":
        os.kill(slow.supervisor.engine.pid, signal.SIGKILL)
    else:
        slow.stop()
    for update in updating:
        got = update.answer()
        told = (500, "engine_stopped") if end == "death" else (503, "shutting_down")
        assert (got.status, got.error["code"]) == told
    if end == "death":
        assert do(slow, "/pause").error["code"] == "engine_stopped"
