"""The endpoints that make text: /v1/chat/completions, /v1/completions, /v1/responses."""

from __future__ import annotations

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response

from ..openai.answer_shapes import ChatCompletion, ResponseAnswer, TextCompletion
from ..openai.chat import ChatRequest
from ..openai.completions import CompletionRequest
from ..openai.errors import refusals
from ..openai.responses import ResponsesRequest
from ..prompts import require_tokens
from .connection import read_body
from .description import GENERATION, answers, request_body
from .generation import respond
from .service import Service


def add_chat(router: APIRouter, service: Service) -> None:
    said = answers(ChatCompletion, *GENERATION, streams=True)

    @router.post("/v1/chat/completions", openapi_extra=request_body(ChatRequest), responses=said)
    async def chat_completions(request: Request) -> Response:
        """Answer a chat."""
        return await _answer_chat(request, service, ChatRequest)


def add_completions(router: APIRouter, service: Service) -> None:
    said = answers(TextCompletion, *GENERATION, streams=True)

    @router.post("/v1/completions", openapi_extra=request_body(CompletionRequest), responses=said)
    async def completions(request: Request) -> Response:
        """Continue one or more prompts."""
        body = await read_body(request, CompletionRequest, service.settings.max_body_bytes)
        service.check_model(body.model)
        body.check_stream()
        prompts = body.prompts()
        service.check_samples(len(prompts), body.n or 1)
        with refusals():
            ids = [
                require_tokens(p, await service.encode(p)) if isinstance(p, str) else np.array(p, np.int64)
                for p in prompts
            ]
            params = body.params()
            answer = body.answer(service.settings.model_name, service.engine.tokenizer, params)
            call = await service.start(ids, [params] * len(ids))
        return await respond(request, call, answer, stream=bool(body.stream))


def add_responses(router: APIRouter, service: Service) -> None:
    said = answers(ResponseAnswer, *GENERATION, streams=True)

    @router.post("/v1/responses", openapi_extra=request_body(ResponsesRequest), responses=said)
    async def responses(request: Request) -> Response:
        """Answer a text or a chat."""
        return await _answer_chat(request, service, ResponsesRequest)


async def _answer_chat(
    request: Request, service: Service, kind: type[ChatRequest] | type[ResponsesRequest]
) -> Response:
    body: ChatRequest | ResponsesRequest = await read_body(request, kind, service.settings.max_body_bytes)
    service.check_model(body.model)
    body.check_stream()
    params = body.params()
    answer = body.answer(service.settings.model_name, service.engine.tokenizer, params)
    with refusals(**body.names()):
        prompt = await service.encode_chat(*body.prompts())
        call = await service.start([prompt], [params])
    return await respond(request, call, answer, stream=bool(body.stream))
