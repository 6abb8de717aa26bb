"""Token for token equal to transformers, under every loop, chunking, preemption and delay."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from engines import MODES, running
from families import ADAPTED, NATIVE
from reference import check_greedy

from twostroke import SamplingParams

LENGTHS = [1, 3, 16, 17, 34, 50]
NEW = 24


def make_prompts(vocab=320, lengths=LENGTHS, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, length).tolist() for length in lengths]


def check_all(model, prompts, outputs, new_tokens):
    ties = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_token_ids == prompt
        assert output.finish_reason == "length"
        assert len(output.token_ids) == new_tokens
        ties += check_greedy(model, prompt, output.token_ids)
    assert ties <= 1 + len(prompts) * new_tokens // 100


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", NATIVE)
def test_native_families_equal_transformers(saved, family, mode):
    """A20, A21, A22, A23, A24: also where copies lag, so that a buffer read or written too early shows in tokens."""
    directory, model = saved(family)
    prompts = make_prompts()
    with running(mode, directory, impl="native") as engine:
        outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=NEW))
    check_all(model, prompts, outputs, NEW)


@pytest.mark.parametrize("mode", ["sync", "async", "delayed"])
@pytest.mark.parametrize("family", [*ADAPTED, "llama"])
def test_adapted_families_equal_transformers(saved, family, mode):
    directory, model = saved(family)
    prompts = make_prompts()
    with running(mode, directory, impl="transformers") as engine:
        outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=NEW))
    check_all(model, prompts, outputs, NEW)


@pytest.mark.parametrize("mode", ["sync", "async", "delayed"])
@pytest.mark.parametrize("chunk", [1, 5])
@pytest.mark.parametrize("family", [*NATIVE, *ADAPTED])
def test_prompts_in_chunks(saved, family, chunk, mode):
    """B05: a prompt longer than a step's budget goes in chunks, beside decoding rows."""
    directory, model = saved(family)
    prompts = make_prompts(lengths=[1, 2, 7, 23])
    with running(mode, directory, max_chunk_tokens=chunk, max_rows=3) as engine:
        outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=12))
        assert engine.stats().steps > max(map(len, prompts)) // chunk
    check_all(model, prompts, outputs, 12)


@pytest.mark.parametrize("mode", MODES)
def test_a_step_budget_smaller_than_a_prompt_and_than_the_rows(saved, mode):
    """A14: rows skip steps while several are in flight, and each goes on from its own last token."""
    directory, model = saved("llama")
    prompts = make_prompts(lengths=[3, 30, 9, 14, 1])
    with running(mode, directory, max_step_tokens=4, max_rows=8) as engine:
        outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=9))
    check_all(model, prompts, outputs, 9)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", sorted({*NATIVE, *ADAPTED} - {"mistral"}))  # its rows end with fewer blocks
def test_preemption_by_recomputation(saved, family, mode):
    """F19, F16: block 16, prompt 34, 35 new tokens, 2 requests, 7 blocks: preemption is certain, outputs are whole."""
    directory, model = saved(family)
    prompts = make_prompts(lengths=[34, 34])
    with running(mode, directory, block_size=16, num_blocks=7) as engine:
        outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=35))
        assert engine.stats().preemptions > 0
        assert sum(output.preemptions for output in outputs) == engine.stats().preemptions
        assert engine.stats().free_blocks == 6
    check_all(model, prompts, outputs, 35)


@pytest.mark.parametrize("chunk", [None, 5])
def test_many_preemptions_and_no_more_of_them_than_under_the_synchronous_loop(saved, chunk):
    """A05, A06: 33 blocks of 16, 8 requests of 100 + 100 tokens."""
    directory, model = saved("llama")
    prompts = make_prompts(lengths=[100] * 8)
    preemptions, tokens = {}, {}
    for mode in MODES:
        with running(mode, directory, num_blocks=33, max_chunk_tokens=chunk) as engine:
            outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=100))
            preemptions[mode] = engine.stats().preemptions
        tokens[mode] = [output.token_ids for output in outputs]
    check_all(model, prompts, outputs, 100)
    assert preemptions["sync"] > 0
    assert max(preemptions.values()) <= 2 * preemptions["sync"]
    assert all(one == tokens["sync"] for one in tokens.values())


@pytest.mark.parametrize("mode", ["sync", "async", "delayed"])
def test_an_end_of_sequence_token_ends_the_sample_where_transformers_ends_it(saved, mode, tmp_path):
    _, model = saved("llama")
    prompts = make_prompts()
    with running(mode, saved("llama")[0]) as engine:
        plain = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=NEW))
    eos = plain[2].token_ids[7]
    model.save_pretrained(tmp_path)
    transformers.GenerationConfig(eos_token_id=[eos, 319]).save_pretrained(tmp_path)
    with running(mode, tmp_path) as engine:
        outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=NEW))
    for before, after in zip(plain, outputs, strict=True):
        ids = before.token_ids
        cut = ids.index(eos) + 1 if eos in ids else NEW
        assert after.token_ids == ids[:cut]
        assert after.finish_reason == ("stop" if eos in ids else "length")
    assert outputs[2].finish_reason == "stop"


@pytest.mark.parametrize(
    "mode", ["sync", "async", *(pytest.param(mode, marks=pytest.mark.exhaustive) for mode in ("async3", "delayed"))]
)
def test_smollm2_equals_transformers(smollm2_dir, smollm2_reference, mode):
    prompts = ["The capital of France is", "def fibonacci(n):\n", "1, 2, 3, 4,", "Once upon a time, in a small village"]
    with running(mode, smollm2_dir, max_chunk_tokens=3 if mode == "delayed" else None) as engine:
        outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=16))
        chat = engine.generate(
            [[{"role": "user", "content": "What is the capital of France?"}]], SamplingParams(temperature=0)
        )[0]
    ties = sum(
        check_greedy(smollm2_reference, output.prompt_token_ids, output.token_ids) for output in [*outputs, chat]
    )
    assert ties <= 1
    assert "Paris" in outputs[0].text
    assert "Paris" in chat.text
    assert chat.finish_reason == "stop"
    assert chat.token_ids[-1] == 2
    assert "<|im_end|>" not in chat.text


@pytest.mark.parametrize("mode", ["sync", "delayed"])
def test_smollm2_in_chunks_and_preempted(smollm2_dir, smollm2_reference, mode):
    prompts = [list(range(1000, 1034)), list(range(2000, 2034))]
    with running(mode, smollm2_dir, max_chunk_tokens=5, block_size=16, num_blocks=7) as engine:
        outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=35, ignore_eos=True))
        assert engine.stats().preemptions > 0
    ties = sum(check_greedy(smollm2_reference, output.prompt_token_ids, output.token_ids) for output in outputs)
    assert ties <= 1


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_dir):
    return transformers.AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()
