"""Requests with stop strings: the same answer in every mode, streamed or whole, however the sample ends meanwhile."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
import transformers
from engines import MODES, running
from scripted import Scripted, save_small
from test_stop_strings import expected
from watching import PATIENCE, Turns, make_handles, quiet, wait_until

from twostroke import Engine, SamplingParams

PROMPTS = [list(range(500, 509)), list(range(900, 907)), list(range(1200, 1210))]
END = 2  # <|im_end|>, the end-of-sequence token


def greedy(max_tokens=40, **others):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **{"ignore_eos": True, **others})


@pytest.fixture(scope="module")
def small_dir(smollm2_dir, tmp_path_factory):
    return save_small(smollm2_dir, tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module", params=MODES)
def engine(request, small_dir):
    """Two prompts with their answers do not fit together: the younger is preempted."""
    with running(request.param, small_dir, num_blocks=16, block_size=4, max_chunk_tokens=6) as engine:
        yield engine


@pytest.fixture(scope="module")
def tokenizer(engine):
    return engine.tokenizer


def sampled(seed, **others):
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=40, ignore_eos=True, **others)


def run(engine, prompts, params):
    """The outputs of requests that start together, and for each the deltas where it was streamed, which every other is.

    Checks what must hold for any of them.
    """
    handles = make_handles(engine, prompts, params)
    engine._start(handles)
    deltas = [list(handle) if place % 2 else None for place, handle in enumerate(handles)]
    outputs = [handle.result(PATIENCE) for handle in handles]
    for output, pieces in zip(outputs, deltas, strict=True):
        if pieces is not None:
            assert "".join(delta.text for delta in pieces) == output.text
            assert [token for delta in pieces for token in delta.token_ids] == output.token_ids
            assert [delta.finish_reason for delta in pieces[:-1]] == [None] * (len(pieces) - 1)
            assert pieces[-1].finish_reason == output.finish_reason
    quiet(engine)
    return outputs


def agree(output, rule, otherwise="length"):
    assert (output.text, output.token_ids) == (rule.text, rule.ids)
    assert output.finish_reason == ("stop" if rule.stopped else otherwise)
    assert output.error is None


def test_any_stops_under_preemption(engine, tokenizer):
    """The answer is what the definition leaves of the run without stop strings."""
    rng = random.Random(0)
    preempted = stopped = 0
    for seed in range(6):
        prompts = [rng.choice(PROMPTS) for _ in range(3)]
        plain = run(engine, prompts, [sampled(seed + place) for place in range(3)])
        assert all(len(output.token_ids) == 40 for output in plain)
        options = [
            dict(
                include_stop=rng.random() < 0.5, min_tokens=rng.choice([0, 0, 7, 30]), stop=make_stops(rng, output.text)
            )
            for output in plain
        ]
        outputs = run(engine, prompts, [sampled(seed + place, **option) for place, option in enumerate(options)])
        for output, whole, option in zip(outputs, plain, options, strict=True):
            rule = expected(
                tokenizer,
                whole.token_ids,
                option["stop"],
                include=option["include_stop"],
                min_tokens=option["min_tokens"],
            )
            agree(output, rule)
            preempted += output.preemptions > 0 and rule.stopped
            stopped += rule.stopped
    assert preempted > 3
    assert 6 < stopped < 18


def make_stops(rng, text):
    """Late pieces of the text, and pieces that it nearly has."""
    places = [rng.randrange(len(text) // 2, len(text) - 12) for _ in range(3)]
    return [text[at : at + rng.randrange(1, 12)] + rng.choice(["", "§", "§"]) for at in places]


def script(tokenizer, *parts):
    """The ids of the parts: texts, and ids as they are."""
    return [id_ for part in parts for id_ in (tokenizer.encode(part) if isinstance(part, str) else [part])]


def answer(engine, ids, params, prompt=PROMPTS[0]):
    """The output of a model that says `ids`, the same streamed and whole."""
    with Scripted(engine, len(prompt), ids):
        whole, streamed = run(engine, [prompt, prompt], [params, params])
    assert (whole.text, whole.token_ids, whole.finish_reason) == (
        streamed.text,
        streamed.token_ids,
        streamed.finish_reason,
    )
    return whole


TEXT = "One two three, 🙂 four 똻 five 👩‍👩‍👧 six. END"


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("stop", "left"),
    [
        ("🙂", "One two three, "),
        ("\u200d👧", "One two three, 🙂 four 똻 five 👩‍👩"),
        ("똻 five", "One two three, 🙂 four "),
        ("o three, 🙂 fo", "One tw"),
        (["four", "three, 🙂 four 똻 six"], "One two three, 🙂 "),
        (["ur", "four"], "One two three, 🙂 "),
        (["six", "nine", "five 👩‍👩‍👧 six."], "One two three, 🙂 four 똻 five 👩‍👩‍👧 "),
        ("On", ""),
        ("O", ""),
        (["ENDE", "x "], None),
        (["\n", "Two"], None),
    ],
    ids=repr,
)
def test_text_ends_before_the_first_stop_string(engine, tokenizer, stop, left, include):
    """Within tokens and across them, characters of many tokens, stop strings that overlap, at the very beginning."""
    ids = script(tokenizer, TEXT, " .", " :")
    output = answer(engine, ids, greedy(len(ids), stop=stop, include_stop=include))
    rule = expected(tokenizer, ids, [stop] if isinstance(stop, str) else stop, include=include)
    agree(output, rule)
    if left is None:
        assert output.text == TEXT + " . :"
    elif not include:
        assert output.text == left
    else:
        assert output.text.endswith(tuple([stop] if isinstance(stop, str) else stop))
        assert output.text.startswith(left)
    assert tokenizer.decode(output.token_ids).startswith(output.text) or not include


def test_a_stop_string_in_the_prompt_does_not_count(engine, tokenizer):
    """Not even its beginning."""
    prompt = tokenizer.encode("stop here, sto")
    output = answer(engine, script(tokenizer, "p go"), greedy(3, stop=["stop", "here"]), prompt)
    assert output.finish_reason == "length"
    assert output.text.startswith("p go")


def test_a_match_with_the_last_token_is_a_stop(engine, tokenizer):
    ids = script(tokenizer, "one two three")
    assert len(ids) == 3
    for max_tokens, reason in ((3, "stop"), (2, "length")):
        output = answer(engine, ids, greedy(max_tokens, stop=" three"))
        assert (output.finish_reason, output.text, output.token_ids) == (reason, "one two", ids[:2])


def test_at_the_end_of_sequence(engine, tokenizer):
    """D04: what is held comes out; a match with the last token before it is a stop string's, without the stop token."""
    ids = script(tokenizer, "one two three", END)
    for include in (False, True):
        held = answer(engine, ids, greedy(stop=" three four", include_stop=include, ignore_eos=False))
        assert (held.finish_reason, held.text, held.token_ids) == ("stop", "one two three", ids)
        kept = answer(engine, ids, greedy(stop=" three", include_stop=include, ignore_eos=False))
        assert (kept.finish_reason, kept.text) == ("stop", "one two three" if include else "one two")
        assert kept.token_ids == (ids[:3] if include else ids[:2])


