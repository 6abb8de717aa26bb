"""`twostroke chat`: with an engine and with a server, through pipes and on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from serving import hosted
from terminal import PATIENCE, on_terminal
from typer.testing import CliRunner

from twostroke import Engine, SamplingParams
from twostroke.cli.conversation import Conversation
from twostroke.cli.main import app
from twostroke.cli.speakers import _as_json

SAMPLING = ("--temperature", "0", "--max-tokens", "12", "--ignore-eos")
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def chat(said: str, *flags: object):
    return CliRunner().invoke(app, ["chat", *map(str, flags)], input=said)


@pytest.fixture(scope="module")
def engine_flags(small_dir):
    return "--model", small_dir, "--device", "cpu", "--num-blocks", "200"


@pytest.fixture(scope="module")
def expected(small_dir):
    """What three turns and one after a reset are answered."""
    with Engine(small_dir, device="cpu", num_blocks=200) as engine:
        chat = [{"role": "system", "content": "Be brief."}]
        answers = []
        for line in ("Hello!", "Grüße, 世界 🙂", "Why?"):
            chat.append({"role": "user", "content": line})
            answers.append(engine.generate(chat, PARAMS)[0].text)
            chat.append({"role": "assistant", "content": answers[-1]})
        again = [chat[0], {"role": "user", "content": "Why?"}]
        return [*answers, engine.generate(again, PARAMS)[0].text]


LINES = "Hello!\n\n  Grüße, 世界 🙂  \nWhy?\n/reset\nWhy?\n/quit\nnever\n"


def test_pipes(engine_flags, expected):
    """Each turn knows those before it; only answers are on the output."""
    result = chat(LINES, *engine_flags, *SAMPLING, "--system", "Be brief.")
    assert result.exit_code == 0, result.output
    assert result.stdout == "".join(f"{answer}\n" for answer in expected)
    assert expected[2] != expected[3]


def test_a_server(server, expected):
    for url in (server.url, f"{server.url}/v1/"):
        result = chat(LINES, "--url", url, *SAMPLING, "--system", "Be brief.")
        assert result.exit_code == 0, result.output
        assert result.stdout == "".join(f"{answer}\n" for answer in expected)
    choice = chat("Hello!\n", "--url", server.url, "--choice", "yes", "--choice", "no")
    assert choice.stdout in ("yes\n", "no\n")


def test_a_server_is_told_how_long_an_answer_may_be():
    """Though it is the usual length: a server's own bound for a chat is the context."""
    assert _as_json(SamplingParams()) == {"max_tokens": SamplingParams().max_tokens}


def test_what_fails_is_said_and_the_rest_goes_on(server, engine_flags, expected):
    """A line that is too long is as if it had not been said; the exit code tells of it."""
    lines = f"Hello!\n{'long ' * 3000}\nGrüße, 世界 🙂\n"
    for flags in (("--url", server.url), engine_flags):
        result = chat(lines, *flags, *SAMPLING, "--system", "Be brief.")
        assert (result.exit_code, result.stdout) == (1, f"{expected[0]}\n{expected[1]}\n")
        assert result.stderr.startswith("twostroke: ")
        assert "max_model_len" in result.stderr


def test_what_looks_like_a_command_is_not_said_to_the_model(engine_flags, expected):
    """But what only begins with a slash is, and so is what has a second one."""
    result = chat("Hello!\n/foo\n/reset now\nGrüße, 世界 🙂\n", *engine_flags, *SAMPLING, "--system", "Be brief.")
    assert (result.exit_code, result.stdout) == (1, f"{expected[0]}\n{expected[1]}\n")
    known = "is no command: there are /reset and /quit, each alone on its line; "
    assert result.stderr.splitlines() == [
        f"twostroke: /foo {known}//foo says it to the model",
        f"twostroke: /reset {known}//reset says it to the model",
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [("//foo bar", "/foo bar"), ("/etc/hosts?", "/etc/hosts?"), ("/2", "/2"), ("// a", "// a"), ("a /b", "a /b")],
)
def test_slashes_that_are_no_commands(monkeypatch, line, said):
    heard = []

    class Listener:
        def answer(self, messages):
            heard.append(messages[-1]["content"])
            yield "yes"

    monkeypatch.setattr("sys.stdin", io.StringIO(f"{line}\n"))
    Conversation(Listener(), None, Console(file=io.StringIO())).run()
    assert heard == [said]


def test_the_key(tiny_engine, tmp_path):
    file = tmp_path / "key"
    file.write_text("secret\n")
    with hosted(tiny_engine, {"api_keys": ("secret",)}) as server:
        refused = chat("Hi\n", "--url", server.url)
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert "API key" in refused.stderr
        known = chat("Hi\n", "--url", server.url, "--api-key-file", file)
        assert "no tokenizer" in known.stderr  # that far it came
        assert "API key" not in known.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--url", "localhost:8000"), "url='localhost:8000'"),
        (("--url", "http://127.0.0.1:9", "--num-blocks", "7"), "num_blocks=7"),
        (("--api-key-file", "x"), "api_key_file='x'"),
        (("--n", "2"), "n=2"),
        (("--logprobs", "1"), "logprobs=1"),
        (("--model", "tiny", "--device", "cpu", "--num-blocks", "60"), "no tokenizer"),
    ],
    ids=str,
)
def test_what_it_does_not_begin_with(flags, message):
    result = chat("Hi\n", *flags)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_no_server():
    result = chat("Hi\n", "--url", "http://127.0.0.1:9")
    assert result.exit_code == 1
    assert "127.0.0.1:9" in result.stderr


@pytest.mark.parametrize("where", ["engine", "server"])
def test_on_a_terminal(where, engine_flags, server):
    """Ctrl-C stops an answer, and not the program; what was said of it belongs to the chat."""
    flags = ("--url", server.url) if where == "server" else tuple(map(str, engine_flags))
    with on_terminal("chat", *flags, "--ignore-eos", "--temperature", "0") as (process, terminal):
        terminal.expect("> ")
        terminal.type("Hello!\n")
        terminal.expect("\n")  # what was typed
        begun = terminal.expect(" ", count=3)
        assert "stopped" not in begun
        terminal.type("\x03")
        terminal.expect("(stopped)")
        terminal.expect("> ")
        terminal.type("\x03")
        terminal.expect("/quit or Ctrl-D ends")
        terminal.expect("> ")
        terminal.type("/quit\n")
        assert process.wait(PATIENCE) == 0
