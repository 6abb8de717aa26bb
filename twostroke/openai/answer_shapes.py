"""The shapes of answers, for the OpenAPI description. Answers are made without them; tests hold the two together."""

from __future__ import annotations

from typing import Any, Literal

from .schema import Strict


class ErrorFacts(Strict):
    message: str
    type: Literal[
        "invalid_request_error", "authentication_error", "not_found_error", "rate_limit_error", "server_error"
    ]
    param: str | None
    code: str | None


class ErrorAnswer(Strict):
    error: ErrorFacts


class PromptTokensDetails(Strict):
    cached_tokens: int


class Usage(Strict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Head(Strict):
    """What every completion begins with."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage


class TokenEntry(Strict):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(TokenEntry):
    top_logprobs: list[TokenEntry]


class ChatLogprobs(Strict):
    content: list[ChatToken]
    refusal: None


class AnswerCallFunction(Strict):
    name: str
    arguments: str


class AnswerCall(Strict):
    id: str
    type: Literal["function"]
    function: AnswerCallFunction


class AnswerMessage(Strict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[AnswerCall] | None = None


class ChatChoice(Strict):
    """`token_ids` are there if `return_token_ids` was."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | None = None


class ChatCompletion(Head):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextLogprobs(Strict):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(Strict):
    """`token_ids` are there if `return_token_ids` was."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | None = None


class TextCompletion(Head):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class OutputText(Strict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputMessage(Strict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["completed", "incomplete"]
    content: list[OutputText]


class IncompleteDetails(Strict):
    reason: Literal["max_output_tokens"]


class ResponseText(Strict):
    format: dict[str, Any]


class OutputTokensDetails(Strict):
    reasoning_tokens: int


class ResponseUsage(Strict):
    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseAnswer(Strict):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage]
    parallel_tool_calls: bool
    previous_response_id: None
    store: bool
    temperature: float
    text: ResponseText
    tool_choice: Literal["auto"]
    tools: list[Any]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage
    user: str | None


class Status(Strict):
    status: Literal["ok", "ready"]


class EngineState(Strict):
    paused: bool
    asleep: bool
    weight_version: int


class VersionAnswer(Strict):
    version: str


class ModelAnswer(Strict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Strict):
    object: Literal["list"]
    data: list[ModelAnswer]


class Tokens(Strict):
    tokens: list[int]
    count: int
    max_model_len: int


class PromptText(Strict):
    prompt: str
