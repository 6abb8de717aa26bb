"""The bound on what prompts add to a step: learned from steps whose times follow a law, on no device and no clock."""

import random

import pytest
from workshop import Workshop
from workshops import every_depth, finish

from twostroke.scheduler.step_costs import ALONE_EVERY, FIRST_TOKENS, LEAST_TOKENS, StepCosts

LIMIT = 0.005


def run(costs, alone, fixed, slope, steps=300, noise=0.0, wanted=10**6):
    """Run steps whose prompts take all that they may; returns the prompt tokens of each step."""
    rng, taken = random.Random(0), []
    for _ in range(steps):
        tokens = min(costs.prompt_tokens, wanted)
        seconds = alone + (fixed + slope * tokens if tokens else 0.0)
        costs.observe(4, tokens, seconds * (1 + noise * rng.uniform(-1, 1)))
        taken.append(tokens)
    return taken


@pytest.mark.parametrize(("fixed", "slope"), [(0.0, 2e-5), (0.001, 2e-5), (0.003, 1e-5), (0.002, 1e-6)])
def test_it_finds_the_tokens_that_fit(fixed, slope):
    fits = (LIMIT - fixed) / slope
    taken = [tokens for tokens in run(StepCosts(LIMIT), 0.01, fixed, slope)[-60:] if tokens]
    assert fits * 0.97 < min(taken) <= max(taken) < fits * 1.03


def test_it_follows_a_context_that_grows():
    costs = StepCosts(LIMIT)
    for slope in (1e-5, 2e-5, 4e-5):
        taken = [tokens for tokens in run(costs, 0.01, 0.001, slope)[-20:] if tokens]
        assert max(taken) * slope + 0.001 < LIMIT * 1.05


def test_it_begins_small_and_grows_step_by_step():
    taken = run(StepCosts(LIMIT), 0.01, 0.0, 1e-9, steps=6)
    assert taken == [0, FIRST_TOKENS, *(FIRST_TOKENS * 2**i for i in range(1, 5))]


def test_what_costs_too_much_still_gets_on():
    taken = run(StepCosts(LIMIT), 0.01, 0.02, 1e-3)
    assert max(taken[2:]) < FIRST_TOKENS
    assert set(taken[40:]) == {0, LEAST_TOKENS}


def test_noise_and_a_hiccup_are_lived_down():
    costs = StepCosts(LIMIT)
    run(costs, 0.01, 0.001, 2e-5, noise=0.02)
    costs.observe(4, 150, 30.0)
    costs.observe(4, 0, 30.0)
    taken = [tokens for tokens in run(costs, 0.01, 0.001, 2e-5, noise=0.02)[-40:] if tokens]
    assert 100 < min(taken) <= max(taken) < 300


def test_the_rows_run_alone_now_and_then():
    """Else nobody would know what prompts add, once the rows have become more."""
    costs = StepCosts(LIMIT)
    taken = run(costs, 0.01, 0.0, 2e-5, steps=4 * ALONE_EVERY)
    assert taken.count(0) == 4
    slower = [tokens for tokens in run(costs, 0.03, 0.0, 2e-5, steps=40 * ALONE_EVERY)[-ALONE_EVERY:] if tokens]
    assert 240 < min(slower) <= max(slower) < 260


def test_steps_without_rows_that_decode_say_nothing():
    costs = StepCosts(LIMIT)
    costs.observe(0, 500, 9.0)
    assert run(costs, 0.01, 0.0, 1e-9, steps=2) == [0, FIRST_TOKENS]


@every_depth
def test_a_steps_prompts_take_no_more_than_that_and_the_rows_go_on(depth):
    costs = StepCosts(LIMIT)
    shop = Workshop(depth=depth, max_step_tokens=512, max_model_len=1024, usable_blocks=400, costs=costs)
    shop.submit(200, 60)
    shop.turn()
    assert len(shop.plans[0].prompt_tokens) == 200, "nobody decodes: no bound"
    shop.submit(300, 4)
    bounds = []
    for _ in range(40):
        bounds.append(costs.prompt_tokens)
        plan = shop.launch()
        assert len(plan.prompt_tokens) <= bounds[-1]
        assert plan.num_lanes >= 1
        costs.observe(plan.num_lanes, len(plan.prompt_tokens), 0.01 + 1e-4 * len(plan.prompt_tokens))
        if len(shop.in_flight) == depth:
            shop.commit()
    chunks = [len(plan.prompt_tokens) for plan in shop.plans[1:] if len(plan.prompt_tokens)]
    assert sum(chunks) == 300
    assert chunks[0] == FIRST_TOKENS
    assert max(chunks[1:]) <= 1.05 * LIMIT / 1e-4
    finish(shop)
