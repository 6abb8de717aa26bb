"""The engine's arguments: bad ones are refused by name and value, and each one has the effect that it promises."""

from __future__ import annotations

import inspect
from unittest import mock

import pytest
import torch

from twostroke import Engine, InvalidConfig, SamplingParams
from twostroke.model.presets import PRESETS
from twostroke.scheduler.step_costs import LEAST_TOKENS, StepCosts

PROMPTS = [[5 + row] * (3 + 7 * row) for row in range(6)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def tiny(**options):
    return Engine("tiny", **{"device": "cpu", "num_blocks": 64, "max_rows": 8, "seed": 0, **options})


BAD = {
    "model": [5, "", None, ["tiny"], "/no/such/directory", "no-such-file.gguf"],
    "impl": ["fast", None, 3],
    "device": ["", "tpu", "meta", None, 5, "cpu:x"],
    "dtype": ["float99", None, 5, torch.int8],
    "loop": ["parallel", None, ["async"]],
    "slots": [0, -1, 9, 2.0, "2", None, True],
    "max_rows": [0, -1, 1.5, 10**12, None],
    "max_step_tokens": [0, -1, 1.5, 10**12, None],
    "max_chunk_tokens": [0, -1, 1.5, "4"],
    "block_size": [0, -16, 1.5, 10**12, None],
    "num_blocks": [0, 1, -1, 1.5, 10**12, 10**30],
    "cache_bytes": [0, -1, 1.5, 100],
    "max_model_len": [0, 1, -1, 1.5, 2049],
    "max_ledgers": [-1, 1.5, "1", True],
    "attention": ["flash", None, "triton"],
    "graphs": [1, None, "yes"],
    "deterministic": [1, None, "yes"],
    "compile": [1, None, "yes", True],
    "prefix_cache": [1, None, "yes"],
    "offload_bytes": [-1, 1.5, "1", True, 100, 10**15],
    "policy": ["lifo", None, 3],
    "patience": [0, -1, float("nan"), float("inf"), "10", True, 5],
    "max_waiting": [0, -1, 1.5, "4"],
    "max_prompt_ms": [0, -1.5, float("nan"), float("inf"), "10", True],
    "seed": [-1, 2**64, 1.5, "0"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_bad_argument_is_refused_by_name_and_value(name, value):
    options = {"model": "tiny", "device": "cpu", "num_blocks": 8, "max_rows": 2, name: value}
    if name == "cache_bytes":
        del options["num_blocks"]
    with pytest.raises(InvalidConfig) as refused:
        Engine(**options)
    assert f"{name}={value!r}" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_every_argument_is_checked():
    assert set(BAD) == set(inspect.signature(Engine).parameters)


def test_two_sizes_for_one_cache_are_refused():
    with pytest.raises(InvalidConfig, match="num_blocks=8 and cache_bytes=100000"):
        tiny(num_blocks=8, cache_bytes=100_000)


class Watched:
    """An engine's run over `PROMPTS`, with every plan, and the most steps that were in flight."""

    def __init__(self, prompts=PROMPTS, params=PARAMS, **options):
        self.plans, self.in_flight, self.most_in_flight, self.most_running = [], 0, 0, 0
        with tiny(**options) as engine:
            self.engine, scheduler = engine, engine._parts.scheduler
            self._plan, self._commit = scheduler.plan, scheduler.commit
            scheduler.plan, scheduler.commit = self._watch_plan, self._watch_commit
            self.tokens = [output.token_ids for output in engine.generate(prompts, params)]
            self.stats = engine.stats()

    def _watch_plan(self):
        plan = self._plan()
        if plan is not None:
            self.plans.append(plan)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            self.most_running = max(self.most_running, self.engine.stats().running)
        return plan

    def _watch_commit(self, plan, output):
        self.in_flight -= 1
        return self._commit(plan, output)


@pytest.fixture(scope="module")
def plain():
    return Watched()


def test_loop_and_slots_say_how_many_steps_are_in_flight(plain):
    assert plain.most_in_flight == 2
    for options, expected in ((dict(loop="sync"), 1), (dict(slots=1), 1), (dict(slots=3), 3), (dict(slots=8), 8)):
        watched = Watched(**options)
        assert watched.most_in_flight == expected
        assert watched.tokens == plain.tokens


def test_max_rows(plain):
    watched = Watched(max_rows=2)
    assert (plain.most_running, watched.most_running) == (6, 2)
    assert max(plan.num_lanes for plan in watched.plans) == 2
    assert watched.tokens == plain.tokens


@pytest.mark.parametrize("limit", [1, 5, 40])
def test_max_step_tokens(plain, limit):
    watched = Watched(max_step_tokens=limit)
    assert max(plan.num_tokens for plan in watched.plans) == limit < max(plan.num_tokens for plan in plain.plans)
    assert watched.tokens == plain.tokens


def test_max_chunk_tokens(plain):
    watched = Watched(max_chunk_tokens=4)
    assert max(chunk[2] for plan in watched.plans for chunk in plan.chunks) == 4
    assert max(chunk[2] for plan in plain.plans for chunk in plan.chunks) == 38
    assert watched.tokens == plain.tokens


def test_max_prompt_ms(plain):
    """No time at all beside others: the least chunks, once others decode; before that, all that a step holds."""
    observe = StepCosts.observe

    def observe_slowly(self, lanes, prompt_tokens, seconds):
        """Times that a machine gave would make a step with prompts the faster one now and then."""
        observe(self, lanes, prompt_tokens, 1.0 + prompt_tokens)

    with mock.patch.object(StepCosts, "observe", observe_slowly):
        watched = Watched(max_prompt_ms=1e-6, max_step_tokens=32)
    beside = [len(plan.prompt_tokens) for plan in watched.plans if plan.num_lanes and len(plan.chunks)]
    assert beside.count(LEAST_TOKENS) > len(beside) // 2 > 2
    assert watched.tokens == plain.tokens


def test_block_size(plain):
    watched = Watched(block_size=7)
    assert watched.engine.limits.block_size == 7
    assert sum(len(plan.block_deltas) for plan in watched.plans) == sum(-(-(len(p) + 11) // 7) for p in PROMPTS)
    assert sum(len(plan.block_deltas) for plan in plain.plans) == sum(-(-(len(p) + 11) // 16) for p in PROMPTS)
    assert watched.tokens == plain.tokens


def test_num_blocks(plain):
    watched = Watched(num_blocks=6)
    assert watched.engine.report.num_blocks == 6
    assert watched.stats.free_blocks == 5
    assert watched.most_running < plain.most_running
    assert watched.tokens == plain.tokens


def test_prefix_cache(plain):
    again = [Watched([*PROMPTS, [*PROMPTS[5], 1]], max_rows=6, prefix_cache=on) for on in (True, False)]
    assert [watched.stats.prefix_hit_tokens for watched in again] == [32, 0]
    assert again[0].tokens == again[1].tokens
    assert again[0].tokens[:6] == plain.tokens


def test_cache_bytes(plain):
    block_bytes = plain.engine.report.cache_bytes // 64
    for blocks in (2, 9):
        report = Watched([[5]], cache_bytes=(blocks + 1) * block_bytes - 1, num_blocks=None).engine.report
        assert (report.num_blocks, report.cache_bytes) == (blocks, blocks * block_bytes)


def test_a_cache_without_a_given_size_holds_all_rows_at_full_length():
    engine = Watched(num_blocks=None, max_rows=3, max_model_len=100).engine
    assert engine.report.num_blocks == 1 + 3 * 7


def test_tables_that_no_memory_holds_are_refused_by_what_makes_them_large(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", {**PRESETS["tiny"], "max_position_embeddings": 10**12})
    with pytest.raises(InvalidConfig, match=f"max_rows=65536 samples of max_model_len={10**12} .*block_size=16"):
        Engine("tiny", device="cpu", max_rows=65536, num_blocks=8)


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_a_default_device_of_the_caller_is_left_alone(impl):
    """As after torch.set_default_device("cuda"), where host buffers must still be on the host."""
    expected = Watched(impl=impl).tokens
    with torch.device("meta"):
        assert Watched(impl=impl).tokens == expected
        assert torch.zeros(1).device.type == "meta"


def test_max_model_len():
    watched = Watched([[5] * 10], SamplingParams(max_tokens=None, ignore_eos=True), max_model_len=20)
    assert watched.engine.max_model_len == 20
    assert [len(ids) for ids in watched.tokens] == [10]
    assert Watched([[5]]).engine.max_model_len == 63 * 16 + 1, "what the cache allows"
    assert Watched([[5]], num_blocks=200).engine.max_model_len == 2048, "what the model allows"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", torch.bfloat16])
def test_dtype(plain, dtype):
    engine = Watched(dtype=dtype).engine
    assert engine.model.dtype == (getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    assert engine.report.cache_bytes * 4 == plain.engine.report.cache_bytes * engine.model.dtype.itemsize
    assert plain.engine.model.dtype == torch.float32, "auto, on the CPU"


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_impl(impl):
    engine = Watched(impl=impl).engine
    assert engine._parts.loaded.impl == impl
    assert (type(engine.model).__name__ == "Decoder") == (impl == "native")


def test_attention_and_device(plain):
    for options in (
        dict(attention="torch"),
        dict(device="cpu:0"),
        dict(device=torch.device("cpu")),
        dict(graphs=False),
    ):
        watched = Watched(**options)
        assert watched.tokens == plain.tokens
        assert watched.engine.model.device.type == "cpu"
        assert watched.engine.report.graphs == 0


def test_seed_decides_on_weights_and_samples(plain):
    assert Watched(seed=1).tokens != plain.tokens, "greedy: other weights"
    sampled = SamplingParams(max_tokens=12, ignore_eos=True)
    runs = [Watched(params=sampled, seed=seed).tokens for seed in (5, 5, 6, None, None)]
    assert runs[0] == runs[1] != runs[2]
    assert runs[3] != runs[4]


def test_the_default_model_has_a_name():
    assert inspect.signature(Engine).parameters["model"].default == "smollm2-135m"
