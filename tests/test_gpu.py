"""The equalities of the design on a GPU: loops, graphs, chunks, preemption, delayed streams."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from delays import DelayedDevice, PoisoningRunner
from reference import check_greedy
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from twostroke import Engine, SamplingParams, StructuredOutput
from twostroke.bench.updates import measure_updates

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, top_k=50, seed=7, max_tokens=40, ignore_eos=True)

VARIANTS = {
    "sync eager": dict(loop="sync", graphs=False),
    "sync graphs": dict(loop="sync"),
    "async eager": dict(loop="async", graphs=False),
    "async graphs": dict(loop="async"),
    "async three slots": dict(loop="async", slots=3),
    "delayed graphs": dict(delayed=True),
    "delayed eager": dict(delayed=True, graphs=False),
}


@contextmanager
def running(model="tiny", *, delayed=False, **options):
    options = {"dtype": "float32", "max_rows": 8, "seed": 0, "num_blocks": 200, **options}
    if not delayed:
        with Engine(model, device="cuda", **options) as engine:
            yield engine
        return
    from twostroke.device.cuda import CudaDevice

    device = DelayedDevice(CudaDevice(torch.device("cuda")), longest=0.002)
    with mock.patch("twostroke.build.Runner", PoisoningRunner), Engine(model, device=device, **options) as engine:
        yield engine


def make_prompts(lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(0, 320, length).tolist() for length in lengths]


def tokens_of(prompts, params, **options):
    with running(**options) as engine:
        outputs = engine.generate(prompts, params)
        preemptions = engine.stats().preemptions
    assert all(output.finish_reason == "length" for output in outputs)
    return [output.token_ids for output in outputs], preemptions


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_fp32_tokens_are_those_of_the_cpu_in_every_variant(saved, variant, params):
    """A11, A15, A20, A21, A22, A23, A24, A25: with streams that lag, and buffers poisoned as soon as they are free."""
    prompts = make_prompts([1, 3, 16, 17, 34, 50, 70])
    model, _ = saved("llama")
    with Engine(model, device="cpu", loop="sync", max_rows=8) as engine:
        expected = [output.token_ids for output in engine.generate(prompts, params)]
    tokens, _ = tokens_of(prompts, params, model=model, **VARIANTS[variant])
    assert tokens == expected


HISTORY = dict(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True)
FEATURES = [
    dict(presence_penalty=0.8, frequency_penalty=0.4, repetition_penalty=1.3),
    dict(no_repeat_ngram_size=2, bad_words=[[7], *([a, b] for a in range(12) for b in range(100, 120))]),
    dict(allowed_token_ids=[*range(0, 320, 3)], logit_bias={3: 4.0, 9: -3.0}),
    dict(typical_p=0.6, top_p=0.95),
]


@pytest.mark.parametrize("num_blocks", [200, 14])
@pytest.mark.parametrize("variant", ["sync eager", "sync graphs", "async graphs", "delayed graphs"])
def test_fp32_tokens_of_every_feature_are_those_of_the_cpu(saved, variant, num_blocks):
    """All features in one batch, beside a row without any; roomy and preempted."""
    prompts = make_prompts([34, 34, 50, 20, 31])
    params = [SamplingParams(**HISTORY, **features) for features in [*FEATURES, {}]]
    model, _ = saved("llama")
    with Engine(model, device="cpu", loop="sync", max_rows=8) as engine:
        expected = [output.token_ids for output in engine.generate(prompts, params)]
    tokens, preemptions = tokens_of(prompts, params, model=model, num_blocks=num_blocks, **VARIANTS[variant])
    assert tokens == expected
    assert (preemptions > 0) == (num_blocks == 14)


@pytest.mark.parametrize("variant", ["sync graphs", "async graphs", "delayed graphs"])
def test_fp32_tokens_of_samples_that_come_back_from_the_host(variant, monkeypatch):
    monkeypatch.setattr("twostroke.cache.copy_costs.CopyCosts.pays", lambda self, copies: True)
    prompts = make_prompts([34, 34, 50, 20])
    expected, _ = tokens_of(prompts, SEEDED, loop="sync", graphs=False)
    with running(num_blocks=14, offload_bytes=1 << 22, **VARIANTS[variant]) as engine:
        outputs, stats = engine.generate(prompts, SEEDED), engine.stats()
    assert [output.token_ids for output in outputs] == expected
    assert stats.preemptions > 0
    assert stats.returned_blocks > 0


@pytest.mark.parametrize(
    "options", [dict(max_chunk_tokens=5), dict(num_blocks=14), dict(max_chunk_tokens=7, num_blocks=14)]
)
@pytest.mark.parametrize("variant", ["sync graphs", "async graphs", "delayed graphs"])
def test_fp32_tokens_do_not_depend_on_chunks_or_preemption(variant, options):
    prompts = make_prompts([34, 34, 50, 20])
    expected, _ = tokens_of(prompts, SEEDED, loop="sync", graphs=False)
    tokens, preemptions = tokens_of(prompts, SEEDED, **VARIANTS[variant], **options)
    assert tokens == expected
    assert (preemptions > 0) == ("num_blocks" in options)


@pytest.mark.parametrize("variant", ["sync graphs", "async graphs", "async three slots", "delayed graphs"])
def test_prompt_steps_are_captured_while_others_run_and_change_no_token(variant):
    """G08: a capture is its own thread's alone, while the other streams and threads go on."""
    prompts = [prompt for prompt in make_prompts([34, 34, 50, 20, 90]) for _ in range(4)]
    options = dict(max_chunk_tokens=30, max_step_tokens=100)
    expected, _ = tokens_of(prompts, SEEDED, loop="sync", graphs=False, **options)
    with running(**VARIANTS[variant], **options) as engine:
        graphs = engine._parts.runner._graphs
        at_start = len(graphs)
        for _ in range(3):
            assert [output.token_ids for output in engine.generate(prompts, SEEDED)] == expected
            engine.reset_prefix_cache()
        assert len(graphs) > at_start


