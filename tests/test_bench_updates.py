"""`--update-every` on the CPU with a tiny model: weights come while it runs, and every figure has its number."""

import json

import pytest
import torch
from engines import MODES, running
from typer.testing import CliRunner
from watching import wait_until

from twostroke import SamplingParams, TwostrokeError
from twostroke.bench import offline
from twostroke.bench.ceilings import Ceilings
from twostroke.bench.offline_workloads import WORKLOADS, Workload
from twostroke.bench.result import Result
from twostroke.bench.summary import table_of
from twostroke.bench.updates import Updates, measure_updates, versions_fit
from twostroke.cli.main import app

PROMPTS = [[5, 6, 7], list(range(20, 50)), [9]]
PARAMS = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in (120, 100, 80)]


@pytest.mark.parametrize(("mode", "impl"), [*((mode, "native") for mode in MODES), ("async", "transformers")])
def test_a_run_with_its_own_weights_written_anew_gives_the_same_tokens(mode, impl):
    with running(mode, impl=impl, num_blocks=64) as engine:
        expected = [output.token_ids for output in engine.generate(PROMPTS, PARAMS, progress=False)]
        weights = engine.model.copy_weights()
        for _ in range(2):  # what is written after the end of a run is none of the next one's pauses
            measured, figures = measure_updates(engine, PROMPTS, PARAMS, weights, every=10)
            assert [output.token_ids for output in measured.outputs] == expected
            assert 1 <= figures["updates"] <= 12
            assert figures["versions_fit"]
            assert figures["preemptions"] == 0
            assert len(figures["pauses_ms"]) == len(figures["writes_ms"]) == figures["updates"]
            for pause, write in zip(figures["pauses_ms"], figures["writes_ms"], strict=True):
                assert 0 < write <= pause
            assert 0 < figures["pause_p50_ms"] <= figures["pause_max_ms"] == max(figures["pauses_ms"])
            assert 0 < figures["write_p50_ms"] <= figures["write_max_ms"]
            assert 100 * measured.active < figures["active_or_writing_percent"] <= 100
            assert measured.seconds - figures["seconds_less_pauses"] == pytest.approx(1e-3 * sum(figures["pauses_ms"]))
            assert measured.idle["weights"] >= 1e-3 * sum(figures["writes_ms"]) - 1e-9
        assert engine._parts.runner.activity.window is None


def test_too_few_steps_for_an_update_are_a_run_without():
    with running("async", num_blocks=64) as engine:
        _, figures = measure_updates(engine, PROMPTS, PARAMS, engine.model.copy_weights(), every=1000)
    assert (figures["updates"], figures["pause_p50_ms"], figures["pause_max_ms"]) == (0, None, None)
    assert figures["versions_fit"]


def test_an_update_that_fails_is_an_error_of_the_run():
    with running("async", num_blocks=64) as engine:
        weights = engine.model.copy_weights() | {"extra": torch.ones(1)}
        with pytest.raises(TwostrokeError, match="extra"):
            measure_updates(engine, PROMPTS, PARAMS, weights, every=10)


@pytest.mark.parametrize("mode", MODES)
def test_steps_that_come_after_the_end_hurt_nobody(mode):
    """Those in flight when Ctrl-C came, or when the last request met its stop id."""
    with running(mode, num_blocks=64) as engine:
        expected = engine.generate(PROMPTS, PARAMS, progress=False)
        updates = Updates(engine, engine.model.copy_weights(), every=1)
        handles = engine.start(PROMPTS, PARAMS)
        with pytest.raises(KeyboardInterrupt), updates:
            interrupt_when(lambda: updates.after)
        version, counted = engine.weight_version, len(updates.after)
        updates.append(updates.after[-1])
        assert [handle.result().token_ids for handle in handles] == [output.token_ids for output in expected]
        assert (engine.weight_version, len(updates.after)) == (version, counted)


def test_an_interrupt_is_told_rather_than_an_update_that_failed():
    with running("async", num_blocks=64) as engine:
        updates = Updates(engine, {"extra": torch.ones(1)}, every=1)
        engine.start([PROMPTS[0]], PARAMS[:1])
        with pytest.raises(KeyboardInterrupt), updates:
            interrupt_when(lambda: any(update.done() for update in updates._updates))
        assert any(update.exception() for update in updates._updates if not update.cancelled())


def interrupt_when(condition):
    wait_until(condition)
    raise KeyboardInterrupt


class Stub:
    def __init__(self, *versions: tuple[int, int]) -> None:
        self.weight_versions = list(versions)
        self.token_ids = [0] * 10


@pytest.mark.parametrize(
    ("outputs", "fit"),
    [
        ([Stub((3, 4), (4, 6)), Stub((4, 5), (5, 5))], True),
        ([Stub((3, 4), (5, 6)), Stub((4, 10))], False),
        ([Stub((3, 4), (4, 5)), Stub((4, 5), (5, 5))], False),
        ([Stub((3, 4), (4, 6))], False),
        ([Stub((3, 2), (4, 2), (5, 2), (6, 4))], False),
    ],
    ids=["all", "one left out", "a token without", "the last one nowhere", "one too many"],
)
def test_versions_fit_if_each_update_gave_tokens(outputs, fit):
    assert versions_fit(outputs, first=3, updates=2) == fit


def test_the_cache_holds_the_longest_requests_that_run_at_once():
    workload = Workload("tiny", [[1] * 10, [1], [1] * 30], [6, 1, 3], 0.0, max_rows=2, max_model_len=100)
    assert workload.blocks(16) == 1 + 1 + 3
    assert WORKLOADS["rollouts-16384"]().blocks(16) == 1 + 32 * 1040


def test_the_command_measures_an_offline_workload(monkeypatch, tmp_path):
    workload = Workload("tiny", PROMPTS, [120, 120, 100], 0.0, max_rows=3, max_model_len=256)
    monkeypatch.setitem(offline.WORKLOADS, "article-512", lambda: workload)
    monkeypatch.setattr(offline, "need_cuda", lambda name: None)
    monkeypatch.setattr(offline, "measure_ceilings", lambda: Ceilings(1e9, 1e9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "CPU")
    arguments = ["--loop", "async", "--repetitions", "1", "--update-every", "8", "--json", str(tmp_path)]
    done = CliRunner().invoke(app, ["bench", "article-512", *arguments])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("article-512, new weights every 8 steps on CPU")
    (path,) = tmp_path.iterdir()
    columns = table_of(Result.read(path)).columns
    assert {"updates", "pause p50 ms", "pause max ms", "write p50 ms", "active or writing percent"} <= set(columns)
    assert "pauses ms" not in columns, "a list in a cell"
    read = json.loads(path.read_text())
    (run,) = read["runs"]
    assert (read["workload"]["update_every"], read["workload"]["num_blocks"]) == (8, workload.blocks(16))
    assert run["tokens"] == 340
    assert run["extra"]["versions_fit"]
    assert all(value is not None for value in run["extra"].values())
