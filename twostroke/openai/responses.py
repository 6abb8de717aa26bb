"""/v1/responses, for text. Nothing is stored."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from ..request import FinishReason
from ..sampling_params import SamplingParams
from ..text.output import RequestOutput
from ..text.tokenizer import Tokenizer
from .call import Call
from .events import event
from .fields import GenerationFields
from .formats import ResponsesFormat, with_format
from .schema import Strict, WireInt, sampling_params, unsupported

_PartUnsupported = unsupported(annotations=([],), logprobs=([],))


class InputPart(_PartUnsupported, Strict):  # type: ignore[misc, valid-type]
    """A part of a message: of the user's, or of an answer that came before."""

    type: Literal["input_text", "output_text"]
    text: str


_MessageUnsupported = unsupported(phase=())


class InputMessage(_MessageUnsupported, Strict):  # type: ignore[misc, valid-type]
    type: Literal["message"] | None = None
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputPart]

    def for_template(self) -> dict[str, str]:
        """The message as chat templates know it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


_TextUnsupported = unsupported(verbosity=("medium",))


class TextOptions(_TextUnsupported, Strict):  # type: ignore[misc, valid-type]
    format: ResponsesFormat | None = None


_Unsupported = unsupported(
    max_tokens=(),
    n=(1,),
    best_of=(1,),
    logprobs=(),
    background=(False,),
    context_management=([],),
    conversation=(),
    include=([],),
    max_tool_calls=(),
    parallel_tool_calls=(True, False),
    previous_response_id=(),
    prompt=(),
    reasoning=({},),
    stream_options=({}, {"include_obfuscation": False}),
    tool_choice=("none", "auto"),
    tools=([],),
    top_logprobs=(0,),
    truncation=("disabled",),
)


class ResponsesRequest(_Unsupported, GenerationFields):  # type: ignore[misc, valid-type]
    input: str | list[InputMessage]
    instructions: str | None = None
    max_output_tokens: WireInt | None = None
    text: TextOptions | None = None
    metadata: dict[str, str] | None = None

    def prompts(self) -> list[list[dict[str, str]]]:
        """The one chat that the input makes."""
        first = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            return [[*first, {"role": "user", "content": self.input}]]
        return [first + [message.for_template() for message in self.input]]

    def names(self) -> dict[str, str]:
        """What the body calls parameters, where that is not the engine's name."""
        return {"max_tokens": "max_output_tokens", "messages": "input"}

    def params(self) -> SamplingParams:
        """The sampling parameters; without a limit the answer may fill the context."""
        asked = self.text.format if self.text else None
        shape = with_format("text.format", asked.structured() if asked else None, self.structured)
        return sampling_params(self, max_tokens=self.max_output_tokens, **shape)

    def answer(self, model: str, tokenizer: Tokenizer | None, params: SamplingParams) -> ResponsesAnswer:
        """What words the answer of `model`."""
        return ResponsesAnswer(self, params, model)


class ResponsesAnswer:
    """A response whose output is one message with one text."""

    def __init__(self, body: ResponsesRequest, params: SamplingParams, model: str) -> None:
        self._body = body
        self._params = params
        self._model = model
        self._id = f"resp_{uuid.uuid4().hex}"
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._numbers = itertools.count()

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        cut = output.finish_reason is FinishReason.LENGTH
        status = "incomplete" if cut else "completed"
        details = {"reason": "max_output_tokens"} if cut else None
        item = self._item(status, [_part(output.text or "")])
        return self._response(status, [item], _usage(output), details)

    async def events(self, call: Call) -> AsyncIterator[bytes]:
        text: list[str] = []
        yield self._event("response.created", response=self._response("in_progress", []))
        yield self._event("response.in_progress", response=self._response("in_progress", []))
        yield self._event("response.output_item.added", output_index=0, item=self._item("in_progress", []))
        yield self._part_event("response.content_part.added", part=_part(""))
        async for _, delta in call.deltas():
            if delta.text:
                text.append(delta.text)
                yield self._part_event("response.output_text.delta", delta=delta.text, logprobs=[])
        whole = self.whole(await call.outputs())
        yield self._part_event("response.output_text.done", text="".join(text), logprobs=[])
        yield self._part_event("response.content_part.done", part=_part("".join(text)))
        yield self._event("response.output_item.done", output_index=0, item=whole["output"][0])
        yield self._event(f"response.{whole['status']}", response=whole)

    def _format(self) -> dict[str, Any]:
        given = self._body.text.format if self._body.text else None
        return given.model_dump(by_alias=True, exclude_none=True) if given else {"type": "text"}

    def _part_event(self, name: str, **fields: Any) -> bytes:
        return self._event(name, item_id=self._item_id, output_index=0, content_index=0, **fields)

    def _event(self, name: str, **fields: Any) -> bytes:
        return event({"type": name, "sequence_number": next(self._numbers)} | fields, name)

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _response(
        self,
        status: str,
        output: list[dict[str, Any]],
        usage: dict[str, Any] | None = None,
        incomplete_details: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": incomplete_details,
            "instructions": self._body.instructions,
            "max_output_tokens": self._body.max_output_tokens,
            "metadata": self._body.metadata or {},
            "model": self._model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": self._params.temperature,
            "text": {"format": self._format()},
            "tool_choice": "auto",
            "tools": [],
            "top_p": self._params.top_p,
            "truncation": "disabled",
            "usage": usage,
            "user": self._body.user,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(output: RequestOutput) -> dict[str, Any]:
    prompt, made = len(output.prompt_token_ids), len(output.token_ids)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": output.cached_tokens},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + made,
    }
