"""A batch of any length in bounded memory: the engine is a stub that answers at once, all else is real."""

from __future__ import annotations

import gc
import queue
import threading

import numpy as np
import psutil
import pytest

from twostroke.jobs.batch_input import BatchInput
from twostroke.jobs.batch_output import BatchOutput
from twostroke.jobs.batch_request import RequestReader
from twostroke.jobs.batch_run import AHEAD, SUBMITTED, BatchRun
from twostroke.limits import Limits
from twostroke.request import FinishReason, Request, Sample
from twostroke.text.ending import Ending
from twostroke.text.handle import Handle

ROWS = 64
LIMITS = Limits(vocab_size=512, max_model_len=64, block_size=16, usable_blocks=1000)


class Stub:
    """Answers with three tokens, from a thread of its own, as delivery does; counts what is under way."""

    def __init__(self):
        self.started = self.ended = self.most = 0
        self.handles = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def start(self, prompts, params):
        self.started += 1
        self.most = max(self.most, self.started - self.ended)
        handle = Handle([Sample(Request.create("x", prompts[0], params[0], 0, LIMITS))], self)
        self.handles.put(handle)
        return [handle]

    def serve(self):
        while (handle := self.handles.get()) is not None:
            sample = handle.sample
            sample.tokens = np.array([*sample.request.prompt, 1, 2, 3], np.int32)
            sample.finish_reason = FinishReason.LENGTH
            self.ended += 1
            handle.finish(Ending(sample, None, untaken=True))

    def close(self):
        self.handles.put(None)
        self.thread.join()


class Memory:
    """The most memory of this process beyond what it had, looked at now and then."""

    def __init__(self):
        gc.collect()
        self.process = psutil.Process()
        self.before = self.process.memory_info().rss
        self.most = self.looks = 0

    def look(self):
        self.looks += 1
        if self.looks % 1000 == 0:
            self.most = max(self.most, self.process.memory_info().rss - self.before)


def count_lines(path):
    with path.open("rb") as file:
        return sum(1 for _ in file)


@pytest.mark.parametrize(
    ("count", "megabytes"),
    [pytest.param(10_000, 30, id="10,000"), pytest.param(1_000_000, 160, id="1,000,000", marks=pytest.mark.exhaustive)],
)
def test_memory_does_not_grow_with_the_input(tmp_path, count, megabytes):
    """Beyond a few bytes a line, for the survey and the journal's state; the input has 200 bytes a line."""
    path = tmp_path / "in.jsonl"
    with path.open("w") as file:
        for number in range(count):
            file.write(f'{{"custom_id": "{number}", "prompt": {list(range(number % 40 + 1))}, "max_tokens": 3}}\n')
    memory, stub = Memory(), Stub()
    source = BatchInput(path)
    survey = source.survey()
    output = BatchOutput(tmp_path / "out.jsonl", None, {})
    reader = RequestReader(None, "stub", LIMITS.max_model_len, None, survey.duplicates)
    read = 0

    def counted():
        nonlocal read
        for read, line in enumerate(source.lines(survey), 1):
            assert read - output.totals.requests <= (AHEAD + SUBMITTED) * ROWS
            yield line

    BatchRun(stub, ROWS, counted(), reader, output, memory.look, print).run()
    output.close()
    stub.close()
    assert stub.most <= SUBMITTED * ROWS
    assert count_lines(tmp_path / "out.jsonl") == count
    assert memory.looks > 5
    assert memory.most < megabytes << 20
