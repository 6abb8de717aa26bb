"""Cancelling at every moment of a request's life: it ends, and nobody beside it notices."""

from __future__ import annotations

import random
import threading
from functools import partial

import pytest
from engines import MODES, running
from watching import PATIENCE, Turns, make_handles, quiet

from twostroke import SamplingParams
from twostroke.request import SampleState

FIRST, SECOND = list(range(3, 14)), list(range(100, 117))


def greedy(max_tokens, **others):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **others)


def cancel(handle, scheduler):
    return scheduler.cancel(handle.sample)


@pytest.fixture(scope="module", params=MODES)
def engine(request):
    """Prompts go in chunks of four tokens; blocks of four are crossed often."""
    with running(request.param, max_chunk_tokens=4, block_size=4, num_blocks=80) as engine:
        yield engine


@pytest.mark.parametrize("ending", ["length", "stop"])
def test_cancel_at_every_turn_of_the_loop(engine, ending):
    """R01, A12, A16, A17, D15, G03: before admission, while prefilling, at each step, as it ends, after that; twice."""
    first, second = (engine.generate(prompt, greedy(14))[0].token_ids for prompt in (FIRST, SECOND))
    stop = first[8]
    whole = first[: first.index(stop) + 1] if ending == "stop" else first[:9]
    params = greedy(9) if ending == "length" else greedy(14, stop_token_ids=[stop])
    turns, lengths = Turns(engine), set()
    for turn in range(17):
        handles = make_handles(engine, [FIRST, SECOND], [params, greedy(14)])
        turns.at(turn, partial(cancel, handles[0]), partial(cancel, handles[0]))
        engine._start(handles)
        victim, other = (handle.result(PATIENCE) for handle in handles)
        handles[0].cancel()
        assert other.token_ids == second, f"turn {turn}"
        assert victim.token_ids == whole[: len(victim.token_ids)], f"turn {turn}"
        assert victim.finish_reason == ("cancelled" if len(victim.token_ids) < len(whole) else ending)
        lengths.add(len(victim.token_ids))
        quiet(engine)
    assert lengths == set(range(len(whole) + 1)), "some moment was not met"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("victim", [0, 1])
def test_cancel_at_every_turn_under_preemption(mode, victim):
    """R09, A05: the younger is preempted, waits, and is recomputed; whoever is cancelled, the other gets on."""
    prompts, params = [FIRST[:8], SECOND[:8]], greedy(13)
    with running(mode, block_size=4, num_blocks=9) as engine:
        alone = [engine.generate(prompt, params)[0].token_ids for prompt in prompts]
        turns, waited = Turns(engine), 0
        for turn in range(0, 34, 2):
            handles = make_handles(engine, prompts, [params, params])
            states = []

            def act(scheduler, handles=handles, states=states):
                states.append(handles[1].sample.state)
                return scheduler.cancel(handles[victim].sample)

            turns.at(turn, act)
            engine._start(handles)
            outputs = [handle.result(PATIENCE) for handle in handles]
            assert outputs[1 - victim].token_ids == alone[1 - victim], f"turn {turn}"
            ids = outputs[victim].token_ids
            assert ids == alone[victim][: len(ids)], f"turn {turn}"
            waited += turn > 0 and states == [SampleState.WAITING] and handles[1].sample.preemptions > 0
            quiet(engine)
    assert waited, "the preempted request was never met waiting"


def test_cancel_of_thousands(engine):
    """B14: 2,048 requests, all cancelled: idle and usable within seconds."""
    plain = engine.generate(FIRST, greedy(8))[0].token_ids
    handles = [engine.submit(FIRST, greedy(1800)) for _ in range(2048)]
    for handle in handles:
        handle.cancel()
    reasons = {handle.result(PATIENCE).finish_reason for handle in handles}
    assert reasons == {"cancelled"}
    assert engine.generate(FIRST, greedy(8))[0].token_ids == plain
    quiet(engine)


def test_a_storm_of_submits_and_cancels_from_many_threads(engine):
    """Every request that was let be has the tokens of a quiet run; every other one the first of them."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 512) for _ in range(rng.randrange(1, 20))] for _ in range(10)]
    alone = [engine.generate(prompt, greedy(12))[0].token_ids for prompt in prompts]
    wrong = []

    def consume(seed):
        rng = random.Random(seed)
        for _ in range(12):
            which, way = rng.randrange(len(prompts)), rng.randrange(4)
            handle = engine.submit(prompts[which], greedy(12))
            ids = []
            if way == 0:
                handle.cancel()
            elif way == 1:
                for delta in handle:
                    ids += delta.token_ids
                    if len(ids) > 3:
                        break
            elif way == 2:
                ids = [token for delta in handle for token in delta.token_ids]
            output = handle.result(PATIENCE)
            whole = alone[which]
            good = output.token_ids == whole[: len(output.token_ids)] and ids == output.token_ids[: len(ids)]
            if not good or (way > 1 and output.token_ids != whole) or (way == 2 and ids != whole):
                wrong.append((which, way, ids, output))

    threads = [threading.Thread(target=consume, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong
    quiet(engine)
