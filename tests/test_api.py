"""What callers see: prompts of every kind, outputs, text and its deltas, timings, the progress bar."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from engines import MODES, running
from scripted import Scripted
from watching import PATIENCE, quiet

from twostroke import Engine, InvalidRequest, SamplingParams

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
EMOJI = "🙂🙃 naïve 안녕 똻 — 你好 🇫🇷👩‍👩‍👧 "
END_OF_TURN = 2


def greedy(max_tokens=8, **others):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **others)


@pytest.fixture(scope="module", params=MODES)
def engine(request):
    with running(request.param, num_blocks=100) as engine:
        yield engine


@pytest.fixture(scope="module")
def smollm2(smollm2_dir):
    with Engine(smollm2_dir, device="cpu", max_rows=8, num_blocks=200, seed=0) as engine:
        yield engine


def tokens(outputs):
    return [output.token_ids for output in outputs]


# Prompts


def test_prompts_of_every_kind_in_one_call(smollm2):
    text = "The capital of France is"
    ids = smollm2.tokenizer.encode(text)
    chat_ids = smollm2.tokenizer.apply_chat_template(CHAT)
    prompts = [text, ids, np.array(ids), np.array(ids, np.uint16), tuple(ids), CHAT]
    outputs = smollm2.generate(prompts, greedy())
    assert [output.prompt_token_ids for output in outputs] == [ids] * 5 + [chat_ids]
    assert [output.index for output in outputs] == list(range(6))
    assert len({output.text for output in outputs[:5]}) == 1
    assert "Paris" in outputs[0].text
    assert "Paris" in outputs[5].text
    assert len({output.request_id for output in outputs}) == 6


@pytest.mark.parametrize("many", [list, tuple, iter], ids=["list", "tuple", "iterator"])
def test_one_prompt_or_several(smollm2, many):
    ids = [504, 3575, 282]
    one = smollm2.generate(ids, greedy(2))
    assert len(one) == 1
    assert tokens(smollm2.generate(many([ids, ids]), greedy(2))) == tokens(one) * 2
    assert tokens(smollm2.generate(np.array([ids, ids]), greedy(2))) == tokens(one) * 2
    assert tokens(smollm2.generate(np.array(ids), greedy(2))) == tokens(one)
    assert tokens(smollm2.generate(smollm2.tokenizer.decode(ids), greedy(2))) == tokens(one)
    assert tokens(smollm2.generate(CHAT, greedy(2))) == tokens(smollm2.generate(many([CHAT]), greedy(2)))


def test_an_empty_text_is_shown_as_it_was_given(smollm2):
    """B10: the user wrote no list of token ids."""
    for prompt, place in (("", ""), (["a", ""], r", in prompts\[1\]")):
        with pytest.raises(InvalidRequest, match=rf"^prompt='' has no tokens: at least one is needed{place}$"):
            smollm2.generate(prompt)


@pytest.mark.parametrize("prompt", ["\ud800", [{"role": "user"}], [{"role": "user", "content": 3}], [CHAT[0], 5]])
def test_text_and_chats_that_make_no_prompt(smollm2, prompt):
    """A lone surrogate; malformed messages."""
    with pytest.raises(InvalidRequest):
        smollm2.submit(prompt)
    with pytest.raises(InvalidRequest):
        smollm2.generate([prompt])


def test_a_lone_surrogate_is_refused_by_name_and_value(smollm2):
    for name, params in (
        ("bad_words[0]", {"bad_words": ["\ud800"]}),
        ("thinking_end", {"max_thinking_tokens": 2, "thinking_start": "a", "thinking_end": "\ud800"}),
        ("stop[1]", {"stop": ["a", "\ud800"]}),
    ):
        with pytest.raises(InvalidRequest) as refused:
            smollm2.submit("a", SamplingParams(**params))
        assert f"{name}='\\ud800' holds a lone surrogate" in str(refused.value)
    with pytest.raises(InvalidRequest, match=r"prompt='a.*' holds a lone surrogate at position 1"):
        smollm2.submit("a\ud800")


def test_no_prompts_no_outputs(engine):
    assert engine.generate([]) == []
    assert engine.generate(iter([]), []) == []


def test_outputs_come_in_the_order_of_the_prompts(engine):
    """However they end: the first is the longest, and there are more than rows."""
    lengths = [30, 1, 12, 3, 25, 2, 7, 1, 9, 4, 20]
    prompts = [[5 + row] * (1 + row) for row in range(len(lengths))]
    outputs = engine.generate(prompts, [greedy(length, ignore_eos=True) for length in lengths])
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.token_ids) for output in outputs] == lengths
    assert [output.index for output in outputs] == list(range(len(lengths)))
    ends = [output.timings.finished for output in outputs]
    assert ends[1] < ends[0]


def test_params_for_all_or_for_each(engine):
    prompt = [3, 4, 5]
    each = [greedy(3, ignore_eos=True), SamplingParams(seed=1, max_tokens=5, ignore_eos=True)]
    together = engine.generate([prompt, prompt], each)
    assert tokens(together) == [tokens(engine.generate(prompt, own))[0] for own in each]
    assert tokens(engine.generate([prompt, prompt], tuple(each))) == tokens(together)
    assert len(engine.generate(prompt)[0].token_ids) <= SamplingParams().max_tokens == 128
    assert tokens(engine.generate([prompt] * 2, each[0])) == [tokens(together)[0]] * 2


# Outputs


def test_an_output_tells_what_the_request_was(engine):
    output = engine.submit([3, 4, 5], SamplingParams(seed=2**63, max_tokens=4, ignore_eos=True), request_id="mine")
    output = output.result(PATIENCE)
    assert (output.request_id, output.index, output.seed, output.preemptions) == ("mine", 0, 2**63, 0)
    assert (output.finish_reason, output.error, output.text) == ("length", None, None)
    assert all(type(token) is int for token in output.prompt_token_ids + output.token_ids)


@pytest.mark.parametrize("max_tokens", [1, 9])
def test_timings_are_in_order(engine, max_tokens):
    prompts = [[5 + row] * 20 for row in range(12)]
    for output in engine.generate(prompts, greedy(max_tokens, ignore_eos=True)):
        moments = output.timings
        assert moments.submitted <= moments.admitted < moments.first_token <= moments.finished
        assert (moments.first_token < moments.finished) or max_tokens == 1
    quiet(engine)


def test_a_drawn_seed_is_returned_and_gives_the_same_tokens_in_any_company(engine):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    first = engine.generate([[7] * 9, [7] * 9, [8] * 3], params)
    assert len({output.seed for output in first}) == 3
    assert first[0].token_ids != first[1].token_ids
    for output in first:
        again = SamplingParams(max_tokens=12, ignore_eos=True, seed=output.seed)
        crowd = engine.generate([[9] * 30, output.prompt_token_ids, [4]], [params, again, greedy()])
        assert crowd[1].token_ids == output.token_ids
        assert engine.generate(output.prompt_token_ids, again)[0].token_ids == output.token_ids


# Text


def pieces(engine, handle, way):
    if way == "for":
        return list(handle)

    async def consume():
        return [delta async for delta in handle]

    return asyncio.run(consume())


@pytest.mark.parametrize("mode", ["sync", "async", "delayed"])
def test_the_deltas_of_text_make_the_text(smollm2_dir, mode):
    """D07: no character is ever split, whatever the cut; streamed from the start, or from where the caller looks."""
    with running(mode, smollm2_dir, num_blocks=100) as engine:
        decode = engine.tokenizer.decode
        params = SamplingParams(max_tokens=16, ignore_eos=True, temperature=1.3)
        for seed, way in ((1, "for"), (2, "async for")):
            own = SamplingParams(max_tokens=16, ignore_eos=True, temperature=1.3, seed=seed)
            handle = engine.stream(EMOJI * 3, own)
            beside = engine.submit(EMOJI, params)
            deltas = pieces(engine, handle, way)
            output = handle.result()
            assert "".join(delta.text for delta in deltas) == output.text == decode(output.token_ids)
            assert [token for delta in deltas for token in delta.token_ids] == output.token_ids
            assert len(deltas) > 3
            late = beside.result(PATIENCE)
            (delta,) = beside
            assert (delta.text, delta.token_ids) == (late.text, late.token_ids)


@pytest.mark.parametrize("way", ["for", "async for"])
def test_characters_of_many_tokens_come_whole(smollm2, way):
    """D07: emoji and CJK, whose bytes are tokens of their own."""
    ids = smollm2.tokenizer.encode(EMOJI)
    prompt = [504, 3575, 282]
    assert len(ids) > len(EMOJI), "some characters need several tokens"
    with Scripted(smollm2, len(prompt), ids):
        handle = smollm2.stream(prompt, greedy(len(ids), ignore_eos=True))
        deltas = pieces(smollm2, handle, way)
    assert handle.result().text == EMOJI == "".join(delta.text for delta in deltas)
    assert "\ufffd" not in "".join(delta.text for delta in deltas)


def test_held_text_is_delivered_when_the_stream_is_cancelled(smollm2):
    """D06: the bytes of half an emoji are held back; a cancel hands them over, as the decode of all ids has them."""
    ids = smollm2.tokenizer.encode("🙂")
    prompt = [504, 3575, 282]
    assert len(ids) > 1
    with Scripted(smollm2, len(prompt), ids[:1]):
        handle = smollm2.stream(prompt, greedy(400, ignore_eos=True))
        deltas = []
        for delta in handle:
            deltas.append(delta)
            handle.cancel()
    output = handle.result()
    assert output.finish_reason == "cancelled"
    assert "".join(delta.text for delta in deltas) == output.text == smollm2.tokenizer.decode(output.token_ids)
    assert "\ufffd" in output.text


@pytest.mark.parametrize("stop", ["end of turn", "stop token id"])
def test_a_stop_token_is_in_the_ids_and_not_in_the_text(smollm2, stop):
    """C17, D03: once; the end-of-turn marker of a chat is never visible, nor a stop id that has a text."""
    plain = smollm2.generate(CHAT, greedy(12))[0]
    if stop == "end of turn":
        params, expected = greedy(30), plain.token_ids
        assert expected[-1] == END_OF_TURN
    else:
        stop_id = plain.token_ids[3]
        params, expected = greedy(12, stop_token_ids=[stop_id]), plain.token_ids[:4]
        assert smollm2.tokenizer.decode([stop_id])
    handle = smollm2.stream(CHAT, params)
    deltas = list(handle)
    output = handle.result()
    assert (output.finish_reason, output.token_ids) == ("stop", expected)
    assert output.text == smollm2.tokenizer.decode(expected[:-1]) == "".join(delta.text for delta in deltas)
    assert [token for delta in deltas for token in delta.token_ids] == expected
    assert smollm2.generate(CHAT, params)[0].text == output.text
    assert "im_end" not in output.text


# Progress


@pytest.mark.parametrize("shown", [True, False, None])
def test_one_progress_bar_on_stderr_when_asked_for(engine, capsys, shown):
    outputs = engine.generate([[5], [6], [7]], greedy(3), progress=shown)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert ("3/3" in printed.err) == bool(shown)
    assert bool(printed.err) == bool(shown)
    assert len(outputs) == 3


def test_the_progress_bar_counts_requests_as_they_end(engine, monkeypatch):
    """Not in the order of the prompts: behind a long first one it would stand still."""
    from rich.progress import Progress

    shown, update = [], Progress.update

    def watched(bar, task, **fields):
        shown.append(fields["completed"])
        return update(bar, task, **fields)

    monkeypatch.setattr(Progress, "update", watched)
    monkeypatch.setattr("twostroke.progress._REFRESH_SECONDS", 0.002)
    engine.generate([[5] * 5, [6], [7]], [greedy(150, ignore_eos=True), *[greedy(1)] * 2], progress=True)
    assert 2 in shown
    assert shown[-1] == 3
    assert shown == sorted(shown)
