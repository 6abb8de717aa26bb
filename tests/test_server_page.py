"""The page at `/` in a real browser, what it is told by /live, and what that costs the loop."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import time
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import pytest
from browser import CHROMIUM, browser
from serving import hosted, parse_events, served
from watching import wait_until

from twostroke import Engine, SamplingParams
from twostroke.server.page import PAGE
from twostroke.trace.colors import CAUSE_COLORS, PHASE_COLORS, STEP_COLORS
from twostroke.trace.glimpse import Glimpse

PATH = "/v1/completions"
KEY = "a-key-for-the-page"


def body(**fields: Any) -> dict[str, Any]:
    return {"prompt": [3, 4], "max_tokens": 1500, "ignore_eos": True, "stream": True} | fields


class Watcher:
    """Reads /live."""

    def __init__(self, server: Any) -> None:
        self._connection = http.client.HTTPConnection(*server.address, timeout=60)
        self._connection.request("GET", "/live")
        self.response = self._connection.getresponse()

    def next(self) -> Any:
        (event,) = parse_events(self.response.readline() + self.response.readline())
        return event

    def close(self) -> None:
        self.response.close()
        self._connection.close()


def test_what_is_to_be_seen(tiny_engine):
    with hosted(tiny_engine, {"gpu_price": 2.0}) as server:
        watcher = Watcher(server)
        first = watcher.next()
        assert (first["model"], first["gpu_price"], first["engine"]["spans"]) == ("small", 2.0, [])
        assert first["engine"]["stats"]["running"] == 0
        with server.open(PATH, body()):
            wait_until(lambda: len(watcher.next()["engine"]["spans"]) > 20)
            seen = watcher.next()["engine"]
            assert seen["stats"]["running"] == 1
            assert {row for row, *_ in seen["spans"]} == {"CPU", "H2D", "compute", "D2H"}
            assert min(begin for *_, begin, _ in seen["spans"]) == 0
            for row in ("CPU", "compute"):  # spans of a row do not overlap
                ordered = sorted(span[3:] for span in seen["spans"] if span[0] == row)
                assert all(before[1] <= after[0] + 1e-3 for before, after in pairwise(ordered))
            wait_until(lambda: watcher.next()["engine"]["stats"]["steps"] > seen["stats"]["steps"])
        watcher.close()


def test_many_watchers_cost_as_much_as_one(tiny_engine, monkeypatch):
    with hosted(tiny_engine) as server, ExitStack() as stack:
        asked = []
        engine = server.supervisor.engine
        ask = engine.ask_look
        monkeypatch.setattr(engine, "ask_look", lambda: asked.append(time.monotonic()) or ask())
        watchers = [Watcher(server) for _ in range(8)]
        for watcher in watchers:
            stack.callback(watcher.close)
        for _ in range(4):
            assert len({str(watcher.next()["engine"]["time"]) for watcher in watchers}) <= 2
        assert len(asked) <= 8


def test_watchers_do_not_hold_up_the_end(tiny_engine):
    """The stream ends as one that is complete, rather than being cut off when all time is over."""
    with hosted(tiny_engine) as server:
        watcher = Watcher(server)
        watcher.next()
    watcher.response.read()
    assert watcher.response.isclosed()


def test_a_glimpse_is_all_that_is_kept():
    """Nobody looks: no step's copies are metered, and no times kept. Somebody does: a few are, once for each look."""
    with Engine("tiny", device="cpu", num_blocks=64, seed=0) as engine:
        activity = engine._parts.runner.activity
        glimpse = Glimpse(activity, 5)

        def run(tokens: int) -> None:
            engine.generate([3, 4], SamplingParams(max_tokens=tokens, ignore_eos=True), progress=False)

        run(20)
        assert (list(glimpse.look()), activity.window) == ([], glimpse)
        run(20)
        assert activity.window is None
        seen = glimpse.look()
        assert len(seen) == 5
        assert all(times.h2d is not None for times in seen)
        assert glimpse.look() == seen  # nothing came since
        run(2)  # fewer than were asked for: they stay
        few = [times.step for times in glimpse.look()]
        run(20)
        assert [times.step for times in glimpse.look()][: len(few)] == few
        assert 0 < len(few) < 5


