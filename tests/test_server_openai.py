"""The real openai client, against a server that runs as a command: what it gets is what the engine says."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from serving import MODEL
from watching import PATIENCE

from twostroke import Engine, SamplingParams

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue?"}]
EXTRA = {"ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def local(small_dir):
    with Engine(small_dir, device="cpu", num_blocks=600, max_rows=8) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(ignore_eos=True, **fields)


def with_async_client(server, use):
    async def run():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await use(client)

    return asyncio.run(run())


def test_chat(client, local):
    expected = local.generate(CHAT, params(temperature=0, max_tokens=20))[0]
    got = client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=0, max_completion_tokens=20, extra_body=EXTRA
    )
    choice = got.choices[0]
    assert (choice.message.content, choice.finish_reason) == (expected.text, "length")
    assert choice.token_ids == expected.token_ids
    assert choice.message.role == "assistant"
    count = len(expected.prompt_token_ids)
    assert (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens) == (count, 20, count + 20)
    assert got.object == "chat.completion"


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": -50.0, "frequency_penalty": 0.5},
        {"logit_bias": {"17": 100, "18": 99.5}},
        {"extra_body": {"allowed_token_ids": [*range(40, 60)], "no_repeat_ngram_size": 2}},
        {"extra_body": {"bad_words": [" the", [40]], "repetition_penalty": 1.2, "typical_p": 0.9}},
    ],
    ids=str,
)
def test_parameters_of_the_engine_and_of_openai(client, local, fields):
    """A04: they change the tokens, to those that the engine itself gives."""
    fields = dict(fields)
    extra = fields.pop("extra_body", {})
    own = {**fields, **extra}
    if "logit_bias" in own:
        own["logit_bias"] = {int(token): bias for token, bias in own["logit_bias"].items()}
    expected = local.generate("Hello", params(temperature=0.5, seed=3, max_tokens=20, **own))[0].token_ids
    got = client.completions.create(
        model=MODEL, prompt="Hello", temperature=0.5, seed=3, max_tokens=20, extra_body={**EXTRA, **extra}, **fields
    )
    assert got.choices[0].token_ids == expected
    assert expected != local.generate("Hello", params(temperature=0.5, seed=3, max_tokens=20))[0].token_ids


def test_chat_stream(client, local):
    expected = local.generate(CHAT, params(temperature=0, max_tokens=20))[0]
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=CHAT,
            temperature=0,
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=EXTRA,
        )
    )
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    said = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(choice.delta.content or "" for choice in said) == expected.text
    assert [token for choice in said for token in getattr(choice, "token_ids", None) or []] == expected.token_ids
    assert [choice.finish_reason for choice in said] == [None] * (len(said) - 1) + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 20
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_stream_without_usage(client):
    chunks = list(client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=2, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_the_async_client(server, local):
    expected = local.generate([CHAT, "Once upon"], params(temperature=0, max_tokens=12))

    async def use(client):
        whole = client.chat.completions.create(
            model=MODEL, messages=CHAT, temperature=0, max_tokens=12, extra_body={"ignore_eos": True}
        )
        stream = await client.completions.create(
            model=MODEL, prompt="Once upon", temperature=0, max_tokens=12, stream=True, extra_body={"ignore_eos": True}
        )
        text = "".join([chunk.choices[0].text async for chunk in stream])
        return (await whole).choices[0].message.content, text

    assert with_async_client(server, use) == (expected[0].text, expected[1].text)


def test_content_in_parts_and_roles_that_mean_the_same(client):
    parts = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Why is "}, {"type": "text", "text": "the sky blue?"}]},
    ]
    answers = [
        client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=8)
        for messages in (CHAT, parts)
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    said = answers[0].choices[0].message
    again = [*CHAT, said.model_dump(), {"role": "user", "content": "Why?"}]
    assert client.chat.completions.create(model=MODEL, messages=again, max_tokens=2).choices


PROMPTS = {
    "a text": "Once upon a time",
    "texts": ["Once upon a time", "The capital", "end"],
    "ids": [7, 8, 9],
    "lists of ids": [[7, 8, 9], [10], [11, 12]],
}


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS.keys())
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_completions(client, local, prompt, echo, stream):
    """Of one prompt or several, whole or in pieces, the choices are what the engine says."""
    single = isinstance(prompt, str) or isinstance(prompt[0], int)
    prompts = [prompt] if single else prompt
    expected = local.generate(prompts, params(seed=5, max_tokens=12))
    told = [p if isinstance(p, str) else local.tokenizer.decode(p) for p in prompts]
    got = client.completions.create(
        model=MODEL, prompt=prompt, echo=echo, seed=5, max_tokens=12, stream=stream, extra_body=EXTRA
    )
    choices = [choice for chunk in got for choice in chunk.choices] if stream else got.choices
    for place, output in enumerate(expected):
        own = [choice for choice in choices if choice.index == place]
        assert "".join(choice.text for choice in own) == (told[place] if echo else "") + output.text
        assert [token for choice in own for token in choice.token_ids] == output.token_ids
        assert [choice.finish_reason for choice in own if choice.finish_reason] == ["length"]
    if not stream:
        assert got.usage.prompt_tokens == sum(len(output.prompt_token_ids) for output in expected)
        assert got.usage.completion_tokens == 12 * len(prompts)


@pytest.mark.parametrize("stream", [False, True])
def test_several_samples_of_several_prompts(client, local, stream):
    expected = local.generate(["Once", "The"], params(seed=5, max_tokens=8, n=3))
    samples = [sample for output in expected for sample in output.outputs]
    got = client.completions.create(
        model=MODEL, prompt=["Once", "The"], n=3, seed=5, max_tokens=8, echo=True, stream=stream, extra_body=EXTRA
    )
    choices = [choice for chunk in got for choice in chunk.choices] if stream else got.choices
    assert {choice.index for choice in choices} == set(range(6))
    for place, sample in enumerate(samples):
        own = [choice for choice in choices if choice.index == place]
        assert "".join(choice.text for choice in own) == ["Once", "The"][place // 3] + sample.text
        assert [token for choice in own for token in choice.token_ids] == sample.token_ids
    if not stream:
        assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (2, 48)


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_of_a_chat(client, local, stream):
    """R12, G01."""
    expected = local.generate(CHAT, params(seed=5, max_tokens=8, n=3))[0].outputs
    assert len({sample.text for sample in expected}) == 3
    got = client.chat.completions.create(
        model=MODEL, messages=CHAT, n=3, seed=5, max_tokens=8, stream=stream, extra_body={"ignore_eos": True}
    )
    texts = ["", "", ""]
    if stream:
        for choice in (chunk.choices[0] for chunk in got):
            texts[choice.index] += choice.delta.content or ""
    else:
        texts = [choice.message.content for choice in got.choices]
    assert texts == [sample.text for sample in expected]


def test_defaults_are_openais(client):
    """16 tokens for a completion; as many as fit for a chat."""
    body = {"ignore_eos": True}
    assert client.completions.create(model=MODEL, prompt="a", extra_body=body).usage.completion_tokens == 16
    long = [{"role": "user", "content": "a " * 1900}]
    usage = client.chat.completions.create(model=MODEL, messages=long, extra_body=body).usage
    assert usage.total_tokens == 2048
    assert usage.completion_tokens > 16


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_list", [False, True])
def test_stop(client, local, stream, as_list):
    text = local.generate("Once upon", params(temperature=0, max_tokens=30))[0].text
    stop = text[20:26]
    got = client.completions.create(
        model=MODEL,
        prompt="Once upon",
        temperature=0,
        max_tokens=30,
        stop=[stop, "never said"] if as_list else stop,
        stream=stream,
        extra_body={"ignore_eos": True},
    )
    choices = [chunk.choices[0] for chunk in got] if stream else got.choices
    assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
    assert choices[-1].finish_reason == "stop"


def test_each_request_has_its_own_parameters(server, local):
    """R13: one hot request first, greedy ones beside it and after it."""
    hot, cold = params(seed=3, temperature=5.0, max_tokens=16), params(temperature=0, max_tokens=16)
    expected = [output.text for output in local.generate(["Hello"] * 3, [hot, cold, cold])]

    async def use(client):
        async def ask(**fields):
            got = await client.completions.create(
                model=MODEL, prompt="Hello", max_tokens=16, extra_body={"ignore_eos": True}, **fields
            )
            return got.choices[0].text

        return await asyncio.gather(ask(seed=3, temperature=5.0), ask(temperature=0), ask(temperature=0))

    assert with_async_client(server, use) == expected
    assert expected[0] != expected[1]


def test_the_projects_own_parameters(client, local):
    expected = local.generate("Hello", params(seed=1, top_k=3, min_p=0.1, max_tokens=9, stop_token_ids=[5]))[0]
    extra = {"ignore_eos": True, "top_k": 3, "min_p": 0.1, "stop_token_ids": [5], "min_tokens": None}
    got = client.completions.create(model=MODEL, prompt="Hello", seed=1, max_tokens=9, extra_body=extra)
    assert got.choices[0].text == expected.text


def test_responses(client, local):
    expected = local.generate(CHAT, params(temperature=0, max_tokens=12))[0]
    got = client.responses.create(
        model=MODEL,
        instructions="Be brief.",
        input="Why is the sky blue?",
        temperature=0,
        max_output_tokens=12,
        metadata={"a": "b"},
        extra_body={"ignore_eos": True},
    )
    assert got.output_text == expected.text
    assert (got.status, got.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (got.usage.output_tokens, got.metadata) == (12, {"a": "b"})
    assert got.usage.input_tokens == len(expected.prompt_token_ids)
    items = [*CHAT, got.output[0].model_dump(), {"role": "user", "content": [{"type": "input_text", "text": "Why?"}]}]
    assert client.responses.create(model=MODEL, input=items, max_output_tokens=3).usage.output_tokens <= 3


def test_responses_stream(client, local):
    expected = local.generate([{"role": "user", "content": "Hi"}], params(temperature=0, max_tokens=12))[0]
    extra = {"ignore_eos": True}
    with client.responses.stream(
        model=MODEL, input="Hi", temperature=0, max_output_tokens=12, extra_body=extra
    ) as stream:
        events = list(stream)
    assert events[-1].response.output_text == expected.text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type for event in events]
    assert (names[0], names[-1]) == ("response.created", "response.incomplete")
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected.text


SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "ok": {"type": "boolean"}},
    "required": ["color", "ok"],
    "additionalProperties": False,
}


def test_formats(client):
    """By response_format, text.format, or the project's own parameter: the answer is what was asked for."""
    named = {"name": "thing", "schema": SCHEMA, "strict": True}

    def chat(**fields):
        got = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=200, seed=1, **fields)
        return got.choices[0].message.content

    def check(text):
        made = json.loads(text)
        assert set(made) == {"color", "ok"}
        assert made["color"] in ("red", "blue")

    check(chat(response_format={"type": "json_schema", "json_schema": named}))
    check(chat(extra_body={"structured": {"json_schema": SCHEMA}}))
    got = client.responses.create(model=MODEL, input="Hi", text={"format": {"type": "json_schema"} | named})
    check(got.output_text)
    assert got.text.format.name == "thing"
    assert chat(extra_body={"structured": {"choice": ["yes", "no"]}}) in ("yes", "no")
    assert chat(response_format={"type": "json_object"}).lstrip().startswith("{")
    with client.chat.completions.create(
        model=MODEL, messages=CHAT, stream=True, response_format={"type": "json_schema", "json_schema": named}
    ) as stream:
        check("".join(chunk.choices[0].delta.content or "" for chunk in stream))


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client, local, stream):
    """E05, E08: raw, each beside its own token, with the most likely ones."""
    expected = local.generate([CHAT, "Once"], params(temperature=0.5, seed=3, max_tokens=9, logprobs=3))
    fields = {"model": MODEL, "temperature": 0.5, "seed": 3, "max_tokens": 9, "stream": stream}
    got = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=3, **fields, extra_body=EXTRA)
    choices = [chunk.choices[0] for chunk in got] if stream else got.choices
    shown = [one for choice in choices if choice.logprobs for one in choice.logprobs.content]
    assert [one.logprob for one in shown] == pytest.approx([one.logprob for one in expected[0].logprobs], abs=1e-4)
    assert b"".join(bytes(one.bytes) for one in shown).decode(errors="replace") == expected[0].text
    for one, true in zip(shown, expected[0].logprobs, strict=True):
        assert [top.logprob for top in one.top_logprobs] == pytest.approx(list(true.top.values()), abs=1e-4)
        assert one.token == local.tokenizer.decode([true.token_id], skip_special_tokens=False)
    got = client.completions.create(prompt="Once", logprobs=3, **fields, extra_body={"ignore_eos": True})
    choices = [chunk.choices[0] for chunk in got] if stream else got.choices
    shown = [choice.logprobs for choice in choices if choice.logprobs]
    values = [value for one in shown for value in one.token_logprobs]
    assert values == pytest.approx([one.logprob for one in expected[1].logprobs], abs=1e-4)
    tokens = [token for one in shown for token in one.tokens]
    offsets = [offset for one in shown for offset in one.text_offset]
    assert offsets == [len("".join(tokens[:place])) for place in range(9)]
    assert all(len(top) == 3 for one in shown for top in one.top_logprobs)


