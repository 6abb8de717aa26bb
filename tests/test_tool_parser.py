"""What a model says, taken apart: thoughts, content, calls; whole or in pieces of any size, it is the same."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.openai.errors import ApiError
from twostroke.openai.message import MessageParser
from twostroke.openai.reasoning import Reasoning
from twostroke.openai.tools import NamedTool, Tool, Toolbox

TOOLS = [
    Tool.model_validate({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
    for name in ("weather", "time")
]


def parser(*, choice=None, begun=False, several=True) -> MessageParser:
    return MessageParser(Reasoning(begun=begun), Toolbox(TOOLS, choice), several=several)


def whole(text: str, **own) -> tuple[str | None, str | None, list[tuple[str, str]]]:
    message = parser(**own).whole(text)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message.get("reasoning_content"), message["content"], calls


def streamed(pieces: list[str], **own) -> tuple[str | None, str | None, list[tuple[str, str]]]:
    made = parser(**own)
    thoughts = content = ""
    calls: list[list[str]] = []
    for place, piece in enumerate(pieces):
        delta = made.push(piece, last=place == len(pieces) - 1)
        thoughts += delta.get("reasoning_content", "")
        content += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            if "name" in call["function"]:
                assert call["index"] == len(calls)
                assert call["id"].startswith("call_")
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
    content_of_calls = None if calls and not content else content
    return thoughts or None, content_of_calls, [(name, arguments) for name, arguments in calls]


ARGUMENTS = '{"city": "Paris", "note": "a } \\" {", "deep": {"a": [1, {}]}}'
PARIS = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
NOON = '<tool_call>{"arguments": {"zone": 1}, "name": "time"}</tool_call>'

CASES = {
    "text": ("Hello <b>there</b>", {}, (None, "Hello <b>there</b>", [])),
    "nothing": ("", {}, (None, "", [])),
    "a call": (PARIS, {}, (None, None, [("weather", ARGUMENTS)])),
    "text and a call": (f"Let me see.\n\n{PARIS}", {}, (None, "Let me see.", [("weather", ARGUMENTS)])),
    "two calls, one in another order": (
        f"{PARIS}\n{NOON}\n",
        {},
        (None, None, [("weather", ARGUMENTS), ("time", '{"zone": 1}')]),
    ),
    "only one is wanted": (f"{PARIS}\n{NOON}", {"several": False}, (None, None, [("weather", ARGUMENTS)])),
    "a tool that is not there": (
        '<tool_call>{"name": "fly", "arguments": {}}</tool_call>',
        {},
        (None, '<tool_call>{"name": "fly", "arguments": {}}</tool_call>', []),
    ),
    "no JSON": ("a <tool_call>b</tool_call> c", {}, (None, "a <tool_call>b</tool_call> c", [])),
    "cut off in the name": ('<tool_call>{"name": "wea', {}, (None, '<tool_call>{"name": "wea', [])),
    "cut off in the arguments": (PARIS[:60], {}, (None, None, [("weather", ARGUMENTS[: 60 - PARIS.index(ARGUMENTS)])])),
    "a tag that never comes": ("1 <tool_cal", {}, (None, "1 <tool_cal", [])),
    "none may be called": (PARIS, {"choice": "none"}, (None, PARIS, [])),
    "forced": (
        '{"name": "time", "arguments": {"zone": 1}}',
        {"choice": "required"},
        (None, None, [("time", '{"zone": 1}')]),
    ),
    "thoughts": ("<think>\nHm.\n\nWell.\n</think>\n\nYes.", {}, ("Hm.\n\nWell.", "Yes.", [])),
    "thoughts that the prompt began": ("Hm.\n</think>\nYes.", {"begun": True}, ("Hm.", "Yes.", [])),
    "thoughts without end": ("<think>Hm. </thin", {}, ("Hm. </thin", "", [])),
    "thoughts and a call": (
        f"<think>Hm {NOON}</think>\n{PARIS}",
        {},
        (f"Hm {NOON}", None, [("weather", ARGUMENTS)]),
    ),
    "thoughts elsewhere are text": ("I <think> so </think>", {}, (None, "I <think> so </think>", [])),
    "a text that looks like thoughts at first": ("<thing>", {}, (None, "<thing>", [])),
}


@pytest.mark.parametrize("name", CASES)
def test_cases(name):
    text, own, expected = CASES[name]
    assert whole(text, **own) == expected
    for size in (1, 2, 3, 7):
        assert streamed([text[at : at + size] for at in range(0, len(text), size)] or [""], **own) == expected
    assert streamed([text, ""], **own) == expected


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "\n",
    '{"name": "weather", "arguments": ',
    "{",
    "}",
    '"',
    "\\",
    "a ",
    "<",
]


@settings(deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=14), st.booleans())
def test_pieces_make_what_the_whole_makes(pieces, begun):
    """However the text is cut, also amid tags: the same message."""
    text = "".join(pieces)
    expected = whole(text, begun=begun)
    assert streamed([*pieces, ""], begun=begun) == expected
    assert streamed(list(text) or [""], begun=begun) == expected


def test_arguments_come_as_they_are_written():
    """Who waits for a long argument sees it grow."""
    made = parser()
    first = made.push('<tool_call>{"name": "time", "arguments": {"text": "long', last=False)["tool_calls"][0]
    assert first["function"] == {"name": "time", "arguments": '{"text": "long'}
    assert made.push(" and longer", last=False)["tool_calls"][0]["function"] == {"arguments": " and longer"}


def test_what_tools_may_be_asked_for():
    named = NamedTool.model_validate({"type": "function", "function": {"name": "time"}})
    assert ("time" in Toolbox(TOOLS, named), "weather" in Toolbox(TOOLS, named)) == (True, False)
    assert not Toolbox(TOOLS, "none")
    assert not Toolbox((), "auto")
    schema = Toolbox(TOOLS, named).structured().json_schema
    assert schema["properties"]["name"] == {"const": "time"}
    assert [
        one["properties"]["name"]["const"] for one in Toolbox(TOOLS, "required").structured().json_schema["anyOf"]
    ] == [
        "weather",
        "time",
    ]
    assert json.loads(Toolbox(TOOLS, "auto").introduction().splitlines()[1])["name"] == "weather"
    for tools, choice, param in (
        ((), "required", "tool_choice"),
        (TOOLS[:1], named, "tool_choice"),
        (TOOLS * 2, None, "tools"),
    ):
        with pytest.raises(ApiError) as refused:
            Toolbox(tools, choice)
        assert refused.value.param == param
