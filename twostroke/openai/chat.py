"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from ..sampling_params import SamplingParams
from ..text.output import Delta, RequestOutput, SampleOutput
from ..text.tokenizer import Tokenizer
from .answers import finish, head, usage
from .call import Call, samples
from .errors import ApiError
from .events import DONE, event
from .fields import StreamingFields
from .formats import ChatFormat, with_format
from .logprobs import LogprobWriter
from .schema import Strict, WireInt, sampling_params, unsupported


class TextPart(Strict):
    type: Literal["text"]
    text: str


_MessageUnsupported = unsupported(refusal=(), annotations=([],), audio=(), function_call=(), tool_calls=([],))


class Message(_MessageUnsupported, Strict):  # type: ignore[misc, valid-type]
    """A message of a chat. `developer` is another word for `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """The message as chat templates know it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content} | ({} if self.name is None else {"name": self.name})


_Unsupported = unsupported(
    audio=(),
    function_call=("none", "auto"),
    functions=([],),
    modalities=(["text"],),
    parallel_tool_calls=(True, False),
    prediction=(),
    reasoning_effort=("none",),
    tool_choice=("none", "auto"),
    tools=([],),
    verbosity=("medium",),
    web_search_options=(),
)


class ChatRequest(_Unsupported, StreamingFields):  # type: ignore[misc, valid-type]
    messages: list[Message]
    max_completion_tokens: WireInt | None = None
    response_format: ChatFormat | None = None
    logprobs: bool | None = None
    top_logprobs: WireInt | None = None

    def prompts(self) -> list[list[dict[str, str]]]:
        """The one chat, as chat templates know it."""
        return [[message.for_template() for message in self.messages]]

    def names(self) -> dict[str, str]:
        """What the body calls parameters, where that is not the engine's name."""
        names = {"logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if self.response_format is not None:
            names["structured"] = "response_format"
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
        return sampling_params(self, max_tokens=limit, logprobs=logprobs, **shape)

    def answer(self, model: str, tokenizer: Tokenizer | None, params: SamplingParams) -> ChatAnswer:
        """What words the answer of `model`."""
        return ChatAnswer(self, model, LogprobWriter(tokenizer))


class ChatAnswer:
    """A chat completion, of which each choice is one sample."""

    def __init__(self, body: ChatRequest, model: str, logprobs: LogprobWriter) -> None:
        self._body = body
        self._model = model
        self._logprobs = logprobs

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = [self._choice(place, sample) for place, sample in enumerate(samples(outputs))]
        return head("chatcmpl", "chat.completion", self._model) | {"choices": choices, "usage": usage(outputs)}

    def _choice(self, index: int, output: SampleOutput) -> dict[str, Any]:
        message = {"role": "assistant", "content": output.text or "", "refusal": None}
        logprobs = self._logprobs.for_chat(output.logprobs)
        reason = finish(output.finish_reason)
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
        async for place, delta in call.deltas():
            yield event(shared | {"choices": [self._piece(place, delta)]})
        if self._body.include_usage:
            yield event(shared | {"choices": [], "usage": usage(await call.outputs())})
        yield DONE

    def _piece(self, index: int, delta: Delta) -> dict[str, Any]:
        content = {"content": delta.text} if delta.text else {}
        logprobs = self._logprobs.for_chat(delta.logprobs)
        piece = {"index": index, "delta": content, "logprobs": logprobs, "finish_reason": finish(delta.finish_reason)}
        return piece | ({"token_ids": delta.token_ids} if self._body.return_token_ids else {})
