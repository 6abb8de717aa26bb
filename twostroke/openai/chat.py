"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from ..request import FinishReason
from ..sampling_params import SamplingParams
from ..structured import StructuredOutput
from ..text.output import Delta, RequestOutput, SampleOutput
from ..text.tokenizer import Tokenizer
from .answers import finish, head, usage
from .call import Call, samples
from .chat_messages import Message, chat_for_template
from .errors import ApiError
from .events import DONE, event
from .fields import StreamingFields
from .formats import ChatFormat, with_format
from .logprobs import LogprobWriter
from .message import MessageParser
from .reasoning import OPEN, Reasoning
from .schema import WireInt, sampling_params, unsupported
from .tools import Tool, Toolbox, ToolChoice

TAG_TOKENS = 8
"""Tokens at the end of a prompt in which the tag that begins thinking lies, and a line break."""

_Unsupported = unsupported(
    audio=(),
    function_call=("none", "auto"),
    functions=([],),
    modalities=(["text"],),
    prediction=(),
    reasoning_effort=("none",),
    verbosity=("medium",),
    web_search_options=(),
)


class ChatRequest(_Unsupported, StreamingFields):  # type: ignore[misc, valid-type]
    messages: list[Message]
    max_completion_tokens: WireInt | None = None
    response_format: ChatFormat | None = None
    logprobs: bool | None = None
    top_logprobs: WireInt | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    def toolbox(self) -> Toolbox:
        """The tools that may be called."""
        return Toolbox(self.tools or (), self.tool_choice)

    def prompts(self) -> list[list[dict[str, str]]]:
        """The one chat, as chat templates know it."""
        return [chat_for_template(self.messages, self.toolbox())]

    def names(self) -> dict[str, str]:
        """What the body calls parameters, where that is not the engine's name."""
        names = {"logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if self.response_format is not None:
            names["structured"] = "response_format"
        elif self.tools and self.structured is None:
            names["structured"] = "tools"
        return names

    def params(self) -> SamplingParams:
        """The sampling parameters; without a limit the answer may fill the context."""
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ApiError(400, "max_tokens and max_completion_tokens are the same: give one", param="max_tokens")
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, f"top_logprobs={self.top_logprobs} needs logprobs=true", param="top_logprobs")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        structured = self.response_format.structured() if self.response_format else None
        shape = with_format("response_format", structured, self.structured)
        if tools := self.toolbox():
            shape = self._call_shape(tools, shape)
        return sampling_params(self, max_tokens=limit, logprobs=logprobs, **shape)

    def _call_shape(self, tools: Toolbox, shape: dict[str, StructuredOutput]) -> dict[str, StructuredOutput]:
        """What the text has to be where there are tools."""
        if shape:
            message = "response_format leaves no room for calls: with tools, give tool_choice none"
            raise ApiError(400, message, param="response_format")
        return with_format("tool_choice", tools.structured() if tools.forced else None, self.structured)

    def answer(self, model: str, tokenizer: Tokenizer | None, params: SamplingParams) -> ChatAnswer:
        """What words the answer of `model`."""
        return ChatAnswer(self, model, tokenizer, params)


class ChatAnswer:
    """A chat completion, of which each choice is one sample."""

    def __init__(self, body: ChatRequest, model: str, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        self._body = body
        self._model = model
        self._tokenizer = tokenizer
        self._logprobs = LogprobWriter(tokenizer)
        self._tools = body.toolbox()
        # NOTE: a text that must be of some form is that from its first character on, unless thinking has a budget.
        self._goes_on_thinking = params.structured is None or params.max_thinking_tokens is not None

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        prompt = outputs[0].prompt_token_ids
        choices = [self._choice(place, sample, self._parser(prompt)) for place, sample in enumerate(samples(outputs))]
        return head("chatcmpl", "chat.completion", self._model) | {"choices": choices, "usage": usage(outputs)}

    def _parser(self, prompt: Sequence[int]) -> MessageParser:
        reasoning = Reasoning(begun=self._goes_on_thinking and self._is_thinking(prompt))
        return MessageParser(reasoning, self._tools, several=self._body.parallel_tool_calls is not False)

    def _is_thinking(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends in the begin of thinking."""
        if self._tokenizer is None:
            return False
        return self._tokenizer.decode(prompt[-TAG_TOKENS:], skip_special_tokens=False).rstrip().endswith(OPEN)

    def _choice(self, index: int, output: SampleOutput, parser: MessageParser) -> dict[str, Any]:
        message = parser.whole(output.text or "")
        logprobs = self._logprobs.for_chat(output.logprobs)
        reason = self._finish(output.finish_reason, parser)
        choice = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}
        return choice | ({"token_ids": output.token_ids} if self._body.return_token_ids else {})

    async def events(self, call: Call) -> AsyncIterator[bytes]:
        shared = head("chatcmpl", "chat.completion.chunk", self._model)
        if self._body.include_usage:
            shared["usage"] = None
        opening = {"role": "assistant", "content": "", "refusal": None}
        for place in range(call.choices):
            choice = {"index": place, "delta": opening, "logprobs": None, "finish_reason": None}
            yield event(shared | {"choices": [choice]})
        prompt = call.handles[0].sample.request.prompt.tolist()
        parsers = [self._parser(prompt) for _ in range(call.choices)]
        async for place, delta in call.deltas():
            yield event(shared | {"choices": [self._piece(place, delta, parsers[place])]})
        if self._body.include_usage:
            yield event(shared | {"choices": [], "usage": usage(await call.outputs())})
        yield DONE

    def _piece(self, index: int, delta: Delta, parser: MessageParser) -> dict[str, Any]:
        content = parser.push(delta.text, last=delta.finish_reason is not None)
        logprobs = self._logprobs.for_chat(delta.logprobs)
        reason = self._finish(delta.finish_reason, parser)
        piece = {"index": index, "delta": content, "logprobs": logprobs, "finish_reason": reason}
        return piece | ({"token_ids": delta.token_ids} if self._body.return_token_ids else {})

    def _finish(self, reason: FinishReason | None, parser: MessageParser) -> str | None:
        return "tool_calls" if reason is FinishReason.STOP and parser.has_called else finish(reason)
