"""The shortcut through steady turns leaves what the turns themselves leave, to the bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulations import TEN_MS, VARYING, arrival, feed, machine

LOOPS = [("sync", 2), ("async", 1), ("async", 2), ("async", 3), ("async", 4)]


def state_of(replica, measures) -> dict:
    """All that a later turn, or a report, can depend on."""
    scheduler, times = replica.scheduler, replica.times
    rows, pool, batch = scheduler.rows, scheduler.pool, scheduler.batch
    running = np.flatnonzero(rows.alive).tolist()
    per_row = ("held", "reserved", "launched", "confirmed", "target", "limit", "event_at", "shared", "order", "alive")
    return {
        "rows": {name: getattr(rows, name).tolist() for name in per_row},
        "tokens": [rows.known_tokens(row).tolist() for row in running],
        "blocks": [rows.blocks[0, row, : rows.held[row]].tolist() for row in running],
        "free": pool.free_blocks().tolist(),
        "pool": (pool.free, pool.reserved, pool.sharers.tolist(), sorted(pool.cache.known_blocks())),
        "batch": (list(batch.prefilling), list(batch.ready), list(batch.draining), batch.lanes.index.tolist()),
        "steps": (batch.launched_step, batch.committed_step),
        "in flight": [
            (f.plan.step, f.plan.lane_rows.tolist(), f.plan.chunks.tolist(), f.seconds) for f in replica.in_flight
        ],
        "budget": scheduler._costs.prompt_tokens if scheduler._costs else None,
        "clock": (replica.clock.now, replica.clock.busy),
        "last": [times.last[row] for row in running if times.last[row] == times.last[row]],
        "measures": (measures.first.tolist(), measures.finished.tolist(), measures.outputs.tolist()),
        "gaps": (measures.gaps.tolist(), measures.gap_counts.tolist()),
        "stats": scheduler.stats(),
    }


def differ(one: dict, other: dict) -> list[str]:
    return [name for name in one if str(one[name]) != str(other[name])]


@given(
    st.lists(
        st.tuples(st.floats(0, 0.5), st.integers(1, 60), st.integers(1, 90), st.integers(0, 9), st.integers(0, 2)),
        min_size=1,
        max_size=14,
    ),
    st.sampled_from(LOOPS),
    st.sampled_from(["fcfs", "priority", "shortest"]),
    st.integers(11, 60),
    st.booleans(),
    st.sampled_from([None, 1.0, 20.0]),
)
@settings(max_examples=60, deadline=None)
def test_it_leaves_what_stepping_leaves(drawn, loop, policy, num_blocks, prefix_cache, max_prompt_ms) -> None:
    """At every arrival, at every moment in between at which a caller looks, and at the end."""
    options = {
        **{"loop": loop[0], "slots": loop[1], "policy": policy, "num_blocks": num_blocks},
        **{"prefix_cache": prefix_cache, "max_prompt_ms": max_prompt_ms, "max_rows": 5, "max_step_tokens": 32},
        **{"max_model_len": 160, "step_time": VARYING},
    }
    (short, short_measures), (stepped, stepped_measures) = machine(**options), machine(**options)
    stepped.shortcut = None
    drawn.sort(key=lambda one: one[0])
    for number, (time, prompt, outputs, more, priority) in enumerate(drawn):
        given_priority = priority if policy == "priority" else 0
        one = arrival(time, prompt, outputs, outputs + more, number, given_priority, shared=min(prompt, 20))
        for replica in (short, stepped):
            replica.advance(time)
        assert not differ(state_of(short, short_measures), state_of(stepped, stepped_measures))
        short.submit(one)
        stepped.submit(one)
    until = 0.0
    while not stepped.rests:
        until = max(until, stepped.clock.now) + 0.07
        for replica in (short, stepped):
            replica.advance(until)
        assert not differ(state_of(short, short_measures), state_of(stepped, stepped_measures))
    assert short.rests


def turns_of(replica) -> list[int]:
    """Counts the turns that a replica takes one by one."""
    count, turn = [0], replica.turn

    def counted() -> None:
        count[0] += 1
        turn()

    replica.turn = counted
    return count


@pytest.mark.parametrize(("loop", "slots"), LOOPS)
def test_it_takes_nearly_all_turns_of_long_answers(loop: str, slots: int) -> None:
    """Else the comparison above would compare stepping with stepping."""
    replica, measures = machine(loop=loop, slots=slots, max_model_len=2048)
    count = turns_of(replica)
    feed(replica, [arrival(0.0, 20 + number, 1000, number=number) for number in range(8)])
    assert measures.outputs.tolist() == [1000] * 8
    assert count[0] < 20 < 1000 <= replica.scheduler.stats().steps


def test_it_goes_on_while_others_wait_for_rows() -> None:
    replica, measures = machine(max_rows=2, max_model_len=2048)
    count = turns_of(replica)
    feed(replica, [arrival(0.0, 20, 500, number=number) for number in range(8)])
    assert measures.outputs.tolist() == [500] * 8
    assert count[0] < 80 < 2000 <= replica.scheduler.stats().steps


def test_it_stops_where_a_block_is_missing() -> None:
    replica, measures = machine(TEN_MS, num_blocks=20, max_rows=4, max_model_len=300)
    feed(replica, [arrival(0.0, 20, 200, number=number) for number in range(4)])
    assert replica.scheduler.stats().preemptions > 0
    assert measures.outputs.tolist() == [200] * 4


def test_it_stops_before_an_arrival() -> None:
    replica, _ = machine(max_model_len=2048)
    replica.submit(arrival(0.0, 20, 1000))
    replica.advance(1.0)
    assert 1.0 <= replica.clock.now < 1.02
