"""The messages of a chat, from what a request holds to what chat templates know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from .errors import ApiError
from .schema import Strict, unsupported
from .tools import Toolbox, ToolCall


class TextPart(Strict):
    type: Literal["text"]
    text: str


_MessageUnsupported = unsupported(refusal=(), annotations=([],), audio=(), function_call=())


class Message(_MessageUnsupported, Strict):  # type: ignore[misc, valid-type]
    """A message of a chat. `developer` is another word for `system`.

    `reasoning_content`, what the model thought before an earlier answer, may be given back, and is not in the prompt:
    models are trained to see answers alone. `tool_call_id` is a label: what tools gave stands in the calls' order.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, str]:
        """The message as chat templates know it; calls and what they gave are text."""
        role = {"developer": "system", "tool": "user"}.get(self.role, self.role)
        content = self._text()
        if self.tool_calls:
            content = "\n".join([*([content] if content else []), *(call.text() for call in self.tool_calls)])
        if self.role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
        return {"role": role, "content": content} | ({} if self.name is None else {"name": self.name})

    def check(self, place: str) -> None:
        """Raise ApiError if a part is missing, or is not one of such a message."""
        if self.content is None and not self.tool_calls:
            missing = f"{place}.content"
            raise ApiError(400, f"{missing} is missing", param=missing, code="missing_required_parameter")
        for name, role in (("tool_calls", "assistant"), ("reasoning_content", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, name) and self.role != role:
                param = f"{place}.{name}"
                raise ApiError(400, f"{param} is for messages of role {role!r}", param=param)

    def _text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)


def chat_for_template(messages: Sequence[Message], tools: Toolbox | None = None) -> list[dict[str, str]]:
    """The chat as chat templates know it, opened by what the model is told of its tools.

    Raises:
        ApiError: see `Message.check`.
    """
    chat: list[dict[str, str]] = []
    for place, message in enumerate(messages):
        message.check(f"messages[{place}]")
        made = message.for_template()
        if message.role == "tool" and place and messages[place - 1].role == "tool":
            chat[-1]["content"] += "\n" + made["content"]
        else:
            chat.append(made)
    return _introduce(chat, tools.introduction()) if tools else chat


def _introduce(chat: list[dict[str, str]], text: str) -> list[dict[str, str]]:
    if chat and chat[0]["role"] == "system":
        return [chat[0] | {"content": f"{chat[0]['content']}\n\n{text}"}, *chat[1:]]
    return [{"role": "system", "content": text}, *chat]
