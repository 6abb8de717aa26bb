"""New weights, between requests and amid them: F14, G11, and what they can do to tokens."""

import contextlib
import threading

import pytest
import torch
import transformers
from engines import MODES, running
from maintained import LENGTH, PROMPTS, Slow, begin, every_mode, greedy, tokens_of
from safetensors.torch import load_file, save_file
from watching import PATIENCE, quiet

from twostroke import EngineAsleep, InvalidWeights


@pytest.fixture(scope="module")
def old(models):
    return tokens_of(models[0])


@pytest.fixture(scope="module")
def new(models, old):
    tokens = tokens_of(models[1])
    assert all(len(set(a)) > 5 and a != b for a, b in zip(tokens, old, strict=True)), "tokens that say nothing"
    return tokens


@pytest.mark.parametrize(("mode", "impl"), [*((mode, "native") for mode in MODES), ("async", "transformers")])
def test_f14_new_weights_answer_like_an_engine_that_began_with_them(mode, impl, models, old, new, tmp_path):
    """From a directory, a file, and a state dict, with and without the second name of a tied head."""
    with running(mode, models[0], num_blocks=64, impl=impl) as engine:
        assert [output.token_ids for output in engine.generate(PROMPTS, greedy())] == old
        state = transformers.Qwen3ForCausalLM.from_pretrained(models[1]).state_dict()
        file = tmp_path / "new.safetensors"
        save_file(load_file(models[1] / "model.safetensors"), file)
        for version, (weights, expected) in enumerate(
            [(models[1], new), (models[0], old), (file, new), (str(models[0]), old), (state, new)], 1
        ):
            assert engine.update_weights(weights) == version == engine.weight_version
            outputs = engine.generate(PROMPTS, greedy())
            assert [output.token_ids for output in outputs] == expected
            assert [output.cached_tokens for output in outputs] == [0, 0, 0], "what old weights computed was found"
            assert all(output.weight_versions == [(version, LENGTH)] for output in outputs)
        quiet(engine)


@every_mode
@pytest.mark.parametrize("recompute", [False, True])
def test_g11_new_weights_amid_requests(mode, models, old, new, recompute):
    """The tokens of each version are those of the model that gave them; recomputed, all that came before is too."""
    with running(mode, models[0], num_blocks=64) as engine, Slow(engine):
        handles = begin(engine)
        engine.update_weights(models[1], recompute=recompute)
        outputs = [handle.result(PATIENCE) for handle in handles]
        for output, prompt, before in zip(outputs, PROMPTS, old, strict=True):
            (first, early), (second, late) = output.weight_versions
            assert (first, second, early + late) == (0, 1, LENGTH)
            assert output.token_ids[:early] == before[:early]
            assert output.preemptions == recompute
            if recompute:
                rest = engine.generate([prompt + output.token_ids[:early]], greedy(late))[0]
                assert output.token_ids[early:] == rest.token_ids
        assert [output.token_ids for output in engine.generate(PROMPTS, greedy())] == new
        quiet(engine)


def test_some_weights_may_be_replaced_alone(models, old, new):
    """Merged and packed projections get a part of theirs."""
    first, second = (transformers.Qwen3ForCausalLM.from_pretrained(model).state_dict() for model in models)
    with running("async", models[0], num_blocks=64) as engine:
        names = [name for name in first if "k_proj" in name or "up_proj" in name]
        engine.update_weights({name: second[name] for name in names}, partial=True)
        mixed = [output.token_ids for output in engine.generate(PROMPTS, greedy())]
        assert mixed not in (old, new)
        engine.update_weights({name: second[name] for name in first if name not in names}, partial=True)
        assert [output.token_ids for output in engine.generate(PROMPTS, greedy())] == new
        engine.update_weights({name: tensor.double() for name, tensor in first.items()})
        assert [output.token_ids for output in engine.generate(PROMPTS, greedy())] == old


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_weights_that_do_not_fit_are_refused_by_name_and_nothing_is_written(models, old, new, impl, tmp_path):
    state = transformers.Qwen3ForCausalLM.from_pretrained(models[1]).state_dict()
    name = "model.layers.1.self_attn.k_proj.weight"
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"\0" * 100)
    bad = {
        f"missing: {name}": {key: tensor for key, tensor in state.items() if key != name},
        "unexpected: model.extra": {**state, "model.extra": torch.ones(3)},
        rf"{name} has shape \[3, 32\], the model's has \[16, 32\]": {**state, name: torch.ones(3, 32)},
        f"{name} is a .* of torch.int8": {**state, name: torch.ones(16, 32, dtype=torch.int8)},
        "must be a name": {**state, name: [1.0]},
        "weights=5": 5,
        "cannot be read": tmp_path / "nowhere",
        "broken.safetensors.* cannot be read": broken,
    }
    with running("async", models[0], num_blocks=64, impl=impl) as engine:
        for message, weights in bad.items():
            with pytest.raises(InvalidWeights, match=message):
                engine.update_weights(weights)
        assert engine.weight_version == 0
        assert [output.token_ids for output in engine.generate(PROMPTS, greedy())] == old


def test_g11_many_threads_pause_sleep_update_and_cancel(models):
    state = [load_file(model / "model.safetensors") for model in models]
    with running("async", models[0], num_blocks=24, max_rows=4) as engine:
        acts = [
            lambda: (engine.pause(), engine.resume()),
            lambda: _drain(engine),
            lambda: (engine.sleep(), engine.wake()),
            lambda: _update(engine, state),
        ]

        def act(number):
            for turn in range(6):
                acts[(number + turn) % len(acts)]()

        threads = [threading.Thread(target=act, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        handles = [engine.submit([5] * (1 + number % 20), greedy(1 + number % 30)) for number in range(40)]
        for handle in handles[::3]:
            handle.cancel()
        for thread in threads:
            thread.join(3 * PATIENCE)
            assert not thread.is_alive()
        for number, handle in enumerate(handles):
            output = handle.result(PATIENCE)
            assert sum(count for _, count in output.weight_versions) == len(output.token_ids)
            assert number % 3 == 0 or len(output.token_ids) == 1 + number % 30
        quiet(engine)


def _drain(engine):
    with contextlib.suppress(EngineAsleep):
        engine.pause("drain")
        engine.resume()


def _update(engine, state):
    with contextlib.suppress(EngineAsleep):
        engine.update_weights(state[engine.weight_version % 2], recompute=True)
