"""Fields that several endpoints share."""

from __future__ import annotations

from typing import Literal

from .errors import ApiError
from .schema import SamplingFields, unsupported

_Unsupported = unsupported(prompt_logprobs=(), prompt_cache_retention=(), metadata=({},), store=(False,))


def check_model(given: str | None, name: str) -> None:
    """Raise ApiError unless `given` is what the model is called, `name`, or None."""
    if given is not None and given != name:
        message = f"the model {given!r} does not exist here; there is {name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


class GenerationFields(_Unsupported, SamplingFields):  # type: ignore[misc, valid-type]
    """What every request for text may hold.

    `user`, `safety_identifier` and `prompt_cache_key` are labels: they may be given, and change no token.

    Attributes:
        return_token_ids: choices also hold their token ids.
    """

    model: str | None = None
    stream: bool | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    return_token_ids: bool | None = None

    def check_stream(self) -> None:
        """Raise ApiError if something is asked for that goes with a stream alone, or with none."""
        if self.stream and self.best_of not in (None, 1):
            message = f"best_of={self.best_of} cannot be streamed: which samples are the best is known at the end"
            raise ApiError(400, message, param="best_of")


class StreamOptions(unsupported(include_obfuscation=(False,))):  # type: ignore[misc]
    include_usage: bool | None = None


class StreamingFields(GenerationFields):
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def check_stream(self) -> None:
        super().check_stream()
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is for stream=true alone", param="stream_options")