@pytest.mark.parametrize("model", ["tiny", "qwen3-0.6b"])
def test_bf16_tokens_are_equal_where_the_steps_have_the_same_composition(model):
    prompts = make_prompts([64] * 5)
    found = {}
    for variant in ("sync eager", "sync graphs", "async eager", "async graphs", "delayed graphs"):
        found[variant], _ = tokens_of(prompts, GREEDY, model=model, dtype="bfloat16", **VARIANTS[variant])
    assert all(tokens == found["sync eager"] for tokens in found.values())


@pytest.mark.parametrize("variant", ["sync eager", "async graphs"])
def test_g11_an_engine_that_slept_gives_the_same_tokens(variant):
    """Its weights come back elsewhere, those too that thin products read."""
    prompts = make_prompts([64] * 5)
    with running("qwen3-0.6b", dtype="bfloat16", **VARIANTS[variant]) as engine:
        before = [output.token_ids for output in engine.generate(prompts, GREEDY)]
        addresses = [tensor.data_ptr() for tensor in engine._parts.loaded.model.tensors()]
        engine.sleep()
        kept = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        engine.wake()
        assert addresses != [tensor.data_ptr() for tensor in engine._parts.loaded.model.tensors()]
        assert [output.token_ids for output in engine.generate(prompts, GREEDY)] == before
        del kept


@pytest.mark.parametrize("variant", ["sync eager", "sync graphs", "async graphs"])
def test_g11_weights_written_amid_requests_are_metered_and_keep_every_token(variant):
    """The same values, so thin products and graphs must read where they did; each write lies in a gap of its own."""
    prompts, params = make_prompts([64] * 5), [GREEDY] * 5
    # NOTE: without the prefix cache, since a prompt that is found in it takes a step of another composition.
    with running("qwen3-0.6b", dtype="bfloat16", prefix_cache=False, **VARIANTS[variant]) as engine:
        expected = [output.token_ids for output in engine.generate(prompts, GREEDY)]
        measured, figures = measure_updates(engine, prompts, params, engine.model.copy_weights(), every=10)
    assert [output.token_ids for output in measured.outputs] == expected
    assert 1 <= figures["updates"] <= 4
    assert figures["versions_fit"]
    assert all(0 < write <= pause for write, pause in zip(figures["writes_ms"], figures["pauses_ms"], strict=True))


def test_bf16_logits_stay_close_to_fp32():
    """Teacher-forced: where the bf16 run first differs from the fp32 one, the fp32 logits must be nearly tied."""
    prompts = make_prompts([20, 40])
    exact, _ = tokens_of(prompts, GREEDY)
    rounded, _ = tokens_of(prompts, GREEDY, dtype="bfloat16")
    agree = sum(a == b for one, two in zip(exact, rounded, strict=True) for a, b in zip(one[:5], two[:5], strict=True))
    assert agree >= 8


def test_streams_are_three_and_none_is_the_default_and_host_buffers_are_pinned():
    """A26: a copy from memory that is not pinned would keep the loop's thread waiting."""
    with running() as engine:
        device, slots = engine._parts.device, engine._parts.slots
        handles = {stream.raw.cuda_stream for stream in (device.h2d, device.compute, device.d2h)}
        assert len(handles) == 3
        assert torch.cuda.default_stream().cuda_stream not in handles
        assert all(slot.host_input.is_pinned() and slot.host_output.is_pinned() for slot in slots)


