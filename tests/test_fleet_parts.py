"""What the fleet is made of, without Ray: which replica a prompt goes to, and an HTTP call that is passed on."""

from __future__ import annotations

import asyncio
import json

import pytest

from twostroke.fleet.prefix_map import BLOCK_BYTES, MAX_BLOCKS, PrefixMap, prefix_blocks

pytest.importorskip("starlette", reason="needs the packages of the extra server")

from twostroke.fleet.http_call import Head, HttpCall, responses

# Beginnings


def chat(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user" if place % 2 == 0 else "assistant", "content": text} for place, text in enumerate(texts)]


def blocks(**fields: object) -> list[int]:
    return prefix_blocks(json.dumps(fields).encode())


def common(one: list[int], other: list[int]) -> int:
    return sum(a == b for a, b in zip(one, other, strict=False))


def test_the_next_turn_of_a_chat_begins_as_the_one_before():
    first, answer = "x" * 1000, "y" * 1000
    before, after = blocks(messages=chat(first)), blocks(messages=chat(first, answer, "and?"))
    assert len(before) == len(json.dumps(chat(first))) // BLOCK_BYTES == 4
    assert after[:4] == before[:4]
    assert len(after) == 8


@pytest.mark.parametrize("field", ["messages", "prompt", "input"])
def test_what_is_not_the_prompt_does_not_count(field):
    value = chat("x" * 900) if field == "messages" else "x" * 900
    assert blocks(**{field: value}) == blocks(temperature=0.5, **{field: value}, seed=3) != []


def test_prompts_have_the_blocks_before_their_first_difference_in_common():
    text = "".join(f"{number} " for number in range(1000))
    changed = text[:700] + "#" + text[701:]
    assert common(blocks(prompt=text), blocks(prompt=changed)) == 700 // BLOCK_BYTES == 2
    assert common(blocks(input=text, instructions="a" * 300), blocks(input=text, instructions="b" * 300)) == 0


def test_token_ids_are_prompts_too():
    ids = list(range(1000, 1400))
    assert common(blocks(prompt=ids), blocks(prompt=[*ids, 7])) == len(json.dumps(ids)) // BLOCK_BYTES


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", b'{"prompt": "short"}', b"[" * 100_000])
def test_what_has_no_block_has_none(body):
    assert prefix_blocks(body) == []


def test_a_long_prompt_has_a_bounded_number_of_blocks():
    assert len(blocks(prompt="x" * (MAX_BLOCKS * BLOCK_BYTES * 2))) == MAX_BLOCKS


# Replicas

IDLE = {"a": 0, "b": 0, "c": 0}


def test_the_replica_with_the_longest_beginning_goes_first():
    shared = PrefixMap()
    shared.note([1, 2, 3], "a")
    shared.note([1, 2, 4], "b")
    assert shared.rank([1, 2, 3, 9], IDLE)[0] == "a"
    assert shared.rank([1, 2, 4, 9], IDLE)[0] == "b"
    assert shared.rank([1, 2, 5], IDLE)[0] == "b", "who had the common part last"


def test_every_replica_is_ranked_once():
    for given in ([], [1, 2], [3]):
        assert sorted(PrefixMap().rank(given, IDLE)) == ["a", "b", "c"]


def test_routers_that_know_nothing_agree_and_spread_prompts():
    first = [PrefixMap().rank([number], IDLE)[0] for number in range(300)]
    assert first == [PrefixMap().rank([number], dict(reversed(IDLE.items())))[0] for number in range(300)]
    assert all(70 < first.count(name) < 130 for name in IDLE)


def test_a_replica_that_is_gone_takes_only_its_own_prompts_along():
    left = {"a": 0, "b": 0}
    for number in range(100):
        before, after = PrefixMap().rank([number], IDLE)[0], PrefixMap().rank([number], left)[0]
        assert after == before or before == "c"


def test_a_known_replica_that_is_gone_is_not_chosen():
    shared = PrefixMap()
    shared.note([1, 2], "a")
    shared.note([1, 2, 3], "gone")
    assert shared.rank([1, 2, 3], IDLE)[0] in IDLE
    shared.note([1], "b")
    assert shared.rank([1, 5], IDLE)[0] == "b"


def test_a_beginning_that_all_share_is_spread_by_load():
    shared, loads = PrefixMap(), dict(IDLE)
    for _ in range(300):
        chosen = shared.rank([7, 8], loads)[0]
        shared.note([7, 8], chosen)
        loads[chosen] += 1
    assert sum(loads.values()) == 300
    assert max(loads.values()) <= 1.25 * 100 + 4 + 1


def test_a_light_load_stays_together():
    shared, loads = PrefixMap(), dict(IDLE)
    for _ in range(4):
        chosen = shared.rank([7, 8], loads)[0]
        shared.note([7, 8], chosen)
        loads[chosen] += 1
    assert max(loads.values()) == 4


def test_without_a_beginning_the_least_loaded_goes_first():
    assert PrefixMap().rank([], {"a": 3, "b": 1, "c": 2}) == ["b", "c", "a"]


def test_what_was_used_longest_ago_is_forgotten():
    shared = PrefixMap(capacity=3)
    shared.note([1, 2], "a")
    shared.note([3], "b")
    shared.note([1], "c")
    shared.note([4], "b")
    assert list(shared._owners) == [3, 1, 4]


# Calls


def call(body: bytes = b"{}") -> HttpCall:
    return HttpCall({"type": "http", "method": "POST", "path": "/"}, body, ())


async def collected(app, given: HttpCall) -> list[Head | bytes]:
    return [part async for part in responses(app, given)]


def test_a_response_comes_as_it_was_sent():
    async def app(scope, receive, send):
        message = await receive()
        await send({"type": "http.response.start", "status": 201, "headers": [(b"x", b"y")]})
        await send({"type": "http.response.body", "body": message["body"], "more_body": True})
        await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": b"!"})

    assert asyncio.run(collected(app, call(b"abc"))) == [Head(201, [(b"x", b"y")]), b"abc", b"!"]


def test_pieces_that_nobody_takes_are_merged():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):
            await send({"type": "http.response.body", "body": b"ab", "more_body": True})

    async def slowly():
        got = []
        async for part in responses(app, call()):
            got.append(part)
            await asyncio.sleep(0.02)
        return got

    assert asyncio.run(slowly())[1:] == [b"ab" * 1000]


def test_a_failure_of_the_app_is_raised_after_what_it_sent():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("broken")

    async def until_failure():
        parts = responses(app, call())
        assert await anext(parts) == Head(200, [])
        with pytest.raises(ValueError, match="broken"):
            await anext(parts)

    asyncio.run(until_failure())


def test_who_gives_up_hangs_up():
    seen = []

    async def app(scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        seen.append((await receive())["type"])

    async def give_up():
        parts = responses(app, call())
        assert await anext(parts) == Head(200, [])
        await parts.aclose()

    asyncio.run(give_up())
    assert seen == ["http.disconnect"]
