"""Layers with sliding windows: every output is that of transformers, and a sample keeps no more than its windows."""

import pytest
from engines import MODES, running
from families import HYBRID, ids
from reference import check
from watching import quiet

from twostroke import InvalidRequest, SamplingParams

FAMILIES = ["mistral", *HYBRID]
GROUPS = {"mistral": (11,), "qwen2_hybrid": (0, 10), "qwen3_hybrid": (7, 7, 0, 7), "gemma3_text": (9, 9, 9, 9, 9, 0)}


def greedy(max_tokens):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def tokens(outputs):
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers_with_chunks_wider_and_narrower_than_the_window(saved, family, mode):
    directory, model = saved(family)
    prompts = [ids(length, seed=length) for length in (1, 12, 70)]
    for step_tokens in (6, 64):
        with running(mode, directory, block_size=4, max_step_tokens=step_tokens, prefix_cache=False) as engine:
            assert engine.limits.windows == GROUPS[family]
            outputs = engine.generate(prompts, greedy(24))
            quiet(engine)
        check(model, outputs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sample_much_longer_than_the_cache_would_hold_without_windows(saved, family, mode):
    """With only as many blocks as the windows, a chunk and the full layers need."""
    directory, model = saved(family)
    windows, length = GROUPS[family], 140
    spans = [-(-length // 4) if not window else -(-(window - 1) // 4) + 3 for window in windows]
    options = dict(block_size=4, max_step_tokens=8, max_model_len=256, num_blocks=1 + sum(spans))
    with running(mode, directory, **options) as engine:
        outputs = engine.generate([ids(60)], greedy(length + 1 - 60))
        if 0 in windows:
            with pytest.raises(InvalidRequest, match=f"need {sum(spans) + 1} blocks of 4"):
                engine.generate([ids(60)], greedy(length + 2 - 60))
        assert engine.stats().preemptions == 0
        quiet(engine)
    assert sum(spans) * 4 < len(windows) * length / 2 or family == "qwen2_hybrid"
    check(model, outputs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_preempted_samples_are_as_if_they_had_not_been(saved, family, mode):
    directory, model = saved(family)
    prompts = [ids(9, seed=seed) for seed in range(5)]
    windows = GROUPS[family]
    least = sum(-(-47 // 4) if not window else -(-(window - 1) // 4) + 3 for window in windows)
    options = dict(block_size=4, max_step_tokens=8, max_rows=5, num_blocks=1 + least + len(windows))
    with running(mode, directory, **options) as engine:
        outputs = engine.generate(prompts, greedy(39))
        assert engine.stats().preemptions > 0
        quiet(engine)
    check(model, outputs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_next_turn_finds_what_is_in_its_windows(saved, family, mode):
    """Of the first turn the layers with windows have only the end."""
    directory, model = saved(family)
    with running(mode, directory, block_size=4) as engine:
        first = engine.generate([ids(30)], greedy(30))[0]
        history = [*first.prompt_token_ids, *first.token_ids]
        second = engine.generate([[*history, *ids(5, seed=1)]], greedy(20))[0]
        other = engine.generate([[*history[:20], *ids(20, seed=2)]], greedy(20))[0]
        quiet(engine)
    assert second.cached_tokens == 56, "59 positions were computed"
    check(model, [first, second, other])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_samples_of_one_prompt(saved, family, mode):
    directory, _ = saved(family)
    outputs = []
    for options in ({"prefix_cache": True}, {"prefix_cache": False}):
        with running(mode, directory, block_size=4, max_step_tokens=16, **options) as engine:
            params = SamplingParams(max_tokens=30, n=3, seed=5, ignore_eos=True)
            outputs.append(engine.generate([ids(31), ids(32)], params))
            quiet(engine)
    texts = [[sample.token_ids for output in each for sample in output.outputs] for each in outputs]
    assert texts[0] == texts[1]
    assert len({tuple(text) for text in texts[0]}) > 3
