"""Steps in padded shapes, run eagerly and by graphs, give the tokens of steps in exact shapes."""

from collections import deque
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from engines import MODES, running

from twostroke import SamplingParams
from twostroke.device.graphs import Recurring
from twostroke.device.shapes import PaddedShapes, StepShape
from twostroke.device.slot import StepBuffers
from twostroke.plan import Feature
from twostroke.sampling.stage import Stage
from twostroke.sampling_part import SamplingPart

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=20, ignore_eos=True)
LENGTHS = [1, 3, 16, 17, 34, 50, 2, 40]
CASES = {
    "whole": dict(max_rows=5),
    "chunked": dict(max_rows=8, max_chunk_tokens=5),
    "preempted": dict(max_rows=8, num_blocks=14),
    "few tokens a step": dict(max_rows=8, max_step_tokens=9),
}


def make_prompts(lengths=LENGTHS):
    rng = np.random.default_rng(0)
    return [rng.integers(0, 320, length).tolist() for length in lengths]


class PaperGraphs:
    """Graphs that hold the work itself; like real ones, they do not run it when it is captured."""

    def __init__(self):
        self.work = {}
        self.replays = deque()

    def capture(self, key, work):
        assert key not in self.work
        self.work[key] = work

    def replay(self, key):
        self.replays.append(key)
        self.work[key]()

    def drop(self, key):
        del self.work[key]

    def __contains__(self, key):
        return key in self.work

    def __len__(self):
        return len(self.work)


@contextmanager
def padded(mode, model="tiny", *, graphs=None, **options):
    """An engine on the CPU whose steps are padded, and run by `graphs` if there are any."""
    most = options.get("max_step_tokens", 2048)
    shapes = PaddedShapes(min(options["max_rows"], most), options["max_rows"], most)
    with mock.patch("twostroke.build.ExactShapes", return_value=shapes), running(mode, model, **options) as engine:
        if graphs is not None:
            use_graphs(engine._parts, graphs, shapes.decode.sizes)
        yield engine


@torch.inference_mode()
def use_graphs(parts, graphs, decode):
    words, lanes = len(parts.slots[0].device_input), max(decode)
    logits = torch.empty(lanes, parts.loaded.model.vocab_size)
    parts.runner.capture(graphs, decode, parts.slots, StepBuffers(parts.device, words, lanes), logits)


def is_step(key):
    """Whether a graph's key is that of a step or its forward part, not of a sampling part."""
    return len(key) == 6


