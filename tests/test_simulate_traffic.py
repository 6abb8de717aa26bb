"""Where a simulation's requests come from, and which replica they go to."""

import json
from pathlib import Path

import numpy as np
import pytest
from simulations import TEN_MS, arrival

from twostroke import InvalidConfig, InvalidRequest
from twostroke.simulate.arrivals import OUTPUT_TOKEN
from twostroke.simulate.cluster import simulate
from twostroke.simulate.routing import RULES, PrefixAware
from twostroke.simulate.settings import Settings
from twostroke.simulate.trace_file import TraceFile
from twostroke.simulate.traffic import Traffic

# Drawn


def test_poisson_arrivals_come_at_their_rate() -> None:
    times = [one.time for one in Traffic(requests=4000, rate=20.0)]
    assert times == sorted(times)
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)


def test_bursts_come_together_at_the_same_rate() -> None:
    times = [one.time for one in Traffic(requests=4000, rate=20.0, pattern="bursts", burst=10)]
    assert len(set(times)) == 400
    assert times[-1] == pytest.approx(200, rel=0.15)
    assert {one.time for one in Traffic(requests=10, pattern="at-once")} == {0.0}


def test_lengths_lie_in_their_ranges_and_reach_their_ends() -> None:
    drawn = list(Traffic(requests=2000, prompt_tokens=(3, 9), output_tokens=(1, 4)))
    assert {len(one.prompt) for one in drawn} == set(range(3, 10))
    assert {one.output_tokens for one in drawn} == {1, 2, 3, 4}


def test_prefixes_are_shared_and_the_rest_is_not() -> None:
    drawn = list(Traffic(requests=200, prompt_tokens=(8, 8), prefixes=3, prefix_tokens=32))
    assert len({one.prompt[:32].tobytes() for one in drawn}) == 3
    assert len({one.prompt[32:].tobytes() for one in drawn}) == 200
    assert {len(one.prompt) for one in drawn} == {40}


def test_a_turn_repeats_all_before_it_and_the_answer() -> None:
    drawn = list(Traffic(requests=30, rate=0.5, prompt_tokens=(5, 20), output_tokens=(3, 9), turns=3, turn_seconds=4.0))
    assert len(drawn) == 30
    assert [one.time for one in drawn] == sorted(one.time for one in drawn)
    follow = 0
    for place, one in enumerate(drawn):
        for before in drawn[:place]:
            said = np.concatenate([before.prompt, np.full(before.output_tokens, OUTPUT_TOKEN)])
            follow += bool(len(one.prompt) > len(said) and (one.prompt[: len(said)] == said).all())
    assert follow == 10 * (1 + 2), "the second turn follows the first, the third both"


def test_an_answer_is_found_by_the_next_turn() -> None:
    talk = Traffic(requests=2, turns=2, prompt_tokens=(32, 32), output_tokens=(64, 64), turn_seconds=100.0)
    report = simulate(talk, Settings(), TEN_MS, 1e9)
    assert report.cached_share == (32 + 48) / (32 + 128), "positions 0 to 94 were computed: five full blocks"


@pytest.mark.parametrize(
    ("name", "value"),
    [("requests", 0), ("rate", 0.0), ("pattern", "waves"), ("burst", 0), ("prompt_tokens", (9, 3)), ("turns", 0)],
)
def test_a_bad_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidConfig, match=name):
        Traffic(**{"requests": 1, name: value}).validate()


# From a file


def trace(tmp_path: Path, *lines: object, hash_tokens: int = 16) -> TraceFile:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return TraceFile(path, hash_tokens)


