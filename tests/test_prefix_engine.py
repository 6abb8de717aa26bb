"""The prefix cache of an engine: outputs equal those without it, under every loop and delay, and it finds things."""

from __future__ import annotations

import pytest
import torch
from engines import MODES, running
from families import ADAPTED, NATIVE, ids
from reference import check
from watching import PATIENCE, quiet, wait_until

from twostroke import EngineClosed, SamplingParams

FAMILIES = [*NATIVE, *ADAPTED]


def greedy(max_tokens=8):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def tokens(outputs):
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_f02_f05_f13_f17_the_same_prompt_again(saved, family, mode):
    """Lengths at the edges of blocks, a window of 11 among the families: fp32, so equal to the token."""
    directory, model = saved(family)
    prompts = [ids(length, seed=length) for length in (15, 16, 17, 31, 32, 33, 50)]
    with running(mode, directory, block_size=16, prefix_cache=False) as engine:
        plain = engine.generate(prompts, greedy())
        assert engine.stats().cached_blocks == engine.stats().prefix_hit_tokens == 0
    with running(mode, directory, block_size=16) as engine:
        first, again = engine.generate(prompts, greedy()), engine.generate(prompts, greedy())
        stats = engine.stats()
        quiet(engine)
    assert tokens(plain) == tokens(first) == tokens(again)
    assert [output.cached_tokens for output in first] == [0] * 7
    assert [output.cached_tokens for output in again] == [0, 0, 16, 16, 16, 32, 48]
    assert (stats.prefix_hit_tokens, stats.cached_blocks > 0) == (128, True)
    check(model, again)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_concurrent_requests_share_a_system_prompt(saved, family, mode):
    """Those that are admitted after the first one's token share its blocks while it runs."""
    directory, model = saved(family)
    system = ids(40)
    prompts = [system + ids(1 + 3 * n, seed=n) for n in range(8)]
    with running(mode, directory, block_size=8, max_step_tokens=48, prefix_cache=False) as engine:
        plain = engine.generate(prompts, greedy(12))
    with running(mode, directory, block_size=8, max_step_tokens=48) as engine:
        shared = engine.generate(prompts, greedy(12))
        quiet(engine)
    assert tokens(shared) == tokens(plain)
    assert sum(output.cached_tokens == 40 for output in shared) >= 4
    check(model, shared)


@pytest.mark.parametrize("mode", MODES)
def test_a_conversation(saved, mode):
    """Each turn finds the whole turn before it, but for its last token and what does not fill a block."""
    directory, model = saved("llama")
    history, known, outputs = ids(20), 1, []
    with running(mode, directory, block_size=8) as engine:
        for turn in range(4):
            outputs += engine.generate([history], greedy(13))
            assert outputs[-1].cached_tokens == (known - 1) // 8 * 8
            history += outputs[-1].token_ids
            known = len(history)
            history += ids(5 + turn, seed=turn)
            quiet(engine)
    check(model, outputs)


@pytest.mark.parametrize("mode", MODES)
def test_sampled_outputs_are_the_same_with_a_hit(saved, mode):
    params = SamplingParams(temperature=0.9, seed=11, max_tokens=20, ignore_eos=True)
    with running(mode, saved("qwen3")[0], block_size=8) as engine:
        first, again = (engine.generate([ids(30)], params)[0] for _ in range(2))
    assert again.cached_tokens == 24
    assert first.token_ids == again.token_ids


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("family", "num_blocks"), [("llama", 36), ("qwen2_hybrid", 50)])
def test_preempted_samples_find_their_own_blocks(saved, family, num_blocks, mode):
    """A tiny cache: blocks are shared, evicted and computed again, and every output is that of a roomy one."""
    directory, model = saved(family)
    system = ids(16)
    prompts = [system + ids(9 + n, seed=n) for n in range(6)]
    with running(mode, directory, block_size=4, prefix_cache=False) as engine:
        plain = engine.generate(prompts, greedy(30))
        assert engine.stats().preemptions == 0
    with running(mode, directory, block_size=4, num_blocks=num_blocks, max_step_tokens=40) as engine:
        tight = engine.generate(prompts, greedy(30))
        stats = engine.stats()
        quiet(engine)
    assert tokens(tight) == tokens(plain)
    assert stats.preemptions > 0
    if family == "llama":  # of hybrid models one lost block of many is enough that nothing is found
        assert stats.prefix_hit_tokens > sum(output.cached_tokens for output in tight), "hits after preemption"
    check(model, tight)


@pytest.mark.parametrize("mode", MODES)
def test_a_cancelled_requests_blocks(saved, mode):
    directory, model = saved("llama")
    prompt = ids(40)
    with running(mode, directory, block_size=8) as engine:
        handle = engine.stream(prompt, greedy(150))
        for _ in zip(range(20), handle, strict=False):
            pass
        handle.cancel()
        cancelled = handle.result(PATIENCE)
        wait_until(lambda: engine.stats().running == 0)
        quiet(engine)
        history = prompt + cancelled.token_ids
        after = engine.generate([history, [*history, 7]], greedy(20))
    assert len(cancelled.token_ids) < 150
    assert [output.cached_tokens for output in after] == [(len(history) - 1) // 8 * 8] * 2
    check(model, [cancelled, *after])


@torch.inference_mode()
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk", [None, 6])
def test_c04_what_bad_logits_left_is_not_shared(saved, mode, chunk):
    """A weight that is NaN for a while spoils the keys and values of one token; healed, the prompt is answered."""
    directory, model = saved("llama")
    prompt = ids(30)
    poison = next(token for token in range(320) if token not in prompt)
    spoiled = [*prompt[:10], poison, *prompt[11:]]
    with running(mode, directory, block_size=8, max_chunk_tokens=chunk) as engine:
        embedding = engine._parts.loaded.model.embedding
        healthy = embedding[poison].clone()
        embedding[poison] = torch.nan
        bad = engine.generate([spoiled], greedy())[0]
        quiet(engine)
        embedding[poison] = healthy
        good, other = engine.generate([spoiled, prompt], greedy())
    assert (bad.finish_reason, good.finish_reason, good.cached_tokens, other.cached_tokens) == ("error", "length", 0, 0)
    check(model, [good, other])


@pytest.mark.parametrize("mode", MODES)
def test_f14_reset(saved, mode):
    """Requests that run go on undisturbed; nothing computed before, and nothing they compute, is found."""
    directory, model = saved("llama")
    prompt = ids(33)
    with running(mode, directory, block_size=8) as engine:
        first = engine.generate([prompt], greedy())[0]
        handle = engine.stream(prompt, greedy(40))
        stream = iter(handle)
        next(stream)
        engine.reset_prefix_cache()
        running_on = handle.result(PATIENCE)
        quiet(engine)
        assert engine.stats().cached_blocks == 0
        anew = engine.generate([prompt + running_on.token_ids], greedy())[0]
        again = engine.generate([prompt + running_on.token_ids], greedy())[0]
    assert [o.cached_tokens for o in (first, running_on, anew, again)] == [0, 32, 0, 72]
    assert running_on.finish_reason == "length"
    check(model, [first, running_on, anew, again])
    with pytest.raises(EngineClosed):
        engine.reset_prefix_cache()
