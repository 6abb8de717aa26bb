"""The OpenAPI description: which answers each endpoint gives, and the bodies that it reads by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ..openai.answer_shapes import ErrorAnswer

BODY = (400, 404, 413, 415, 503)
"""How an endpoint refuses that reads a body, which names the model."""

GENERATION = (*BODY, 429, 500, 504)
"""How one refuses, or fails, that makes text."""

EVENTS: dict[str, Any] = {
    "content": {
        "text/event-stream": {
            "schema": {
                "description": "One of the events; `data` is JSON, or the `[DONE]` that ends a completion.",
                "type": "object",
                "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
                "required": ["data"],
                "additionalProperties": False,
            }
        }
    }
}
"""The description of an answer in pieces."""

_REQUEST_ID: dict[str, Any] = {"X-Request-Id": {"required": True, "schema": {"type": "string"}}}

_REFERENCE = "#/components/schemas/{model}"


def request_body(kind: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """What the description says of an endpoint that takes `kind`."""
    schema = {"$ref": _REFERENCE.format(model=kind.__name__)}
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


def answers(body: type[BaseModel], *refusals: int, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """What the description says of an endpoint's answers.

    Args:
        body: of a 200.
        refusals: other statuses, all of which have the body of an error.
        streams: the answer may come as events, too.
    """
    refused: dict[int | str, dict[str, Any]] = {status: {"model": ErrorAnswer} for status in refusals}
    return {200: {"model": body, **(EVENTS if streams else {})}} | refused


def text(*media_types: str) -> dict[str, Any]:
    """The description of an answer that is text of one of these types."""
    return {"content": {media_type: {"schema": {"type": "string"}} for media_type in media_types}}


def describe(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> dict[str, Any]:
    """Return the description of an application whose endpoints read `bodies` by themselves."""
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, models = models_json_schema([(body, "validation") for body in bodies], ref_template=_REFERENCE)
    schemas = schema.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(models["$defs"])
    for operation in [operation for path in schema["paths"].values() for operation in path.values()]:
        operation["responses"].pop("422", None)  # FastAPI's own, for parameters that it cannot read: all are text
        for answer in operation["responses"].values():
            answer["headers"] = _REQUEST_ID
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    return schema
