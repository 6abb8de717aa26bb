"""`twostroke profile`: the spans of a window, the trace, the pictures, the table."""

import json
import re
import sys
import time
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from twostroke import InvalidConfig
from twostroke.build import Forward
from twostroke.cli.main import app
from twostroke.device.step_times import PHASES, StepTimes
from twostroke.trace.chrome import write_chrome_trace
from twostroke.trace.html import write_html
from twostroke.trace.png import write_png
from twostroke.trace.profile import Profile, Workload, run_profile
from twostroke.trace.spans import COMPUTE, CPU, D2H, H2D, ROWS, spans_of
from twostroke.trace.timeline import make_panels, show_seconds

WORKLOAD = Workload(rows=3, prompt_tokens=5, max_tokens=16)
PADDING = 0.02
"""Seconds that a padded step sleeps: far more than the CPU needs for a step."""


@pytest.fixture(scope="module")
def profiles():
    """Both loops over steps that are long beside the CPU's work."""
    torch.set_num_threads(1)
    forward = Forward.__call__

    def padded(self, step):
        time.sleep(PADDING)
        return forward(self, step)

    options = {"model": "tiny", "device": "cpu", "seed": 0}
    with mock.patch.object(Forward, "__call__", padded):
        return {loop: run_profile(loop, WORKLOAD, 100, options) for loop in ("sync", "async")}


def rows_of(spans):
    rows = {row: [] for row in ROWS}
    for span in sorted(spans, key=lambda span: (span.begin, span.end)):
        rows[span.row].append(span)
    return rows


def made_up(steps=6, period=5e-3, gap=1e-3, skews=(0.0,)):
    """A synchronous window on whose device the clock is off by `skews`, in turn; the input comes half a `gap` early."""
    window = []
    for step in range(steps):
        skew, zero = skews[step % len(skews)], step * period
        device = zero - skews[0]
        window.append(
            StepTimes(
                step=step,
                lanes=1,
                prompt_tokens=0,
                rested=False,
                free_at=zero - 0.8 * gap,
                plan=(zero - 0.8 * gap, zero - 0.6 * gap),
                fill=(zero - 0.6 * gap, zero - 0.5 * gap),
                queue=(zero - 0.5 * gap, zero - 0.1 * gap),
                queued_at=zero - 0.25 * gap,
                wait=(zero - 0.1 * gap, zero + period - 0.9 * gap),
                commit=(zero + period - 0.9 * gap, zero + period - 0.8 * gap),
                arrived_at=device,
                compute=(device, device + period - gap),
                gap=gap,
                skew=skew,
                h2d=(device - 0.2 * gap, device),
                d2h=(device + period - gap, device + period - 0.95 * gap),
            )
        )
    idle = {"plan": 1.0, "h2d": 0.5, "commit": 0.5, "launch": 0.0, "capture": 0.0, "weights": 0.0, "nothing": 9.0}
    return Profile("sync", 10.0, steps, 0.8, 8.0, idle, window)


@pytest.mark.parametrize("loop", ["sync", "async"])
def test_the_window_holds_consecutive_steady_steps(profiles, loop):
    profile = profiles[loop]
    steps = [times.step for times in profile.window]
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    assert len(steps) == WORKLOAD.max_tokens - 1
    assert profile.steps == WORKLOAD.max_tokens


@pytest.mark.parametrize("loop", ["sync", "async"])
def test_every_step_has_its_spans_and_none_of_one_row_overlap(profiles, loop):
    window = profiles[loop].window
    spans = spans_of(window)
    kinds = Counter((span.row, span.kind) for span in spans if not span.idle)
    assert kinds == {(row, kind): len(window) for row, kind in [(CPU, p) for p in PHASES] + DEVICE_SPANS}
    for row in rows_of(spans).values():
        assert all(before.end <= after.begin + 1e-9 for before, after in pairwise(row))
    assert all(span.begin <= span.end for span in spans)