@pytest.mark.parametrize("stop", ["<|im_end|>", "nd|>", " b<|im_", "d|> c"])
def test_the_text_of_special_tokens(engine, tokenizer, stop):
    """It counts where it is text, and only there; that of the stop token never is."""
    ids = script(tokenizer, "a b", END, " c d")
    shown = answer(engine, ids, greedy(len(ids), stop=stop, skip_special_tokens=False))
    assert shown.finish_reason == "stop"
    assert shown.text == "a b<|im_end|> c d".partition(stop)[0]
    skipped = answer(engine, ids, greedy(len(ids), stop=stop))
    assert (skipped.finish_reason, skipped.text, skipped.token_ids) == ("length", "a b c d", ids)
    ended = answer(engine, ids, greedy(stop=stop, skip_special_tokens=False, ignore_eos=False))
    assert (ended.finish_reason, ended.text, ended.token_ids) == ("stop", "a b", ids[:3])


def test_special_tokens_are_shown_on_request(engine, tokenizer):
    ids = script(tokenizer, "a", END, "b")
    for skip, text in ((True, "ab"), (False, "a<|im_end|>b")):
        assert answer(engine, ids, greedy(3, skip_special_tokens=skip)).text == text


def test_c15_no_stop_string_before_min_tokens(engine, tokenizer):
    """It must lie in the text behind the first `min_tokens` tokens as a whole."""
    ids = script(tokenizer, "the cat the dog the end")
    assert tokenizer.decode(ids[:2]) == "the cat"
    for min_tokens, count in ((0, 0), (1, 2), (2, 2), (3, 4), (4, 4), (5, None), (6, None)):
        output = answer(engine, ids, greedy(6, stop=["the", " the"], min_tokens=min_tokens))
        assert output.finish_reason == ("length" if count is None else "stop")
        assert output.token_ids == ids[:count]
    output = answer(engine, ids, greedy(6, stop="cat the", min_tokens=2))
    assert output.finish_reason == "length"


