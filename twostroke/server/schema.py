"""What requests may hold: the parameters of `SamplingParams`, and OpenAI's, each honoured or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, create_model
from pydantic_core import PydanticCustomError

from ..errors import shown
from ..sampling_params import SamplingParams

WireInt = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]
"""Integers that the engine process can be sent."""


class Strict(BaseModel):
    """A JSON object without unknown keys, whose values have the stated types: "1" is not 1."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


def unsupported(**neutral: tuple[Any, ...]) -> Any:
    """Return a base class with fields of OpenAI's that are not supported.

    Args:
        neutral: for each field the values, besides null, that ask for nothing, and so may stand.
    """
    fields: Any = {name: (Annotated[Any, AfterValidator(_only(values))], None) for name, values in neutral.items()}
    return create_model("Unsupported", __base__=Strict, **fields)


def _only(neutral: tuple[Any, ...]) -> Callable[[Any, ValidationInfo], Any]:
    def check(value: Any, info: ValidationInfo) -> Any:
        if value is None or any(type(value) is type(ask) and value == ask for ask in neutral):
            return value
        given = f"{info.field_name}={shown(value)}"
        raise PydanticCustomError("unsupported", "{given} is not supported", {"given": given})

    return check


def _wire_type(hint: Any) -> Any:
    """`hint` with integers that fit the wire, and lists for sequences, as JSON has them."""
    origin, parts = get_origin(hint), tuple(_wire_type(part) for part in get_args(hint))
    if hint is int:
        return WireInt
    if origin in (Union, UnionType):
        return Union[parts]  # noqa: UP007 (the parts are known at run time alone)
    if origin is Sequence:
        return list[parts[0]]  # type: ignore[valid-type]
    if origin is Mapping:
        return dict[parts[0], parts[1]]  # type: ignore[valid-type]
    return hint


def _sampling_fields() -> Any:
    """A class with every field of `SamplingParams`; null and absent are its default."""
    hints = get_type_hints(SamplingParams)
    known: Any = {f.name: (_wire_type(hints[f.name]) | None, None) for f in fields(SamplingParams)}
    return create_model("SamplingFields", __base__=_MaybeUnsupported, **known)


_MaybeUnsupported = unsupported(best_of=(1,), frequency_penalty=(0, 0.0), presence_penalty=(0, 0.0), logit_bias=({},))
"""OpenAI's parameters that `SamplingParams` may lack."""

SamplingFields = _sampling_fields()


def sampling_params(body: Any, **values: Any) -> SamplingParams:
    """Return the parameters of a request body; `values` go before its fields. They are checked at submit."""
    given = {f.name: getattr(body, f.name, None) for f in fields(SamplingParams)}
    return SamplingParams(**({name: value for name, value in given.items() if value is not None} | values))


def request_body(kind: type[BaseModel]) -> dict[str, Any]:
    """What the OpenAPI description says of an endpoint that takes `kind`."""
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