def test_the_page_needs_nothing_else():
    text = PAGE.decode()
    assert re.findall(r"https?://[^\"' )]+", text) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=(?!\"data:)", text)
    assert "localStorage" not in text
    assert "innerHTML" not in text  # what a model says is text


def test_the_page_has_the_colors_of_profiles():
    for name, color in (PHASE_COLORS | CAUSE_COLORS).items():
        assert f'{name}: "{color}"' in PAGE.decode()
    assert all(f'"{color}"' in PAGE.decode() for color in STEP_COLORS)


ENDLESSLY = """
const plainly = window.fetch;
window.fetch = (url, options) => plainly(
  url, options.body ? {...options, body: JSON.stringify({...JSON.parse(options.body), ignore_eos: true})} : options
);
"""
"""Lets the model say more than it has to."""


@pytest.fixture(scope="module")
def page(small_dir, tmp_path_factory):
    """The page of a server that wants a key, and whose answers last for as long as the test looks at them."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    lasting = shutil.copytree(small_dir, tmp_path_factory.mktemp("lasting"), dirs_exist_ok=True)
    config = json.loads((lasting / "config.json").read_text()) | {"max_position_embeddings": 1 << 14}
    (lasting / "config.json").write_text(json.dumps(config))
    flags = ("--num-blocks", "1100", "--max-rows", "4", "--gpu-price", "3", "--no-log-requests")
    with (
        served(lasting, *flags, TWOSTROKE_API_KEY=KEY) as server,
        browser(tmp_path_factory.mktemp("browser")) as page,
    ):
        page.look(width=1200, height=900)
        page.open(server.url)
        yield page


def ask(page: Any, text: str) -> None:
    page.run(f"document.getElementById('say').value = {text!r}")
    page.run("document.getElementById('ask').requestSubmit()")


def test_the_page_in_a_browser(page, tmp_path):
    # It asks for the key, and forgets a wrong one.
    for key in ("wrong", KEY):
        page.wait_for("!document.getElementById('lock').hidden")
        page.run(f"document.getElementById('key').value = '{key}'")
        page.run("document.getElementById('unlock').requestSubmit()")
    page.wait_for("document.querySelectorAll('#cards .card').length === 7")
    assert page.run("document.getElementById('lock').hidden")
    assert (
        page.run("localStorage.length + sessionStorage.length + document.cookie.length + location.search.length") == 0
    )
    page.wait_for("document.getElementById('state').textContent === 'resting'")

    # The chat answers, as long as it may; meanwhile the timeline moves.
    page.run(ENDLESSLY)
    ask(page, "Tell me all of it.")
    page.wait_for("document.querySelectorAll('#timeline rect').length > 20")
    first = page.run("document.getElementById('span').textContent")
    page.wait_for(f"document.getElementById('span').textContent !== {first!r}")
    page.wait_for("document.querySelectorAll('#cards b')[2].textContent === '1 / 4'")
    assert page.run("document.getElementById('state').textContent") == "working"
    rows = page.run("[...document.querySelectorAll('#timeline > text')].map((text) => text.textContent)")
    assert {"CPU", "H2D", "compute", "D2H"} <= set(rows)
    page.wait_for("document.querySelector('#talk p:not(.user)').textContent.length > 30")
    page.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000

    # Stopped, it is stopped in the engine too, and what was said belongs to the chat.
    page.run("document.getElementById('ask').requestSubmit()")
    page.wait_for("document.querySelectorAll('#cards b')[2].textContent === '0 / 4'")
    page.wait_for("document.getElementById('send').textContent === 'Send'")
    assert page.run("chat.map((message) => message.role)") == ["user", "assistant"]
    assert page.run("chat[1].content === document.querySelector('#talk p:not(.user)').textContent")
    page.run("document.getElementById('temperature').value = -1")
    ask(page, "And then?")
    assert "temperature=-1" in page.wait_for("document.querySelector('#talk .wrong')?.textContent")
    assert page.run("chat.length") == 2

    # A phone at night: nothing is wider than the screen.
    page.look(width=390, height=844, dark=True, phone=True)
    page.wait_for("document.getElementById('timeline').getAttribute('viewBox').split(' ')[2] < 390")
    assert page.run("document.documentElement.scrollWidth") == 390
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"

    # Neither a script's error nor anything that its own policy forbids: only the answers 401 and 400.
    assert len(page.messages) == 2 + 1, page.messages
    assert all("status of 40" in message for message in page.messages), page.messages
