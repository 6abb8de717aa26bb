"""Chat templates: from messages to the prompt text that a model was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import InvalidRequest, shown

Message = Mapping[str, Any]


class ChatTemplate:
    """A Jinja template that turns messages into a prompt, with the variables and filters that the field agreed on.

    Rendering is sandboxed: a template comes with the model's files. Safe to use from several threads.

    Args:
        source: the template's text.
        special_tokens: variables such as `bos_token` and `eos_token`.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)

    @cached_property
    def _template(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        return environment.from_string(self._source)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Return the prompt text of `messages`.

        Args:
            messages: dicts with a `role` and a `content`, both strings; other keys are the template's to read.
            add_generation_prompt: end with what opens the assistant's answer.

        Raises:
            InvalidRequest: the messages are malformed, or the template fails on them.
        """
        check_messages(messages)
        try:
            return self._template.render(
                # Templates ask whether a key is there, not whether it is None.
                messages=[{key: value for key, value in message.items() if value is not None} for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:  # a template is a program: it may fail with any exception
            raise InvalidRequest(f"messages: the chat template failed on them: {error}") from error


def check_messages(messages: object) -> None:
    """Raise InvalidRequest, naming what is wrong, unless `messages` is a non-empty list of chat messages."""
    if not isinstance(messages, list):
        raise InvalidRequest(f"messages must be a list of dicts, not {type(messages).__name__}")
    if not messages:
        raise InvalidRequest("messages=[]: at least one message is needed")
    for index, message in enumerate(messages):
        _check_message(f"messages[{index}]", message)


def _check_message(place: str, message: object) -> None:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{place} must be a dict with 'role' and 'content', not {shown(message)}")
    for key in ("role", "content"):
        if key not in message:
            raise InvalidRequest(f"{place} has no {key!r}")
        if not isinstance(message[key], str):
            raise InvalidRequest(f"{place}[{key!r}] must be a string, not {shown(message[key])}")


def find_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the source of a model's chat template, None if it has none.

    A file `chat_template.jinja` goes before the entry of `settings` (tokenizer_config.json), which is a string or a
    list of named templates, of which `default` counts.
    """
    file = directory / "chat_template.jinja"
    if file.is_file():
        # Newlines as they stand: a template's text is part of the prompt.
        return file.read_bytes().decode("utf-8")
    entry = settings.get("chat_template")
    if isinstance(entry, list):
        entry = {named["name"]: named["template"] for named in entry}
    return entry.get("default") if isinstance(entry, dict) else entry


class _GenerationBlock(Extension):
    """`{% generation %}`: marks the assistant's words for training; here it only passes them on."""

    tags = {"generation"}  # noqa: RUF012 (as in the base class)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which would put `\\u003c` into prompts."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
