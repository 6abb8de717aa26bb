"""Rollouts: their tokens, log-probabilities and weight versions, early stops, refill, and how they end."""

import gc
import itertools
import math
import threading
import weakref
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from engines import MODES, running
from maintained import save_model
from scripted import Scripted
from watching import PATIENCE, quiet, wait_until

from twostroke import EngineClosed, EngineDead, FinishReason, InvalidRequest, QueueFull, SamplingParams
from twostroke.request import mix_seed

PROMPTS = [[5, 6, 7], list(range(20, 50)), [9], [11, 12], [4] * 17]

every_mode = pytest.mark.parametrize("mode", MODES)


def params(max_tokens=12, **others):
    return SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True, "seed": 7} | others)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Directories of two models of one shape."""
    folder = tmp_path_factory.mktemp("models")
    return [save_model(folder / str(seed), seed, False) for seed in (1, 2)]


def by_index(rollout):
    groups = list(rollout)
    found = {group.index: group for group in groups}
    assert len(found) == len(groups)
    return found


@pytest.mark.parametrize("options", [{"num_blocks": 200}, {"num_blocks": 9, "block_size": 8}], ids=["roomy", "tight"])
@every_mode
def test_groups_are_what_generate_gives(mode, options):
    """Tokens and both kinds of log-probabilities, also where the cache is so tight that samples are put back."""
    own = params(temperature=0.7, top_k=20)
    with running(mode, **options) as engine:
        expected = engine.generate(PROMPTS, params(temperature=0.7, top_k=20, n=4, logprobs=0))
        before = engine.stats().preemptions
        groups = by_index(engine.rollout(PROMPTS, own, n=4))
        assert (engine.stats().preemptions > before) == ("block_size" in options)
        quiet(engine)
    assert sorted(groups) == list(range(len(PROMPTS)))
    for index, output in enumerate(expected):
        group = groups[index]
        assert group.prompt_token_ids.tolist() == PROMPTS[index]
        assert not group.stopped
        for place, (sample, wanted) in enumerate(zip(group.samples, output.outputs, strict=True)):
            assert sample.token_ids.tolist() == wanted.token_ids
            assert sample.seed == mix_seed(7, place)
            np.testing.assert_allclose(sample.logprobs, [one.logprob for one in wanted.logprobs], atol=1e-4)
            drawn = [one.sampling_logprob for one in wanted.logprobs]
            np.testing.assert_allclose(sample.sampling_logprobs, drawn, atol=1e-4)
            assert np.abs(sample.logprobs - sample.sampling_logprobs).max() > 1e-3
            assert sample.weight_versions.tolist() == [0] * 12


@every_mode
def test_a_group_is_stopped_by_the_callback(mode):
    """Once two of its samples have ended, the others do, as cancelled and with what they had; other groups go on."""
    own = params(200, temperature=2.0, ignore_eos=False, stop_token_ids=list(range(100, 110)))
    with running(mode, num_blocks=300) as engine:
        wanted = [output.outputs for output in engine.generate(PROMPTS[:2], replace(own, n=6))]
        # the first group is known by the token that ends its shortest sample
        lengths = sorted(len(sample.token_ids) for sample in wanted[0])
        assert lengths[1] < lengths[2]
        mark = min(wanted[0], key=lambda sample: len(sample.token_ids)).token_ids
        rollout = engine.rollout(
            PROMPTS[:2], own, n=6, stop_group=lambda ended: len(ended) == 2 and ended[0].token_ids.tolist() == mark
        )
        groups = by_index(rollout)
        quiet(engine)
    assert [groups[index].stopped for index in (0, 1)] == [True, False]
    assert [sample.finish_reason for sample in groups[0].samples].count(FinishReason.CANCELLED) >= 1
    for index, group in groups.items():
        for sample, whole in zip(group.samples, wanted[index], strict=True):
            ids = sample.token_ids.tolist()
            assert ids == whole.token_ids[: len(ids)]
            assert len(ids) == len(whole.token_ids) or sample.finish_reason is FinishReason.CANCELLED
            assert len(sample.logprobs) == len(sample.sampling_logprobs) == len(sample.weight_versions) == len(ids)


@every_mode
def test_weights_change_between_groups(mode, weights):
    """No group has tokens of two versions; each equals that of an engine that had its weights from the start."""
    fresh = []
    for directory in weights:
        with running("sync", directory, num_blocks=200) as engine:
            fresh.append(engine.generate(PROMPTS, params(n=3)))
    with running(mode, weights[0], num_blocks=200) as engine:
        places = itertools.cycle(range(len(PROMPTS)))
        with engine.rollout((PROMPTS[place] for place in places), params(), n=3, ahead=12) as rollout:
            groups = list(itertools.islice(rollout, 7))
            assert rollout.update_weights(weights[1]) == 1
            groups += itertools.islice(rollout, 12)
        quiet(engine)
    found = set()
    for group in groups:
        (version,) = {int(version) for sample in group.samples for version in sample.weight_versions}
        found.add(version)
        wanted = fresh[version][group.index % len(PROMPTS)]
        assert [sample.token_ids.tolist() for sample in group.samples] == [s.token_ids for s in wanted.outputs]
    assert found == {0, 1}


@every_mode
def test_weights_change_amid_groups_if_asked(mode, weights):
    with running(mode, weights[0], num_blocks=200) as engine:
        with engine.rollout(itertools.repeat(PROMPTS[0]), params(150), n=2, ahead=2) as rollout:
            wait_until(lambda: engine.stats().running == 2)
            assert rollout.update_weights(weights[1], during=True) == 1
            group = next(rollout)
        quiet(engine)
    for sample in group.samples:
        versions = sample.weight_versions
        assert len(versions) == 150
        assert (np.diff(versions) >= 0).all()
    assert {int(version) for sample in group.samples for version in sample.weight_versions} == {0, 1}


def test_refill_is_continuous_and_bounded():
    """Groups begin while nobody takes any, up to the bound, and go on as they are taken."""
    begun = itertools.count()
    most = 0

    def prompts():
        for number in begun:
            yield PROMPTS[number % len(PROMPTS)]

    with running("async", num_blocks=200) as engine, engine.rollout(prompts(), params(3), n=4, ahead=12) as rollout:
        for taken in range(1, 15):
            next(rollout)
            wait_until(lambda: engine.stats().running + engine.stats().waiting == 0)
            most = max(most, engine._submitted - 4 * taken)
        wait_until(lambda: engine._submitted == 4 * (14 + 3))
    assert most <= 12


def test_a_bound_less_than_a_group_lets_one_run_alone():
    with running("async", num_blocks=200) as engine:
        assert len(list(engine.rollout(PROMPTS, params(2), n=6, ahead=1))) == len(PROMPTS)


def test_logprobs_are_finite_and_greedy_ones_are_certain():
    with running("async", num_blocks=200) as engine:
        (group,) = engine.rollout([PROMPTS[0]], params(temperature=0), n=2)
    for sample in group.samples:
        assert sample.sampling_logprobs.tolist() == [0.0] * 12
        assert all(math.isfinite(value) for value in sample.logprobs)


def test_a_sample_with_bad_logits_is_in_its_group():
    with running("async", num_blocks=200) as engine, Scripted(engine, 3, [11, 12, None]):
        (group,) = engine.rollout([PROMPTS[0]], params(), n=2)
    assert [sample.finish_reason for sample in group.samples] == [FinishReason.ERROR] * 2
    assert all("logits" in sample.error for sample in group.samples)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"n": 0}, "n=0"), ({"n": 2000}, "n=2000"), ({"ahead": 0}, "ahead=0"), ({"ahead": 1.5}, "ahead=1.5")],
)
def test_bad_parameters(options, message):
    with running("async", num_blocks=50) as engine:
        with pytest.raises(InvalidRequest, match=message):
            engine.rollout(PROMPTS, params(), **options)
        with pytest.raises(InvalidRequest, match="best_of=9"):
            engine.rollout(PROMPTS, params(best_of=9))
        with pytest.raises(InvalidRequest, match="n=4 of the parameters is not n=8 of the rollout"):
            engine.rollout(PROMPTS, params(n=4))


def test_what_goes_wrong_reaches_the_iteration_and_cancels_the_rest():
    def failing():
        yield PROMPTS[0]
        raise ZeroDivisionError

    def refusing(samples):
        raise KeyError("reward")

    with running("async", num_blocks=200) as engine:
        for prompts, own, stop_group, error in (
            ([[1], [-1]], params(400), None, InvalidRequest),
            (failing(), params(400), None, ZeroDivisionError),
            (PROMPTS, params(5), refusing, KeyError),
        ):
            rollout = engine.rollout(prompts, own, stop_group=stop_group)
            with pytest.raises(error):
                list(rollout)
            with pytest.raises(StopIteration):
                next(rollout)
            quiet(engine)


def test_a_full_queue_is_waited_for():
    """It refuses as long as groups before it wait; where none does, nothing would be gained by waiting."""
    with running("async", num_blocks=200, max_waiting=4) as engine:
        with mock.patch.object(engine, "start", wraps=engine.start) as start:
            groups = by_index(engine.rollout(PROMPTS * 4, params(), n=2))
        assert sorted(groups) == list(range(20))
        assert start.call_count > 20
        quiet(engine)
        with pytest.raises(QueueFull, match="no room for 8 more"):
            next(engine.rollout(PROMPTS, params(), n=8))
        quiet(engine)


def test_what_the_thread_calls_may_not_wait_for_it():
    """New weights are refused there, and those `during` the groups are not; it may end the rollout."""

    def replacing(samples):
        assert rollout.update_weights({}, partial=True, during=True) == next(versions)
        return bool(rollout.update_weights({}, partial=True))

    versions = itertools.count(1)
    with running("async", num_blocks=200) as engine:
        rollout = engine.rollout(PROMPTS, params(), n=2, stop_group=replacing)
        with pytest.raises(InvalidRequest, match="during=False waits for groups that run"):
            list(rollout)
        quiet(engine)
        rollout = engine.rollout(itertools.repeat(PROMPTS[0]), params(), n=2, stop_group=lambda _: rollout.close())
        assert not list(rollout)
        quiet(engine)


def test_the_end_of_the_engine_reaches_the_iteration():
    with running("async", num_blocks=200) as engine:
        rollout = engine.rollout(itertools.repeat(PROMPTS[0]), params(400), n=2)
        wait_until(lambda: engine.stats().running > 0)
        engine.close()
        with pytest.raises(EngineClosed):
            list(rollout)
    with running("async", num_blocks=200) as engine:
        rollout = engine.rollout(itertools.repeat(PROMPTS[0]), params(400), n=2)
        wait_until(lambda: engine.stats().running > 0)
        engine._life.inbox.put(lambda scheduler: 1 / 0)
        with pytest.raises(EngineDead):
            list(rollout)
        with pytest.raises(EngineDead):
            rollout.update_weights({}, partial=True)


def test_a_rollout_that_is_left_lets_everything_go():
    with running("async", num_blocks=200) as engine:
        with engine.rollout(itertools.repeat(PROMPTS[0]), params(400), n=4):
            wait_until(lambda: engine.stats().running > 0)
        quiet(engine)
        rollout = engine.rollout(itertools.repeat(PROMPTS[0]), params(400), n=4)
        thread, gone = rollout._supply._thread, weakref.ref(rollout)
        wait_until(lambda: engine.stats().running > 0)
        del rollout
        gc.collect()
        assert gone() is None
        thread.join(PATIENCE)
        assert not thread.is_alive()
        quiet(engine)
    assert not [thread for thread in threading.enumerate() if thread.name == "twostroke-rollout"]