def test_a_trace_is_read_line_by_line(tmp_path: Path) -> None:
    file = trace(
        tmp_path,
        {"arrival": 0, "prompt": [5, 6, 7], "output_tokens": 2},
        "",
        {"arrival": 1.5, "prompt_tokens": 40, "hashes": ["a", 1], "output_tokens": 3, "max_tokens": 9, "priority": 2},
        {"arrival": 1.5, "prompt_tokens": 20, "hashes": ["a", "b"], "output_tokens": 3},
        {"arrival": 2, "prompt_tokens": 20, "output_tokens": 3},
    )
    first, second, third, fourth = file
    assert (first.time, first.prompt.tolist(), first.output_tokens, first.max_tokens) == (0.0, [5, 6, 7], 2, 2)
    assert (len(second.prompt), second.max_tokens, second.priority) == (40, 9, 2)
    assert (len(third.prompt), len(fourth.prompt)) == (20, 20)
    assert (second.prompt[:16] == third.prompt[:16]).all()
    assert not (second.prompt[16:20] == third.prompt[16:]).all()
    assert len({one.prompt[:4].tobytes() for one in (first, second, fourth)}) == 3
    assert [one.prompt.tolist() for one in file] == [one.prompt.tolist() for one in file], "it can be read again"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ([1], "must be an object"),
        ({"arrival": 1, "prompt_tokens": 1, "output_tokens": 1, "colour": 1}, "'colour' is unknown"),
        ({"arrival": -1, "prompt_tokens": 1, "output_tokens": 1}, "arrival=-1"),
        ({"prompt_tokens": 1, "output_tokens": 1}, "arrival=None"),
        ({"arrival": 0.5, "prompt_tokens": 1, "output_tokens": 1}, "arrival=0.5 is earlier"),
        ({"arrival": 1, "output_tokens": 1}, "one of prompt and prompt_tokens"),
        ({"arrival": 1, "prompt": [], "output_tokens": 1}, r"prompt=\[\]"),
        ({"arrival": 1, "prompt": [-1], "output_tokens": 1}, r"outside of \[0"),
        ({"arrival": 1, "prompt_tokens": 0, "output_tokens": 1}, "prompt_tokens=0"),
        ({"arrival": 1, "prompt_tokens": 1, "output_tokens": True}, "output_tokens=True"),
        ({"arrival": 1, "prompt_tokens": 1, "output_tokens": 5, "max_tokens": 4}, "max_tokens=4"),
        ({"arrival": 1, "prompt_tokens": 1, "output_tokens": 5, "hashes": "a"}, "hashes='a'"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, message: str) -> None:
    good = {"arrival": 1, "prompt_tokens": 1, "output_tokens": 1}
    with pytest.raises(InvalidRequest, match=f"line 2: .*{message}"):
        list(trace(tmp_path, good, line))


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1}\n\xff\n')
    with pytest.raises(InvalidRequest, match="is not UTF-8"):
        list(TraceFile(path, 16))
    path.write_text('{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1}\n', encoding="utf-8-sig")
    assert len(list(TraceFile(path, 16))) == 1, "a byte order mark is no token"


# Routing


def test_round_robin_and_least_loaded() -> None:
    one = arrival(0.0, 5, 1)
    robin, least = RULES["round-robin"](16, 100), RULES["least-loaded"](16, 100)
    assert [robin.choose(one, [9, 0, 0]) for _ in range(4)] == [0, 1, 2, 0]
    assert [least.choose(one, loads) for loads in ([9, 0, 0], [1, 1, 0], [2, 2, 2])] == [1, 2, 0]


def test_a_known_beginning_goes_where_it_went_unless_that_is_busy() -> None:
    rule = PrefixAware(16, 100)
    mine, other = arrival(0.0, 64, 1, number=1, shared=32), arrival(0.0, 64, 1, number=2, shared=32)
    assert rule.choose(mine, [1, 0, 0]) == 1
    assert rule.choose(other, [0, 5, 0]) == 1, "the shared blocks are known"
    assert rule.choose(other, [0, 9, 0]) == 0, "too busy: the least loaded gets it"
    assert rule.choose(other, [3, 0, 0]) == 0, "its own blocks went there last"
    assert rule.choose(arrival(0.0, 64, 1, number=3), [3, 3, 0]) == 2, "nothing known"


def test_a_router_forgets_what_came_least_recently() -> None:
    rule = PrefixAware(16, 4)
    assert rule.choose(arrival(0.0, 64, 1, number=1), [0, 1]) == 0
    assert rule.choose(arrival(0.0, 64, 1, number=2), [1, 0]) == 1
    assert rule.choose(arrival(0.0, 64, 1, number=1), [1, 0]) == 1


def test_conversations_stay_with_their_cache() -> None:
    def hits(routing: str) -> float:
        talk = Traffic(requests=120, rate=20.0, prompt_tokens=(60, 90), turns=6, turn_seconds=5.0)
        return simulate(talk, Settings(), TEN_MS, 1e9, replicas=4, routing=routing).cached_share

    assert hits("prefix-aware") > 0.6 > 0.4 > hits("round-robin")
