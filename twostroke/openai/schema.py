"""What requests may hold: the parameters of `SamplingParams`, and OpenAI's, each honoured or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    create_model,
)
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
    fields: Any = {name: (_neutral(values), None) for name, values in neutral.items()}
    return create_model("Unsupported", __base__=Strict, **fields)


def _neutral(values: tuple[Any, ...]) -> Any:
    return Annotated[Any, AfterValidator(_only(values)), WithJsonSchema({"enum": [None, *values]})]


def _only(neutral: tuple[Any, ...]) -> Callable[[Any, ValidationInfo], Any]:
    def check(value: Any, info: ValidationInfo) -> Any:
        if value is None or any(type(value) is type(ask) and value == ask for ask in neutral):
            return value
        given = f"{info.field_name}={shown(value)}"
        raise PydanticCustomError("unsupported", "{given} is not supported", {"given": given})

    return check


class Part(Strict):
    """A JSON object that stands for a dataclass."""

    kind: ClassVar[Any]

    def value(self) -> Any:
        """The dataclass; null and absent are its defaults."""
        given = {name: getattr(self, name) for name in self.kind.__dataclass_fields__}
        return self.kind(**{name: value for name, value in given.items() if value is not None})


def _key(key: Any) -> Any:
    """A key of a JSON object, which is a string even if it is a number."""
    return int(key) if isinstance(key, str) and key.isdecimal() else key


def _wire_type(hint: Any) -> Any:
    """`hint` as JSON can say it: integers fit the wire, sequences are lists, dataclasses are objects."""
    origin, parts = get_origin(hint), tuple(_wire_type(part) for part in get_args(hint))
    if hint is int:
        return WireInt
    if is_dataclass(hint):
        part: Any = create_model(hint.__name__, __base__=Part, **_wire_fields(hint))  # type: ignore[union-attr]
        part.kind = hint
        return part
    if origin in (Union, UnionType):
        return Union[parts]  # noqa: UP007 (the parts are known at run time alone)
    if origin is Sequence:
        return list[parts[0]]  # type: ignore[valid-type]
    if origin is Mapping:
        return dict[Annotated[parts[0], BeforeValidator(_key)], parts[1]]  # type: ignore[valid-type]
    return hint


def _wire_fields(kind: Any) -> dict[str, Any]:
    """The fields of a dataclass, all of which may be null or absent. Those that hold functions JSON cannot say."""
    hints = {name: hint for name, hint in get_type_hints(kind).items() if "Callable" not in str(hint)}
    return {f.name: (_wire_type(hints[f.name]) | None, None) for f in fields(kind) if f.name in hints}


SamplingFields: Any = create_model("SamplingFields", __base__=Strict, **_wire_fields(SamplingParams))
"""Every field of `SamplingParams`; null and absent are its default."""


def sampling_params(body: Any, **values: Any) -> SamplingParams:
    """Return the parameters of a request body; `values` go before its fields. They are checked at submit."""
    given = {f.name: getattr(body, f.name, None) for f in fields(SamplingParams)}
    given = {name: value.value() if isinstance(value, Part) else value for name, value in given.items()}
    if given["best_of"] == 1:  # the best of one; the engine takes any best_of for a ranking, which cannot be streamed
        given["best_of"] = None
    return SamplingParams(**({name: value for name, value in given.items() if value is not None} | values))