def test_the_stream_sanitizer_finds_nothing():
    script = Path(__file__).parent / "csan_run.py"
    environment = {**os.environ, "TORCH_CUDA_SANITIZER": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "clean" in done.stdout
    assert "CSAN" not in done.stderr


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_fp32_tokens_of_other_families_equal_transformers(saved, family):
    directory, reference = saved(family)
    prompts = make_prompts([1, 16, 34, 50])
    for impl in ("native", "transformers"):
        tokens, _ = tokens_of(prompts, GREEDY, model=directory, impl=impl)
        assert sum(check_greedy(reference, prompt, one) for prompt, one in zip(prompts, tokens, strict=True)) <= 1


def test_a_graph_serves_the_next_larger_bucket():
    """A45, R16: 3 rows run in the bucket of 4, 33 in that of 40."""
    with running(max_rows=64) as engine:
        outputs = engine.generate(make_prompts([5] * 33), GREEDY)
    assert all(len(output.token_ids) == 40 for output in outputs)


@pytest.mark.parametrize("graphs", [True, False])
def test_compiled_layers_of_transformers_give_the_same_tokens(graphs, caplog):
    prompts = make_prompts([3, 30, 1, 100])
    found = tokens_of(prompts, GREEDY, impl="transformers", graphs=graphs)
    assert "not compiled" not in caplog.text
    assert found == tokens_of(prompts, GREEDY, impl="transformers", graphs=graphs, compile=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_logits_do_not_depend_on_the_batch(dtype, monkeypatch):
    """Bit for bit, though graphs record nothing here: eagerly, alone and together, whole and in chunks."""
    import test_deterministic as bits

    monkeypatch.setattr(bits, "running", lambda mode, model, **options: running(model, **options))
    options = dict(deterministic=True, dtype=dtype, graphs=False)
    expected = bits.logits_alone("tiny", **options)
    for variant in bits.VARIANTS.values():
        assert bits.logits_together("sync", "tiny", **variant, **options)[0] == expected
    captured = tokens_of(bits.PROMPTS, GREEDY, deterministic=True, dtype=dtype)[0]
    assert captured == tokens_of(bits.PROMPTS, GREEDY, deterministic=True, dtype=dtype, max_step_tokens=13)[0]


def save_with_bytes(directory, copy):
    """Copy a model, with a tokenizer of single bytes, which grammars need; nothing is downloaded."""
    shutil.copytree(directory, copy)
    bytes_ = {letter: id_ for id_, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(bytes_ | {"<end>": 256}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.save(str(copy / "tokenizer.json"))
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((copy / name).read_text())
        (copy / name).write_text(json.dumps(settings | {"eos_token_id": 256}))
    return copy


def wait_for_the_device(logits, rows):
    logits[0, 0].item()
    return logits


@contextmanager
def no_wait():
    """Whatever makes a thread of this process wait for a stream raises, but for events, of which the loop has one."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("variant", ["sync eager", "async eager", "async graphs"])
def test_no_feature_lets_the_loop_wait_for_the_device(saved, tmp_path, variant):
    """A wait amid a step is seen in no token; engines are made and closed outside, since these may wait."""
    model = save_with_bytes(saved("llama")[0], tmp_path / "model")
    ways = [
        *FEATURES,
        dict(top_p=0.9, top_k=50, min_p=0.02, n=2),
        dict(logprobs=5, repetition_penalty=1.2),
        dict(structured=StructuredOutput(regex="[ab]{30,38}"), ignore_eos=False, logprobs=2),
        dict(structured=StructuredOutput(regex="c{9}[ab]+", jump_forward=True), ignore_eos=False),
        dict(logits_processors=[lambda logits, rows: logits * 0.5], top_p=0.8),
        dict(max_thinking_tokens=5, thinking_start=[3], thinking_end=[4, 8]),
        dict(prompt_logprobs=2),
        {},
    ]
    prompts = make_prompts([34, 34, 50, 20, 31, 17, 40, 12, 5, 60, 9, 33])
    params = [SamplingParams(**{**HISTORY, **way}) for way in ways]
    # NOTE: without the prefix cache, so that steps have the shapes of those before, whose kernels are compiled.
    with running(model, max_rows=16, prefix_cache=False, **VARIANTS[variant]) as engine:
        expected, *_ = [engine.generate(prompts, params) for _ in range(3)]
        with no_wait():
            outputs = engine.generate(prompts, params)
            waited = engine.generate(prompts[:1], SamplingParams(**HISTORY, logits_processors=[wait_for_the_device]))
    assert [output.finish_reason for output in outputs] == [output.finish_reason for output in expected]
    assert not any(output.finish_reason == "error" for output in outputs)
    assert "synchroniz" in waited[0].error, "the mode is not that of the loop's thread"