def test_each_parameter_changes_the_output(engine, tokenizer):
    """C22: and [] does not."""
    ids = script(tokenizer, "one", END, " two three four")
    settings = [{}, {"stop": " three"}, {"stop": " three", "include_stop": True}, {"skip_special_tokens": False}]
    outputs = [answer(engine, ids, greedy(5, **own)) for own in [*settings, {"stop": []}, {"stop": [" three"]}]]
    assert [output.text for output in outputs] == [
        "one two three four",
        "one two",
        "one two three",
        "one<|im_end|> two three four",
        "one two three four",
        "one two",
    ]
    assert [len(output.token_ids) for output in outputs] == [5, 3, 4, 5, 5, 3]


# How else a sample may end


@pytest.mark.parametrize("ending", ["length", "stop token", "error", "cancel"])
@pytest.mark.parametrize("heard", [True, False])
def test_the_answer_does_not_depend_on_when_the_loop_hears_of_it(engine, tokenizer, monkeypatch, ending, heard):
    """The sample goes on until then, and may end by itself; in the worst case the loop never hears."""
    last = {"length": " x", "stop token": END, "error": None, "cancel": " x"}[ending]
    ids = [*script(tokenizer, "one two three four", " x", " x"), *(script(tokenizer, last) if last else [None])]
    params = greedy(2000 if ending == "cancel" else 9, stop=" three", ignore_eos=False)
    if not heard:
        monkeypatch.setattr(engine._parts.scheduler, "finish", lambda sample, count: None)
    with Scripted(engine, len(PROMPTS[0]), ids):
        handle = engine.submit(PROMPTS[0], params) if ending == "cancel" and not heard else None
        if handle is not None:
            small = len(ids) + 4
            wait_until(lambda: len(engine._parts.scheduler.batch.known_tokens(handle.sample)) > len(PROMPTS[0]) + small)
            handle.cancel()
            outputs = [handle.result(PATIENCE)]
        else:
            outputs = run(engine, PROMPTS[:1] * 2, [params, params])
    for output in outputs:
        assert (output.finish_reason, output.text, output.token_ids) == ("stop", "one two", ids[:2])
        assert output.error is None
    quiet(engine)


def test_a_match_frees_the_sample(engine, tokenizer):
    """Whether anybody streams it or not: not after `max_tokens`."""
    ids = script(tokenizer, "one two three four")
    with Scripted(engine, len(PROMPTS[0]), ids):
        handle = engine.submit(PROMPTS[0], greedy(None, stop=" three"))
        assert handle.result(PATIENCE).token_ids == ids[:2]
    assert (handle.sample.finish_reason, handle.sample.output.tolist()) == ("stop", ids[:2])
    assert next(iter(handle)).text == "one two"
    quiet(engine)


def test_an_error_hands_over_what_was_held(engine, tokenizer):
    ids = script(tokenizer, "one two three")
    with Scripted(engine, len(PROMPTS[0]), [*ids, None]):
        for output in run(engine, PROMPTS[:1] * 2, [greedy(stop=" two three four")] * 2):
            assert (output.finish_reason, output.text, output.token_ids) == ("error", "one two three", ids)
            assert "NaN" in output.error


