"""Pauses, sleep, and new weights, while requests run: G11, and what it can do to their tokens."""

import contextlib
import threading
from pathlib import Path

import pytest
import torch
import transformers
from engines import MODES, running
from safetensors.torch import load_file, save_file
from watching import PATIENCE, quiet, wait_until

from twostroke import (
    EngineAsleep,
    EngineClosed,
    EngineDead,
    FinishReason,
    InvalidRequest,
    InvalidWeights,
    NotEnoughMemory,
    SamplingParams,
)
from twostroke.device import put_away
from twostroke.device.put_away import PutAway

PROMPTS = [[5, 6, 7], list(range(20, 50)), [9]]
LENGTH = 40

every_mode = pytest.mark.parametrize("mode", MODES)


def greedy(max_tokens=LENGTH, **others):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **others)


def save_model(directory: Path, seed: int, tied: bool) -> Path:
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        initializer_range=0.4,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def models(request, tmp_path_factory):
    """Two models of one shape."""
    folder = tmp_path_factory.mktemp("models")
    return [save_model(folder / str(seed), seed, request.param) for seed in (1, 2)]


@pytest.fixture(scope="module")
def old(models):
    return tokens_of(models[0])


@pytest.fixture(scope="module")
def new(models, old):
    tokens = tokens_of(models[1])
    assert all(len(set(a)) > 5 and a != b for a, b in zip(tokens, old, strict=True)), "tokens that say nothing"
    return tokens


def tokens_of(model):
    with running("sync", model, num_blocks=64) as engine:
        return [output.token_ids for output in engine.generate(PROMPTS, greedy())]


def begin(engine, tokens=5):
    """Submit the prompts, and wait until each has some tokens."""
    handles = [engine.stream(prompt, greedy()) for prompt in PROMPTS]
    wait_until(lambda: all(0 in h._pieces and len(h._pieces[0].ids) >= tokens for h in handles))
    return handles


def results(handles):
    return [handle.result(PATIENCE).token_ids for handle in handles]


# Pause


@every_mode
def test_a07_a_pause_keeps_every_token(mode, models, old):
    with running(mode, models[0], num_blocks=64) as engine, Slow(engine, seconds=0.02):
        handles = begin(engine)
        for _ in range(3):
            engine.pause()
            steps = engine._parts.scheduler.batch.launched_step
            engine.reset_prefix_cache()
            late = engine.submit(PROMPTS[2], greedy(3))
            assert engine.stats().running == 3
            assert engine._parts.scheduler.batch.committed_step == steps, "a step in flight"
            assert not late.wait(0.02)
            assert engine._parts.scheduler.batch.launched_step == steps
            engine.resume()
            assert late.result(PATIENCE).token_ids == old[2][:3]
        assert results(handles) == old
        quiet(engine)


@every_mode
def test_a_drain_ends_what_has_begun_and_begins_nothing(mode, models, old):
    with running(mode, models[0], num_blocks=64, max_rows=2) as engine, Slow(engine):
        handles = [engine.stream(prompt, greedy()) for prompt in PROMPTS]
        wait_until(lambda: engine.stats().running == 2)
        engine.pause("drain")
        assert [handle.result(PATIENCE).token_ids for handle in handles[:2]] == old[:2]
        assert (engine.stats().running, engine.stats().waiting) == (0, 1)
        engine.resume()
        assert results(handles) == old
        quiet(engine)


@every_mode
def test_paused_requests_can_be_cancelled_and_time_out(mode, models):
    with running(mode, models[0], num_blocks=64, max_rows=2) as engine, Slow(engine):
        handles = [engine.stream(prompt, greedy()) for prompt in PROMPTS[:2]]
        wait_until(lambda: engine.stats().running == 2)
        engine.pause()
        late = engine.submit([5], greedy(queue_timeout=0.05))
        assert late.result(PATIENCE).finish_reason == FinishReason.ERROR
        for handle in handles:
            handle.cancel()
            assert handle.result(PATIENCE).finish_reason == FinishReason.CANCELLED
        engine.resume()
        quiet(engine)


@every_mode
def test_a_drain_begins_no_sample_in_the_place_of_one_that_is_cancelled(mode, models, old):
    with running(mode, models[0], num_blocks=64, max_rows=4) as engine:
        engine.pause("drain")
        handle = engine.submit(PROMPTS[0], greedy(n=3))
        handle.cancel(0)
        other = engine.submit([5], greedy(queue_timeout=0.05))
        assert other.result(PATIENCE).finish_reason == FinishReason.ERROR, "the cancel before it has been done"
        assert (engine.stats().waiting, engine.stats().steps) == (2, 0)
        engine.resume()
        cancelled, *others = handle.result(PATIENCE).outputs
        assert cancelled.finish_reason == FinishReason.CANCELLED
        assert [sample.token_ids for sample in others] == [old[0]] * 2
        quiet(engine)


def test_an_unknown_mode_is_refused_and_resuming_what_runs_does_nothing(models):
    with running("async", models[0], num_blocks=64) as engine:
        with pytest.raises(InvalidRequest, match="mode='abort' must be 'keep' or 'drain'"):
            engine.pause("abort")
        engine.resume()
        assert len(engine.generate([5], greedy(2))[0].token_ids) == 2


# The engine's end


