"""`cpu-step`: what it measures; and, by counting calls, that the Python work of a step does not grow with rows."""

import numpy as np
import pytest
from calls import count_calls

from twostroke.bench import cpu_step
from twostroke.bench.cpu_step import Case, run_case
from twostroke.bench.options import BenchOptions
from twostroke.bench.result import Run
from twostroke.device.layout import input_capacity, pack
from twostroke.plan import Flag, StepOutput
from twostroke.request import Sample
from twostroke.scheduler.scheduler import Scheduler


@pytest.mark.parametrize("loop", ["sync", "async"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_case_reports_all_phases(loop: str, streamed: bool) -> None:
    run = run_case(Case(rows=8, waiting=5, streamed=streamed, steps=40), loop, slots=2)
    assert (run.rows, run.waiting, run.tokens, run.loop) == (8, 5, 320, loop)
    assert set(run.cpu_us) == {"plan", "fill", "commit"}
    assert all(us > 0 for us in run.cpu_us.values())
    beside = [run.extra[f"{phase}_us"] for phase in ("queueing", "hand_off", "reading")]
    assert all(us > 0 for us in beside)
    assert run.extra["wall_us"] + sum(beside) <= 1e6 * run.seconds / 40 * 1.2, "phases overlap"


def test_only_steady_steps_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are added in the measured steps, prompts and warm-up lie outside, and the queue does not move."""
    seen = []

    class Spy(cpu_step.Watch):
        def planned(self, plan) -> None:
            super().planned(plan)
            seen.append((plan, self._in_window(plan.step)))

    monkeypatch.setattr(cpu_step, "Watch", Spy)
    run_case(Case(rows=32, waiting=3, streamed=False, steps=48), "async", slots=2)
    window = [plan for plan, counted in seen if counted]
    assert len(window) == 48
    assert all(plan.num_lanes == 32 and not len(plan.chunks) and not len(plan.joins) for plan in window)
    assert all(len(plan.block_deltas) == 2 for plan in window)


def test_the_benchmark_runs_every_case_it_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Case] = []

    def note(case: Case, loop: str, slots: int) -> Run:
        asked.append(case)
        return Run(engine="twostroke", loop=loop, seconds=1.0, tokens=1)

    monkeypatch.setattr(cpu_step, "run_case", note)
    cpu_step.run("cpu-step", BenchOptions(repetitions=1, loops=("async",)), lambda line: None)
    full = [(case.rows, case.waiting, case.streamed) for case in asked if case.windows == (0,)]
    assert sorted(full) == [(r, w, s) for r in (32, 256, 1024) for w in (0, 10_000) for s in (False, True)]
    assert [case.rows for case in asked if len(case.windows) > 1] == [32, 256, 1024]
    assert all(case.steps >= 512 for case in asked)


def calls_of_steady_steps(
    rows: int, waiting: int, streamed: bool, windows: tuple[int, ...] = (0,), steps: int = 48
) -> int:
    """Calls, of Python and of C functions, that plan, pack and commit make in so many steady steps."""
    sizes = {"max_rows": rows, "max_step_tokens": 20_000, "max_model_len": 4096, "block_size": 16}
    scheduler = Scheduler(**sizes, num_blocks=1 + 256 * rows * len(windows), windows=windows)
    samples = [Sample(cpu_step.make_request(index)) for index in range(rows + waiting)]
    for sample in samples:
        scheduler.submit(sample)
    for sample in samples[:rows] if streamed else ():
        scheduler.stream(sample)
    words = np.empty(input_capacity(**sizes, num_groups=len(windows)), np.int32)

    def step() -> None:
        plan = scheduler.plan()
        pack(plan, words)
        outputs = plan.num_lanes + len(plan.sampling_chunks())
        scheduler.commit(plan, StepOutput(np.zeros(outputs, np.int32), np.full(outputs, Flag.TOKEN, np.int32)))

    for _ in range(3 + 2 * max(windows)):
        step()

    def some_steps() -> None:
        for _ in range(steps):
            step()

    calls = count_calls(some_steps)
    assert scheduler.stats().running == rows
    return calls


@pytest.mark.parametrize("streamed", [False, True])
def test_a_steady_step_makes_as_many_calls_for_many_rows_as_for_few(streamed: bool) -> None:
    """Block additions included: nothing is done per row, or per waiting sample, in Python."""
    few = calls_of_steady_steps(32, 0, streamed)
    assert calls_of_steady_steps(1024, 0, streamed) == few
    assert calls_of_steady_steps(32, 2000, streamed) == few


def test_neither_rows_nor_cache_groups_add_calls_to_steps_with_windows() -> None:
    """Each block that comes lets one slide out, in every group that has a window; what is published has before."""
    few = calls_of_steady_steps(32, 0, streamed=False, windows=(0, 32))
    assert calls_of_steady_steps(256, 0, streamed=False, windows=(0, 32)) == few
    assert calls_of_steady_steps(32, 0, streamed=False, windows=(0, 32, 32, 32, 32, 32)) == few
