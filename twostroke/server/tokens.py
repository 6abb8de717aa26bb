"""/tokenize and /detokenize."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ..openai.answer_shapes import PromptText, Tokens
from ..openai.chat_messages import Message, chat_for_template
from ..openai.errors import ApiError, refusals
from ..openai.schema import Strict, WireInt
from .connection import read_body
from .description import BODY, answers, request_body
from .http_errors import json_response
from .service import Service


class TokenizeRequest(Strict):
    """`prompt` or `messages`. `add_special_tokens`: what the tokenizer puts around a prompt, such as a begin token."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: list[WireInt]
    skip_special_tokens: bool = False


def add_tokens(router: APIRouter, service: Service) -> None:
    @router.post("/tokenize", openapi_extra=request_body(TokenizeRequest), responses=answers(Tokens, *BODY))
    async def tokenize(request: Request) -> Response:
        """Return the token ids of a prompt or of a chat."""
        body = await read_body(request, TokenizeRequest, service.settings.max_body_bytes)
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "exactly one of prompt and messages is needed", param="prompt")
        with refusals():
            if body.messages is not None:
                ids = await service.encode_chat(chat_for_template(body.messages))
            else:
                ids = await service.encode(body.prompt or "", special_tokens=body.add_special_tokens)
        return json_response({"tokens": ids, "count": len(ids), "max_model_len": service.engine.max_model_len})

    @router.post("/detokenize", openapi_extra=request_body(DetokenizeRequest), responses=answers(PromptText, *BODY))
    async def detokenize(request: Request) -> Response:
        """Return the text of token ids."""
        body = await read_body(request, DetokenizeRequest, service.settings.max_body_bytes)
        service.check_model(body.model)
        text = service.tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
        return json_response({"prompt": text})
