"""Prompts from the command line and from files, each with its sampling parameters and the place it came from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..errors import InvalidRequest
from ..sampling_params import SamplingParams
from ..structured import StructuredOutput

Prompt = str | list[int] | list[dict[str, Any]]

SAMPLING_KEYS = tuple(f.name for f in fields(SamplingParams) if f.name != "logits_processors")
"""The sampling parameters that JSON can hold."""

STRUCTURED_KEYS = tuple(f.name for f in fields(StructuredOutput))


@dataclass(frozen=True)
class Job:
    """One prompt to be answered.

    Attributes:
        prompt: raw text, token ids, or chat messages.
        params: how its tokens are chosen.
        source: where the prompt came from, for messages: `--prompt` or `FILE:LINE`.
    """

    prompt: Prompt
    params: SamplingParams
    source: str


def gather(texts: Sequence[str], file: Path | None, params: SamplingParams, chat: bool) -> list[Job]:
    """The prompts of the flags, then those of the file, in order.

    Args:
        texts: the values of `--prompt`.
        file: one prompt a line, empty lines skipped; JSON lines if its name ends in `.jsonl`.
        params: the sampling parameters of the flags, which a JSON line may override.
        chat: make each text the one user message of a chat.

    Raises:
        InvalidRequest: there is no prompt, or the file cannot be read; the message names the file and the line.
    """
    jobs = [Job(as_chat(text) if chat else text, params, "--prompt") for text in texts]
    if file is not None:
        read = _json_job if file.suffix == ".jsonl" else _text_job
        jobs += [read(line, params, chat, f"{file}:{number}") for number, line in _lines(file)]
    if not jobs:
        raise InvalidRequest("no prompt: give --prompt TEXT, or --prompts-file FILE with at least one line")
    return jobs


def as_chat(text: str) -> list[dict[str, Any]]:
    """A chat whose one message is the user's `text`."""
    return [{"role": "user", "content": text}]


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, each with its number, counted from 1."""
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, line.rstrip("\n")
    except OSError as error:
        raise InvalidRequest(f"--prompts-file {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"--prompts-file {file}: not UTF-8 text: {error}") from error


def _text_job(line: str, params: SamplingParams, chat: bool, source: str) -> Job:
    return Job(as_chat(line) if chat else line, params, source)


def _json_job(line: str, params: SamplingParams, chat: bool, source: str) -> Job:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{source}: not JSON: {error}") from error
    try:
        prompt, overrides = _split(value)
        if overrides:
            params = replace(params, **overrides)
            params.validate()
        return Job(_templated(prompt, chat), params, source)
    except InvalidRequest as error:
        raise InvalidRequest(f"{source}: {error}") from error


def _split(value: object) -> tuple[Prompt, dict[str, Any]]:
    """A JSON line's prompt and its own sampling parameters."""
    if isinstance(value, str):
        return value, {}
    if not isinstance(value, dict):
        raise InvalidRequest(f'{json.dumps(value)} must be a string, or an object with "prompt" or "messages"')
    unknown = [key for key in value if key not in ("prompt", "messages", *SAMPLING_KEYS)]
    if unknown:
        known = ", ".join(("prompt", "messages", *SAMPLING_KEYS))
        raise InvalidRequest(f"unknown key {unknown[0]!r}; known are {known}")
    if ("prompt" in value) == ("messages" in value):
        raise InvalidRequest('exactly one of "prompt" and "messages" is needed')
    overrides = {key: value[key] for key in SAMPLING_KEYS if key in value}
    if isinstance(bias := overrides.get("logit_bias"), dict):  # whose keys are strings in JSON
        overrides["logit_bias"] = {int(key) if key.isdecimal() else key: number for key, number in bias.items()}
    if isinstance(structured := overrides.get("structured"), dict):
        overrides["structured"] = _structured(structured)
    return (_messages(value["messages"]) if "messages" in value else _prompt(value["prompt"])), overrides


def _structured(value: dict[str, Any]) -> StructuredOutput:
    for key in value:
        if key not in STRUCTURED_KEYS:
            raise InvalidRequest(f"unknown key {key!r} in structured; known are {', '.join(STRUCTURED_KEYS)}")
    return StructuredOutput(**value)


def _prompt(value: object) -> Prompt:
    if isinstance(value, str) or (isinstance(value, list) and not any(isinstance(item, dict) for item in value)):
        return value
    raise InvalidRequest(f"prompt={json.dumps(value)} must be a string or a list of token ids")


def _messages(value: object) -> Prompt:
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"messages={json.dumps(value)} must be a list of at least one message")
    for place, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise InvalidRequest(f'messages[{place}]={json.dumps(message)} must be an object with "role" and "content"')
    return value


def _templated(prompt: Prompt, chat: bool) -> Prompt:
    if not chat:
        return prompt
    if isinstance(prompt, str):
        return as_chat(prompt)
    if all(isinstance(item, dict) for item in prompt) and prompt:
        return prompt
    raise InvalidRequest("prompt is a list of token ids: --chat needs text")