DEVICE_SPANS = [(H2D, "copy"), (COMPUTE, "step"), (D2H, "copy")]


@pytest.mark.parametrize("loop", ["sync", "async"])
def test_a_step_passes_the_rows_in_order(profiles, loop):
    """Plan, fill, copy in, compute, copy out, commit."""
    spans = {(span.step, span.row, span.kind): span for span in spans_of(profiles[loop].window) if not span.idle}
    for times in profiles[loop].window:
        path = [(CPU, "plan"), (CPU, "fill"), *DEVICE_SPANS, (CPU, "commit")]
        way = [spans[times.step, *place] for place in path]
        assert all(before.end <= after.begin for before, after in pairwise(way))


@pytest.mark.parametrize("loop", ["sync", "async"])
def test_steps_and_idle_stretches_fill_the_compute_row(profiles, loop):
    row = rows_of(spans_of(profiles[loop].window))[COMPUTE]
    assert all(before.end == pytest.approx(after.begin, abs=1e-6) for before, after in pairwise(row))


def test_the_asynchronous_loop_plans_while_the_step_before_runs(profiles):
    def early(loop):
        return [after.plan[0] < before.compute[1] for before, after in pairwise(profiles[loop].window)]

    assert not any(early("sync"))
    assert sum(early("async")) > len(early("async")) / 2


def test_what_the_synchronous_loop_idles_for_the_asynchronous_one_hides(profiles):
    """The steps are long beside the CPU's work, which then hides behind them."""

    def waited(loop, *causes):
        spans = spans_of(profiles[loop].window)
        return sum(span.end - span.begin for span in spans if span.idle and span.cause in causes)

    assert waited("sync", "commit") > 0
    assert waited("sync", "plan") > 0
    assert waited("async", "commit", "plan", "h2d") < waited("sync", "commit", "plan", "h2d") / 2


def test_a_changed_skew_does_not_tear_the_device_rows():
    spans = spans_of(made_up(skews=(5.0, 5.0, 4.999)).window)
    for row in rows_of(spans).values():
        assert all(before.end <= after.begin + 1e-9 for before, after in pairwise(row))
    assert [s.begin for s in spans if s.kind == "step"] == pytest.approx([step * 5e-3 for step in range(6)])


def test_the_trace_is_what_viewers_read(profiles, tmp_path):
    path = tmp_path / "trace.json"
    write_chrome_trace(list(profiles.values()), path)
    events = json.loads(path.read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {(pid, tid): row for pid in (1, 2) for tid, row in enumerate(ROWS, 1)}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {1: "sync loop", 2: "async loop"}
    complete = [e for e in events if e["ph"] == "X"]
    assert min(e["ts"] for e in complete) == 0
    assert all(e["dur"] >= 0 for e in complete)
    for place, row in names.items():
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in complete if (e["pid"], e["tid"]) == place)
        assert own, row
        assert all(before[1] <= after[0] + 0.01 for before, after in pairwise(own))
    (step,) = [e for e in complete if e["pid"] == 1 and e["name"] == f"step {profiles['sync'].window[3].step}"]
    assert step["dur"] >= 1e6 * PADDING


def test_panels_share_one_scale_and_show_steps_on_every_row(profiles):
    panels = make_panels(list(profiles.values()))
    assert len({panel.seconds for panel in panels}) == 1
    for panel in panels:
        assert all(0 <= span.begin <= span.end <= panel.seconds for span in panel.spans)
        assert {span.row for span in panel.spans} == set(ROWS)
        # A busy machine can stretch a step over most of a panel: how many are shown is tested with made-up times.
        assert any(span.kind == "step" for span in panel.spans)