def test_the_best_of_several(client, local):
    expected = local.generate("Once", params(seed=3, max_tokens=9, n=2, best_of=5))[0].outputs
    got = client.completions.create(
        model=MODEL, prompt="Once", seed=3, max_tokens=9, n=2, best_of=5, extra_body={"ignore_eos": True}
    )
    assert [choice.text for choice in got.choices] == [sample.text for sample in expected]


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "twostroke"
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.models.retrieve("gpt-9")


def test_tokenize_and_back(server, local):
    text = "Grüße, 世界 🙂"
    ids = server.post("/tokenize", {"prompt": text}).json
    assert ids["tokens"] == local.tokenizer.encode(text)
    assert ids["count"] == len(ids["tokens"])
    assert server.post("/detokenize", {"tokens": ids["tokens"]}).json == {"prompt": text}
    chat = server.post("/tokenize", {"messages": CHAT}).json["tokens"]
    assert chat == local.tokenizer.apply_chat_template(CHAT)
    assert server.post("/detokenize", {"tokens": chat[:1]}).json == {"prompt": "<|im_start|>"}
    assert server.post("/detokenize", {"tokens": chat[:1], "skip_special_tokens": True}).json == {"prompt": ""}


def test_errors_become_the_clients_exceptions(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=CHAT, temperature=-1)
    assert refused.value.param == "temperature"
    assert "temperature=-1" in refused.value.message
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.chat.completions.create(model="gpt-9", messages=CHAT)