@pytest.mark.parametrize("end", ["close", "die", "resume"])
def test_a_drain_that_never_ends_is_let_go(models, end):
    """g11: nobody waits for ever: the engine closes, dies, or another thread resumes."""
    with running("async", models[0], num_blocks=200) as engine:
        outcome = []

        def drain():
            try:
                engine.pause("drain")
                outcome.append(None)
            except (EngineClosed, EngineDead) as error:
                outcome.append(type(error))

        handle = engine.submit([5], greedy(1900))
        wait_until(lambda: engine.stats().running == 1)
        thread = threading.Thread(target=drain)
        thread.start()
        wait_until(lambda: not engine._parts.scheduler.gate.is_open)
        if end == "resume":
            engine.resume()
        elif end == "close":
            engine.close()
        else:
            engine._life.inbox.put(lambda scheduler: 1 / 0)
        thread.join(PATIENCE)
        assert outcome == [{"close": EngineClosed, "die": EngineDead, "resume": None}[end]]
        handle.cancel()
    for call in (engine.pause, engine.resume, engine.sleep, lambda: engine.update_weights(models[0])):
        with pytest.raises((EngineClosed, EngineDead)):
            call()


def test_a_paused_and_a_sleeping_engine_close_at_once(models):
    for stop in ("pause", "sleep"):
        with running("async", models[0], num_blocks=64) as engine:
            handle = engine.submit([5], greedy(2000))
            getattr(engine, stop)()
        assert handle.result(PATIENCE).finish_reason == FinishReason.CANCELLED


# New weights


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


# Sleep


@every_mode
def test_g11_a_sleep_changes_nobody_s_tokens(mode, models, old):
    with running(mode, models[0], num_blocks=64) as engine, Slow(engine):
        handles = begin(engine)
        engine.sleep()
        engine.sleep()
        attention = engine._parts.forward.attention
        assert attention.keys == attention.values == []
        assert (engine.stats().running, engine.stats().waiting, engine.stats().cached_blocks) == (0, 3, 0)
        handles.append(engine.submit(PROMPTS[0], greedy()))
        with pytest.raises(EngineAsleep, match="sleeps"):
            engine.update_weights(models[1])
        engine.resume()
        assert not handles[-1].wait(0.02), "a sleeping engine was woken by resume"
        engine.wake()
        engine.wake()
        assert results(handles) == [*old, old[0]]
        assert [handle.result().preemptions for handle in handles] == [1, 1, 1, 0]
        quiet(engine)


def test_a_pause_outlives_a_sleep(models, old):
    with running("async", models[0], num_blocks=64) as engine:
        engine.pause()
        engine.sleep()
        handle = engine.submit(PROMPTS[0], greedy())
        engine.wake()
        assert not handle.wait(0.02)
        engine.resume()
        assert handle.result(PATIENCE).token_ids == old[0]


def test_g09_memory_that_is_gone_is_an_error_with_numbers_and_waking_can_be_tried_again(models, old, monkeypatch):
    with running("async", models[0], num_blocks=64) as engine:
        handle = engine.submit(PROMPTS[0], greedy())
        engine.sleep()
        for room, failing in ((10, None), (1 << 40, "allocate")):
            with monkeypatch.context() as patch:
                patch.setattr(put_away, "free_bytes", lambda device, room=room: room)
                if failing:
                    patch.setattr(engine._parts.forward.attention, failing, _out_of_memory)
                with pytest.raises(NotEnoughMemory, match=r"weights and cache need \d+ bytes"):
                    engine.wake()
        assert not handle.done
        engine.wake()
        assert handle.result(PATIENCE).token_ids == old[0]


def _out_of_memory():
    raise RuntimeError("out of memory")


def test_weights_go_and_come_back_behind_the_same_tensors():
    """On another kind of device than the CPU; here its memory is the host's."""
    whole = torch.arange(12.0).view(3, 4)
    part, other = whole[1:2], torch.ones(5)

    class Elsewhere:
        torch_device = torch.device("meta")

    class Cache:
        nbytes = 0

        def allocate(self):
            pass

    away = PutAway(Elsewhere(), [whole, part, other])
    away.free()
    assert whole.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    away.bring_back(Cache())
    assert part.tolist() == [[4.0, 5.0, 6.0, 7.0]]
    assert (whole.sum(), other.sum()) == (66.0, 5.0)
    whole[1] = 0
    assert part.tolist() == [[0.0] * 4]


# All at once


def test_g11_many_threads_pause_sleep_update_and_cancel(models):
    state = [load_file(model / "model.safetensors") for model in models]
    with running("async", models[0], num_blocks=24, max_rows=4) as engine:
        acts = [
            lambda: (engine.pause(), engine.resume()),
            lambda: (engine.pause("drain"), engine.resume()),
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


def _update(engine, state):
    with contextlib.suppress(EngineAsleep):
        engine.update_weights(state[engine.weight_version % 2], recompute=True)


class Slow:
    """Makes every step of an engine last so many seconds, so that what is done amid requests is."""

    def __init__(self, engine, seconds=0.003):
        self._model, self._forward, self._seconds = engine.model, engine.model.forward, seconds

    def __enter__(self):
        self._model.forward = self._slowly
        return self

    def __exit__(self, *exc):
        del self._model.forward

    def _slowly(self, step, attention):
        threading.Event().wait(self._seconds)
        return self._forward(step, attention)