def tokens_of(engine, params):
    outputs = engine.generate(make_prompts(), params)
    assert all(output.finish_reason == "length" for output in outputs)
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected():
    with running("sync", max_rows=8) as engine:
        return {params: tokens_of(engine, params) for params in (GREEDY, SEEDED)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("with_graphs", [False, True])
def test_tokens_are_those_of_exact_shapes(expected, case, mode, with_graphs):
    graphs = PaperGraphs() if with_graphs else None
    with padded(mode, graphs=graphs, **CASES[case]) as engine:
        for params in (SEEDED, GREEDY):
            assert tokens_of(engine, params) == expected[params]
        assert (engine.stats().preemptions > 0) == (case == "preempted")
    if with_graphs:
        prompts = {key for key in graphs.replays if is_step(key) and key[2]}
        assert prompts, "no step with prompt chunks ran by a graph"
        assert len({key[0] for key in prompts}) == 1, "they serve all slots"


LOGPROBS = replace(SEEDED, logprobs=2, prompt_logprobs=1, n=2)


@pytest.fixture(scope="module")
def expected_logprobs():
    with running("sync", max_rows=8) as engine:
        return logprobs_of(engine)


def logprobs_of(engine):
    outputs = engine.generate(make_prompts(), LOGPROBS)
    entries = [[output.prompt_logprobs[1:], *(sample.logprobs for sample in output.outputs)] for output in outputs]
    return [(entry.token_id, entry.logprob) for each in entries for listed in each for entry in listed]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_logprobs_are_those_of_exact_shapes(expected_logprobs, case, mode):
    """Forks and scored prompts among them, which no graph holds."""
    graphs = PaperGraphs()
    with padded(mode, graphs=graphs, **CASES[case]) as engine:
        found = logprobs_of(engine)
    assert [token for token, _ in found] == [token for token, _ in expected_logprobs]
    assert [value for _, value in found] == pytest.approx([value for _, value in expected_logprobs], abs=1e-4)
    assert graphs.replays


def forbid_small(logits, rows):
    for row, tokens in enumerate(rows):
        logits[row, : 100 + len(tokens.output_ids) % 70] = -torch.inf
    return logits


WISHES = [
    {},
    {"presence_penalty": 1.5, "repetition_penalty": 1.2},
    {"logits_processors": [forbid_small]},
    {"n": 3},
    {"allowed_token_ids": range(50, 90), "no_repeat_ngram_size": 2},
    {"logits_processors": [forbid_small], "frequency_penalty": 0.5, "n": 2},
]
"""What makes a step copy blocks, keep ledgers, edit logits, and come in two parts."""


def wished(engine):
    params = [
        SamplingParams(temperature=0.9, seed=i, max_tokens=10, ignore_eos=True, **w) for i, w in enumerate(WISHES)
    ]
    outputs = engine.generate(make_prompts(LENGTHS[: len(WISHES)]), params)
    assert all(sample.finish_reason == "length" for output in outputs for sample in output.outputs)
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def granted():
    with running("sync", max_rows=12) as engine:
        return wished(engine)


@pytest.mark.parametrize("mode", ["sync", "async", "delayed"])
@pytest.mark.parametrize("options", [{}, {"max_chunk_tokens": 7}, {"deterministic": True}], ids=str)
def test_whatever_requests_ask_for(granted, mode, options):
    graphs = PaperGraphs()
    with padded(mode, graphs=graphs, max_rows=12, **options) as engine:
        for _ in range(2):
            assert wished(engine) == granted
            engine.reset_prefix_cache()
    assert any(is_step(key) and key[2] and key[-1] for key in graphs.replays), "a forward part alone"
    assert any(not is_step(key) for key in graphs.replays), "a sampling part"


def test_a_shape_is_captured_at_its_second_use_and_accounted_for():
    graphs = PaperGraphs()
    with padded("sync", graphs=graphs, max_rows=4, prefix_cache=False) as engine:
        window = engine._parts.runner.activity.window = deque(maxlen=64)
        for uses, captured, replayed in ((1, 0, 0), (2, 1, 1), (3, 1, 2)):
            engine.generate(make_prompts([9]), GREEDY)
            assert sum(bool(key[2]) for key in graphs.work) == captured, f"after {uses} uses"
            assert sum(bool(key[2]) for key in graphs.replays) == replayed, f"after {uses} uses"
    _, second, _ = (times for times in window if times.prompt_tokens)
    # Here a worker captures, so the launch after that step's has it in its books.
    (_, ended), *more = (span for times in list(window)[1:] for span in times.captures)
    assert not more
    assert ended <= second.compute[0], "the step does not begin before its graph is there"


FEATURES = {
    "presence_penalty": 1.5,
    "typical_p": 0.5,
    "logprobs": 1,
    "no_repeat_ngram_size": 2,
    "bad_words": [[3, 4]],
    "logit_bias": {5: 3.0},
}
"""One parameter for each feature that leaves its mark on the kernels of a sampling part."""


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_sampling_part_of_a_feature_is_captured_at_its_second_use(name, mode):
    params = replace(SEEDED, **{name: FEATURES[name]})
    with running("sync", max_rows=4) as engine:
        expected = engine.generate(make_prompts([9, 4]), params)
    graphs = PaperGraphs()
    with padded(mode, graphs=graphs, max_rows=4) as engine:
        found = engine.generate(make_prompts([9, 4]), params)
        steps = engine.stats().steps
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    slots = 1 if mode == "sync" else 2
    replays = [key for key in graphs.replays if not is_step(key)]
    assert len({key for key in graphs.work if not is_step(key)}) == slots, "one for each slot"
    assert len(replays) == steps - 1 - slots, "all but the prompt's step and the first of each slot"


def test_few_graphs_of_sampling_parts_are_kept_and_features_do_not_mix():
    """Requests with other features come and go; the bound is that of the steps in flight."""
    graphs = PaperGraphs()
    params = [replace(SEEDED, **{name: value}, max_tokens=10 + i) for i, (name, value) in enumerate(FEATURES.items())]
    with running("sync", max_rows=8) as engine:
        expected = [output.token_ids for output in engine.generate(make_prompts(LENGTHS[:6]), params)]
    with (
        mock.patch("twostroke.runner.MAX_SAMPLING_GRAPHS", 4),
        padded("delayed", graphs=graphs, max_rows=8, max_chunk_tokens=5) as engine,
    ):
        for _ in range(2):
            assert [o.token_ids for o in engine.generate(make_prompts(LENGTHS[:6]), params)] == expected
            engine.reset_prefix_cache()
        assert len([key for key in graphs.work if not is_step(key)]) <= 4
    replayed = {key[2] for key in graphs.replays if not is_step(key)}
    assert len(replayed) > 2, "several sets of features"


@pytest.mark.parametrize("features", [Feature.PENALTIES, Feature.TYPICAL, Feature.LOGPROBS, Feature.HELD])
def test_only_what_edits_logits_copies_them(features):
    seen = []
    state = SimpleNamespace(**dict.fromkeys(("sample_rows", "tokens", "errors", "chances", "logprobs"), torch.zeros(2)))
    stage = Stage(Feature.PENALTIES, lambda logits, rows: logits.add_(1))
    ledgers = SimpleNamespace(enter=lambda tokens, rows: None)
    part = SamplingPart(state, ledgers, [stage], lambda logits, *rest: seen.append(logits), lambda *args: None)
    logits = torch.zeros(2, 5, dtype=torch.bfloat16)
    with mock.patch("twostroke.sampling_part.write_logprobs") as write:
        part.run(features | Feature.LOGPROBS, logits, torch.zeros(2, 2), torch.zeros(2, 3))
    assert write.call_args.args[0] is logits, "raw ones"
    assert not logits.any()
    assert (seen[0] is logits) == (features is not Feature.PENALTIES)
    assert seen[0].dtype == (torch.float32 if features is Feature.PENALTIES else torch.bfloat16)


def test_graphs_of_shapes_that_did_not_come_again_are_dropped():
    graphs = PaperGraphs()
    recurring = Recurring(graphs, most=2)

    def use(key):
        if due := recurring.due(key):
            graphs.capture(key, key)
        return due

    assert [use(key) for key in "aabb"] == [False, True, False, True]
    assert [use(key) for key in "ab"] == [False, False]
    assert set(graphs.work) == {"a", "b"}
    assert not use("c")
    assert set(graphs.work) == {"b"}, "the one that was used longest ago goes"
    assert [use(key) for key in "aa"] == [False, True]
    assert set(graphs.work) == {"a"}


@pytest.mark.parametrize(("max_rows", "max_tokens"), [(1, 1), (8, 9), (256, 2048), (1024, 8192), (300, 1000)])
def test_shapes_hold_their_steps_and_waste_little(max_rows, max_tokens):
    """A45, R16: the next larger size is taken, never one that does not fit."""
    max_lanes = min(max_rows, max_tokens)
    shapes = PaddedShapes(max_lanes, max_rows, max_tokens)
    rng = np.random.default_rng(0)
    wasted = []
    for _ in range(2000):
        lanes = int(rng.integers(0, max_lanes)) if max_lanes > 1 else 0
        chunks = int(rng.integers(1, max_lanes - lanes + 1))
        tokens = int(rng.integers(lanes + chunks, max_tokens + 1))
        shape = shapes.fit(StepShape(lanes, chunks, tokens, lanes + chunks))
        assert shape.lanes >= lanes
        assert shape.chunks >= chunks
        assert max(tokens, shape.lanes) <= shape.tokens <= max_tokens
        assert lanes + chunks <= shape.sampled <= max_lanes
        if tokens > max(512, max_tokens // 2):
            wasted.append(shape.tokens / tokens - 1)
    assert np.mean(wasted or [0]) < 0.06
    full = shapes.fit(StepShape(max_lanes - 1, 1, max_tokens, max_lanes))
    assert full.tokens == max_tokens, "a full step has no padding"


def test_a_short_prompt_among_decoding_rows_makes_a_short_step():
    shapes = PaddedShapes(256, 256, 2048)
    assert shapes.fit(StepShape(64, 1, 70, 65)).tokens == 128
    assert shapes.fit(StepShape(200, 3, 260, 203)).tokens == 320
    assert shapes.fit(StepShape(0, 1, 5, 1))[:4] == (0, 16, 64, 16)


def test_steps_of_lanes_alone_take_the_next_bucket():
    shapes = PaddedShapes(64, 64, 2048)
    assert [shapes.fit(StepShape(n, 0, n, n)).lanes for n in (1, 3, 5, 33, 64)] == [1, 4, 8, 40, 64]
    assert shapes.fit(StepShape(3, 0, 3, 3))[:4] == (4, 0, 4, 4)
