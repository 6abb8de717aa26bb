"""Small simulated machines."""

import numpy as np

from twostroke.bench.floor import Cost
from twostroke.simulate.arrivals import Arrival, own_tokens
from twostroke.simulate.measures import Measures
from twostroke.simulate.replica import Replica
from twostroke.simulate.settings import Settings
from twostroke.simulate.step_time import StepTime

NOTHING = Cost(weight_bytes=0, kv_bytes=1, token_flop=0.0, attention_flop=0.0)
TEN_MS = StepTime(NOTHING, 1e30, 1e30, per_step=0.010, host=0.001)
"""Every step takes 10 ms, and the CPU 1 ms before it."""

VARYING = StepTime(Cost(1000, 7, 300.0, 0.3), 1e6, 1e6, read_factor=1.1, compute_factor=1.3, per_step=1e-3, host=3e-4)
"""What a step has to do shows in its time; up to three lanes read, more compute."""


def machine(step_time=TEN_MS, num_blocks=1000, **settings) -> tuple[Replica, Measures]:
    given = Settings(**{"max_model_len": 256, **settings})
    given.validate()
    measures = Measures()
    return Replica(given, num_blocks, step_time, measures), measures


def arrival(time, prompt, outputs, max_tokens=None, number=0, priority=0, shared=0) -> Arrival:
    """A request with a prompt of so many tokens, the first `shared` of which all such requests have in common."""
    tokens = np.concatenate([np.full(shared, 5, np.int32), own_tokens(number, prompt - shared)])
    return Arrival(time, tokens, outputs, max_tokens or outputs, priority)


def feed(replica: Replica, arrivals) -> None:
    """Let all come when it is time for them, and go."""
    for one in arrivals:
        replica.advance(one.time)
        replica.submit(one)
    replica.advance(float("inf"))


def gaps_of(measures: Measures) -> list[float]:
    return np.repeat(np.array(measures.gaps), np.array(measures.gap_counts)).tolist()
