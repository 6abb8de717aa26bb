"""Tools and thoughts over HTTP, with the openai client."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest
from serving import MODEL
from watching import PATIENCE

from twostroke.openai.chat_messages import Message, chat_for_template
from twostroke.openai.tools import Tool, Toolbox

CHAT: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
CITY = {"type": "string", "enum": ["Paris", "Rome"]}
PARAMETERS = {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False}
ZONE = {
    "type": "object",
    "properties": {"zone": {"type": "boolean"}},
    "required": ["zone"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "time", "parameters": ZONE}},
]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client


def ask(client: Any, *, stream: bool, messages: Any = CHAT, **fields: Any) -> tuple[Any, str | None, list[Any], str]:
    """(thoughts, content, calls, finish reason) of an answer; of a stream, what its pieces make."""
    given = {"model": MODEL, "messages": messages, "max_tokens": 200, "seed": 3} | fields
    if not stream:
        choice = client.chat.completions.create(**given).choices[0]
        message = choice.message
        return (
            getattr(message, "reasoning_content", None),
            message.content,
            message.tool_calls or [],
            choice.finish_reason,
        )
    # The client's own helper joins the pieces of calls.
    given.pop("parallel_tool_calls", None)
    with client.chat.completions.stream(**given) as events:
        choice = events.get_final_completion().choices[0]
    message = choice.message
    return getattr(message, "reasoning_content", None), message.content, message.tool_calls or [], choice.finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_keeps_to_the_schema(client, stream):
    *_, calls, reason = ask(client, stream=stream, tools=TOOLS, tool_choice="required")
    (call,) = calls
    checks = {"weather": lambda made: made["city"] in CITY["enum"], "time": lambda made: made["zone"] in (True, False)}
    assert checks[call.function.name](json.loads(call.function.arguments))
    assert (call.type, reason) == ("function", "tool_calls")
    for name in checks:
        named = {"type": "function", "function": {"name": name}}
        _, content, (call,), _ = ask(client, stream=stream, tools=TOOLS, tool_choice=named)
        assert (call.function.name, content or None) == (name, None)
        assert checks[name](json.loads(call.function.arguments))


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_the_models_own_will(client, stream):
    """Content, then calls; the model is made to, by a grammar of the test's."""
    call = '<tool_call>\\n\\{"name": "time", "arguments": \\{"zone": (true|false)\\}\\}\\n</tool_call>'
    extra = {"structured": {"regex": f"[a-z ]{{5,9}}\\n{call}\\n{call}"}}
    _, content, calls, reason = ask(client, stream=stream, tools=TOOLS, extra_body=extra)
    assert re.fullmatch("[a-z ]{5,9}", content)
    assert [call.function.name for call in calls] == ["time", "time"]
    assert all(json.loads(call.function.arguments)["zone"] in (True, False) for call in calls)
    assert len({call.id for call in calls}) == 2
    assert reason == "tool_calls"
    # Where none may be called, the same text is text.
    _, content, calls, reason = ask(client, stream=stream, tools=TOOLS, tool_choice="none", extra_body=extra)
    assert "<tool_call>" in content
    assert (calls, reason) == ([], "stop")


def test_only_one_call(client):
    call = '<tool_call>\\{"name": "time", "arguments": \\{"zone": true\\}\\}</tool_call>'
    extra = {"structured": {"regex": call + call}}
    *_, calls, _ = ask(client, stream=False, tools=TOOLS, extra_body=extra, parallel_tool_calls=False)
    assert len(calls) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_not_the_answer(client, stream):
    extra = {"structured": {"regex": "<think>\\n[a-z ]{5,9}\\n</think>\\n\\n[A-Z]{3,5}"}}
    thoughts, content, _, reason = ask(client, stream=stream, extra_body=extra)
    assert re.fullmatch("[a-z ]{5,9}", thoughts)
    assert re.fullmatch("[A-Z]{3,5}", content)
    assert reason == "stop"


def test_g12_thoughts_and_forced_text_count_as_tokens_of_the_answer(client):
    extra = {"structured": {"regex": "<think>\\n[a-z ]{5,9}\\n</think>\\n\\n[A-Z]{3,5}"}, "return_token_ids": True}
    got = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=200, seed=3, extra_body=extra)
    ids = got.choices[0].token_ids
    assert got.usage.completion_tokens == len(ids) > 11
    assert got.usage.total_tokens == got.usage.prompt_tokens + len(ids)


def test_what_tools_gave_is_in_the_prompt(client, server):
    """The whole way round: a call, what it gave, and the next answer, which depends on that."""
    named = {"type": "function", "function": {"name": "weather"}}
    got = client.chat.completions.create(
        model=MODEL, messages=CHAT, tools=TOOLS, tool_choice=named, seed=1, max_tokens=99
    )
    message = got.choices[0].message
    call = message.tool_calls[0]
    said = []
    for gave in ("sun", "rain"):
        answer = {"role": "tool", "tool_call_id": call.id, "content": gave}
        chat = [*CHAT, message, answer]
        next_one = client.chat.completions.create(
            model=MODEL, messages=chat, tools=TOOLS, temperature=0, max_tokens=1, logprobs=True
        )
        said.append(next_one.choices[0].logprobs.content[0].logprob)
        asked = [*CHAT, {"role": "assistant", "tool_calls": [call.model_dump()]}, answer]
        tokens = server.post("/tokenize", {"messages": asked}).json["tokens"]
        text = server.post("/detokenize", {"tokens": tokens}).json["prompt"]
        assert '<tool_call>\n{"name": "weather", "arguments": {' in text
        assert f"<tool_response>\n{gave}\n</tool_response>" in text
    assert said[0] != said[1]


def test_what_the_model_is_told():
    toolbox = Toolbox([Tool.model_validate(tool) for tool in TOOLS], "auto")
    chat = [Message.model_validate(one) for one in ({"role": "developer", "content": "Be brief."}, CHAT[0])]
    told = chat_for_template(chat, toolbox)
    assert [one["role"] for one in told] == ["system", "user"]
    assert told[0]["content"].startswith("Be brief.\n\n")
    assert json.dumps(PARAMETERS) in told[0]["content"]
    assert [one["role"] for one in chat_for_template(chat[1:], toolbox)] == ["system", "user"]
    assert chat_for_template(chat, Toolbox([], None)) == chat_for_template(chat)
    two = [Message.model_validate({"role": "tool", "tool_call_id": name, "content": name}) for name in "ab"]
    (joined,) = chat_for_template(two)  # templates often want roles in turn
    assert joined["content"].count("<tool_response>") == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": TOOLS, "tool_choice": "required", "structured": {"regex": "a"}}, "tool_choice"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": 5}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a", "tool_call_id": "x"}]}, "messages[0].tool_call_id"),
    ],
    ids=str,
)
def test_what_is_refused(server, fields, param):
    refused = server.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2} | fields)
    assert refused.status == 400, refused.json
    assert refused.error["param"] == param