def test_a_gap_is_labelled_with_its_length_and_main_causes():
    (panel,) = make_panels([made_up()])
    assert panel.seconds == pytest.approx(15e-3)
    assert len([span for span in panel.spans if span.kind == "step"]) >= 3
    gaps = panel.gaps()
    assert [gap.end - gap.begin for gap in gaps] == pytest.approx([1e-3] * len(gaps))
    assert {gap.kind for gap in gaps} == {"plan + h2d + commit"}  # 55%, 25% and 20% of the gap
    assert panel.title == "sync loop: compute active 80.0%, idle 20.0% of the run (plan 10.0%, h2d 5.0%, commit 5.0%)"


def test_gaps_too_short_to_see_have_no_label():
    (panel,) = make_panels([made_up(gap=5e-6)])
    assert panel.gaps() == []


@pytest.mark.parametrize(("seconds", "shown"), [(4e-6, "4 µs"), (0.99e-3, "990 µs"), (1.234e-3, "1.23 ms")])
def test_durations_read_well(seconds, shown):
    assert show_seconds(seconds) == shown


class Page(HTMLParser):
    """Collects the tags of a page, and checks that they close."""

    VOID = ("meta", "rect", "line")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_stands_alone_and_tells_durations(profiles, tmp_path):
    path = tmp_path / "timeline.html"
    panels = make_panels(list(profiles.values()))
    write_html(panels, path)
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert not re.search(r"https?:|src=|@import|<link", text)
    assert "prefers-color-scheme: dark" in text
    assert text.index("sync loop") < text.index("async loop")
    tips = [attributes["data-tip"] for _, attributes in page.tags if "data-tip" in attributes]
    assert len(tips) == sum(len(panel.spans) for panel in panels)
    assert any(re.fullmatch(r"compute: idle: \w+, (\d+ µs|\d+\.\d\d ms), at [\d.]+ ms", tip) for tip in tips)
    assert any(re.fullmatch(r"compute: step \d+, [2-9]\d\.\d\d ms, at [\d.]+ ms", tip) for tip in tips)


def test_the_picture_is_drawn(profiles, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "timeline.png"
    write_png(make_panels(list(profiles.values())), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


# The command


def run(*arguments: object):
    return CliRunner().invoke(app, ["profile", "--model", "tiny", "--device", "cpu", *map(str, arguments)])


def test_the_command_writes_its_files_and_prints_idle_time_by_cause(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "folder"
    done = run("--rows", 2, "--prompt-tokens", 4, "--max-tokens", 12, "--out", out)
    assert done.exit_code == 0, done.output
    assert {path.name for path in out.iterdir()} == {"trace.json", "timeline.html", "timeline.png"}
    header, sync, other = [line for line in done.stdout.splitlines() if line][:3]
    assert re.findall(r"idle: (\w+) ms", header) == ["plan", "h2d", "commit", "launch", "capture", "weights", "nothing"]
    assert re.match(r"sync +\d+\.\d{3} +12 +\d+\.\d% +\d+\.\d( +\d+\.\d\d){7}$", sync)
    assert other.startswith("async")


def test_one_loop_and_no_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = run("--loop", "async", "--rows", 2, "--prompt-tokens", 4, "--max-tokens", 12, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert "pip install 'twostroke[profile]'" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"trace.json", "timeline.html"}
    assert "sync loop" not in (tmp_path / "timeline.html").read_text().replace("async loop", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--loop", "fast"], "loop='fast'"),
        (["--rows", 0], "rows=0"),
        (["--max-tokens", 2], "max_tokens=2"),
        (["--slots", 0], "slots=0"),
    ],
)
def test_what_cannot_be_profiled_is_refused_by_name(tmp_path: Path, arguments: list[object], message: str) -> None:
    done = run(*arguments, "--out", tmp_path)
    assert done.exit_code == 2
    assert message in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_short_window_keeps_the_last_steps() -> None:
    profile = run_profile("async", WORKLOAD, 5, {"model": "tiny", "device": "cpu", "seed": 0})
    assert len(profile.window) == 5
    with pytest.raises(InvalidConfig, match="max_tokens=2"):
        run_profile("sync", Workload(2, 4, 2), 5, {"model": "tiny", "device": "cpu", "seed": 0})
