"""The formats that an answer may be asked to have, as OpenAI's APIs word them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from ..structured import StructuredOutput
from .errors import ApiError
from .schema import Strict


class NamedSchema(Strict):
    """A JSON schema. `name` and `description` are labels; an answer keeps to the schema, whatever `strict` says."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ChatFormat(Strict):
    """`response_format` of a chat."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    def structured(self) -> StructuredOutput | None:
        """What it means; None is any text."""
        return _structured("response_format", self.type, self.json_schema)


class ResponsesFormat(NamedSchema):
    """`text.format` of a response."""

    type: Literal["text", "json_object", "json_schema"]

    def structured(self) -> StructuredOutput | None:
        """What it means; None is any text."""
        return _structured("text.format", self.type, self)


def _structured(field: str, kind: str, named: NamedSchema | None) -> StructuredOutput | None:
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutput(json_object=True)
    if named is None or named.schema_ is None:
        raise ApiError(400, f"{field} has no schema", param=field, code="missing_required_parameter")
    return StructuredOutput(json_schema=named.schema_)


def with_format(field: str, structured: StructuredOutput | None, given: object) -> dict[str, StructuredOutput]:
    """Return the sampling parameter that a format makes, if any.

    Raises:
        ApiError: the request has `structured`, `given`, too.
    """
    if structured is None:
        return {}
    if given is not None:
        raise ApiError(400, f"{field} and structured both say what the text must be: give one", param=field)
    return {"structured": structured}
