"""What is done to the engine while it serves: pauses, sleep, new weights. These endpoints have keys of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ..errors import EngineAsleep, EngineClosed, EngineDead, InvalidWeights, NotEnoughMemory, TwostrokeError
from ..openai.answer_shapes import EngineState
from ..openai.errors import ApiError
from ..openai.schema import Strict
from .connection import read_body, read_options
from .description import answers, request_body
from .http_errors import json_response
from .service import Service
from .wire import Pause, ResetPrefixCache, Resume, Sleep, Task, UpdateWeights, Wake

_REFUSALS = (400, 413, 415, 500, 503)


class PauseRequest(Strict):
    """`keep` stops at once; `drain` lets requests that have begun go on to their end first."""

    mode: Literal["keep", "drain"] = "keep"


class WeightsRequest(Strict):
    """`weights`: a safetensors file or a directory of them, on the server's machine."""

    weights: str
    recompute: bool = False
    partial: bool = False


class NoOptions(Strict):
    pass


def add_admin(router: APIRouter, service: Service) -> None:
    @router.get("/state", responses=answers(EngineState, 500, 503))
    async def state() -> Response:
        """Is the engine paused, does it sleep, and which weights has it."""
        with _told():
            return json_response(await _state(service))

    @router.post(
        "/pause",
        openapi_extra=request_body(PauseRequest, required=False),
        responses=answers(EngineState, *_REFUSALS, 409),
    )
    async def pause(request: Request) -> Response:
        """Stop; requests wait. The answer comes when the device rests."""
        body = await read_options(request, PauseRequest, service.settings.max_body_bytes)
        return await _do(service, Pause(body.mode))

    @router.post(
        "/update_weights", openapi_extra=request_body(WeightsRequest), responses=answers(EngineState, *_REFUSALS, 409)
    )
    async def update_weights(request: Request) -> Response:
        """Replace the weights between two steps."""
        body = await read_body(request, WeightsRequest, service.settings.max_body_bytes)
        return await _do(service, UpdateWeights(body.weights, body.recompute, body.partial))

    for path, task, text in (
        ("/resume", Resume(), "Go on after a pause."),
        ("/sleep", Sleep(), "Stop, free the cache, and move the weights into host memory; requests wait."),
        ("/wake", Wake(), "Undo a sleep."),
        ("/reset_prefix_cache", ResetPrefixCache(), "Forget what the cache holds."),
    ):
        _add(router, service, path, task, text)


def _add(router: APIRouter, service: Service, path: str, task: Task, text: str) -> None:
    """Add an endpoint of a task without options."""

    @router.post(
        path,
        name=path,
        description=text,
        openapi_extra=request_body(NoOptions, required=False),
        responses=answers(EngineState, *_REFUSALS),
    )
    async def do(request: Request) -> Response:
        await read_options(request, NoOptions, service.settings.max_body_bytes)
        return await _do(service, task)


async def _do(service: Service, task: Task) -> Response:
    """Have a task done; it is done to its end, even if the client does not wait for the answer."""
    with _told():
        version = await service.outcome(service.engine.tasks.begin(task))
        return json_response(await _state(service) | {"weight_version": version})


async def _state(service: Service) -> dict[str, Any]:
    stats = await service.outcome(service.engine.ask_stats())
    return {name: stats[name] for name in EngineState.model_fields}


@contextmanager
def _told() -> Iterator[None]:
    """Make an answer of what a task fails with."""
    try:
        yield
    except InvalidWeights as error:
        raise ApiError(400, str(error), param="weights", code="invalid_weights") from error
    except EngineAsleep as error:
        raise ApiError(409, str(error), code="engine_asleep") from error
    except NotEnoughMemory as error:
        raise ApiError(503, str(error), code="not_enough_memory") from error
    except (EngineDead, EngineClosed) as error:
        raise ApiError(500, "the engine stopped before this was done", code="engine_stopped") from error
    except TwostrokeError as error:
        raise ApiError(500, str(error)) from error