def test_d06_a_cancel_hands_over_what_was_held(engine, tokenizer):
    ids = script(tokenizer, "Hello", " x")
    with Scripted(engine, len(PROMPTS[0]), ids):
        handle = engine.stream(PROMPTS[0], greedy(None, stop=" x" * 100 + "END"))
        deltas = iter(handle)
        first = next(deltas)
        assert (first.text, first.token_ids) == ("Hello", ids[:1])
        wait_until(lambda: engine._life.delivery._streams[handle.sample]._hidden.startswith(" x" * 4))
        handle.cancel()
        rest = list(deltas)
    output = handle.result(PATIENCE)
    assert (output.finish_reason, output.text) == ("cancelled", tokenizer.decode(output.token_ids))
    assert output.text.startswith("Hello" + " x" * 4)
    assert first.text + "".join(delta.text for delta in rest) == output.text
    assert first.token_ids + [token for delta in rest for token in delta.token_ids] == output.token_ids
    quiet(engine)


def test_cancel_at_every_turn_of_the_loop(engine, tokenizer):
    """Before the match the beginning of the text; from then on the answer."""
    ids = script(tokenizer, "one two three four five")
    turns, reasons = Turns(engine), set()
    with Scripted(engine, len(PROMPTS[0]), ids):
        for turn in range(10):
            (handle,) = make_handles(engine, PROMPTS[:1], [greedy(stop=" three four")])
            turns.at(turn, partial(lambda handle, scheduler: scheduler.cancel(handle.sample), handle))
            engine._start([handle])
            output = handle.result(PATIENCE)
            if output.finish_reason == "stop":
                assert (output.text, output.token_ids) == ("one two", ids[:2])
            else:
                assert output.finish_reason == "cancelled"
                assert output.token_ids == ids[: len(output.token_ids)][:3]
                assert output.text == tokenizer.decode(output.token_ids)
            reasons.add((output.finish_reason, len(output.token_ids)))
    quiet(engine)
    assert {("cancelled", 0), ("cancelled", 3), ("stop", 2)} <= reasons


@pytest.mark.parametrize("mode", MODES)
def test_an_engine_that_closes_hands_over_the_answer(small_dir, mode):
    with running(mode, small_dir, num_blocks=64) as engine:
        ids = script(engine.tokenizer, "one two three four")
        with Scripted(engine, len(PROMPTS[0]), ids):
            handles = [engine.submit(PROMPTS[0], greedy(None, stop=" three")) for _ in range(8)]
            handles[0].result(PATIENCE)
            engine.close()
        for handle in handles:
            output = handle.result(PATIENCE)
            if output.finish_reason == "stop":
                assert (output.text, output.token_ids) == ("one two", ids[:2])
            else:
                assert output.finish_reason == "cancelled"
                assert output.text == engine.tokenizer.decode(output.token_ids)
                assert output.token_ids == ids[: len(output.token_ids)][:2]


# transformers


def test_stops_where_transformers_does(smollm2_dir):
    """Which keeps the stop string, and what its last token has beyond it."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_dir)
    stopped = 0
    with Engine(smollm2_dir, device="cpu", max_rows=8, num_blocks=100) as engine:
        for prompt, stops in (
            ("The capital of France is", [".", " and"]),
            ("Once upon a time, there was a", ["ly,", "ittle vi"]),
            ("1 2 3 4 5 6", [" 12", "9 1"]),
            ("The capital of France is", ["not there"]),
        ):
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            whole = reference.generate(
                ids, max_new_tokens=16, do_sample=False, stop_strings=stops, tokenizer=tokenizer
            )[0, ids.shape[1] :].tolist()
            params = SamplingParams(temperature=0, max_tokens=16, stop=stops, include_stop=True)
            output = engine.generate(ids[0].tolist(), params)[0]
            assert output.token_ids == whole
            text = tokenizer.decode(whole)
            assert text.startswith(output.text)
            assert (output.finish_reason == "stop") == any(stop in text for stop in stops)
            if output.finish_reason == "stop":
                stopped += 1
                assert output.text.endswith(tuple(stops))
                assert tokenizer.decode(whole[:-1]) in output.text
    assert stopped >= 2
