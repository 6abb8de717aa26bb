"""Lines of a batch as requests to the engine: OpenAI's batch form, and plain lines."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import numpy as np
from pydantic import BaseModel, ValidationError

from ..errors import shown
from ..model.load import lasting_name
from ..openai.answers import Answer
from ..openai.call import check_outputs
from ..openai.chat import ChatRequest
from ..openai.completions import CompletionRequest
from ..openai.errors import ApiError, from_validation_error, refusals
from ..openai.fields import check_model
from ..openai.responses import ResponsesRequest
from ..prompts import encode_prompt
from ..request import mix_seed, require_context
from ..sampling_params import SamplingParams
from ..text.output import RequestOutput
from ..text.tokenizer import Tokenizer
from .batch_input import MAX_LINE_BYTES, Line, custom_id

ENDPOINTS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
}

_PLAIN = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}
"""The endpoint that a plain line means, by the key that it must have."""


@dataclass(frozen=True, eq=False)
class BatchRequest:
    """A line that can be submitted.

    Attributes:
        line: its number.
        custom_id: see `batch_input.custom_id`.
        prompts: token ids; one or more, all answered with `params`.
        answer: words the outputs.
        names: what the body calls parameters, where that is not the engine's name.
        tokens: most tokens that one of its samples can have.
    """

    line: int
    custom_id: str
    prompts: Sequence[Sequence[int] | np.ndarray]
    params: SamplingParams
    answer: Answer
    names: dict[str, str]
    tokens: int

    @property
    def samples(self) -> int:
        """Samples that run."""
        return len(self.prompts) * (self.params.best_of or self.params.n)

    def body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer.

        Raises:
            ApiError: a sample ended with an error.
        """
        check_outputs(outputs)
        return self.answer.whole(outputs)


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    body: msgspec.Raw
    method: Literal["POST"] = "POST"
    custom_id: str | None = None


class RequestReader:
    """Makes requests of lines.

    Args:
        tokenizer: the model's; None for a model without one.
        model_name: what lines may call the model.
        max_model_len: most tokens of a sample, prompt and output.
        seed: requests without a seed get one that follows from this and the line's number; None: the engine's.
        duplicates: see `batch_input.Survey`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        model_name: str,
        max_model_len: int,
        seed: int | None,
        duplicates: dict[int, int],
    ) -> None:
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._max_model_len = max_model_len
        self._seed = seed
        self._duplicates = duplicates

    def read(self, line: Line) -> BatchRequest:
        """Return the line's request; what depends on the model's sizes is checked at submit.

        Raises:
            ApiError: there is none that can be answered.
        """
        if line.number in self._duplicates:
            message = f"custom_id={custom_id(line)!r} is that of line {self._duplicates[line.number]} already"
            raise ApiError(400, message, param="custom_id", code="duplicate_custom_id")
        url, data = _split(line)
        if (kind := ENDPOINTS.get(url)) is None:
            raise ApiError(400, f"url={url!r} must be one of {', '.join(ENDPOINTS)}", param="url", code="invalid_url")
        try:
            body: Any = kind.model_validate_json(data)
        except ValidationError as error:
            raise from_validation_error(error) from error
        return self._request(line, body)

    def _request(self, line: Line, body: Any) -> BatchRequest:
        self._check(body)
        params = body.params()
        if params.seed is None and self._seed is not None:
            params = replace(params, seed=mix_seed(self._seed, line.number))
        with refusals(**body.names()):
            params.validate()
            prompts = [encode_prompt(prompt, self._tokenizer) for prompt in body.prompts()]
            require_context(max(map(len, prompts)), self._max_model_len)
        room = self._max_model_len - min(map(len, prompts))
        tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        answer = body.answer(self._model_name, self._tokenizer, params)
        return BatchRequest(line.number, custom_id(line), prompts, params, answer, body.names(), tokens)

    def _check(self, body: Any) -> None:
        self._check_model(body.model)
        if body.stream:
            raise ApiError(400, "stream=true is not supported in a batch", param="stream")
        body.check_stream()

    def _check_model(self, given: str | None) -> None:
        """A folder may be called by any of its paths, as in the command; there is a flag for what is no name here."""
        if given is None or lasting_name(given) == lasting_name(self._model_name):
            return
        try:
            check_model(given, self._model_name)
        except ApiError as error:
            hint = f"{error.message}; --served-model-name {shlex.quote(given)} lets lines call it so"
            raise ApiError(error.status, hint, param=error.param, code=error.code) from error


def _split(line: Line) -> tuple[str, bytes]:
    """The endpoint and the body of a line."""
    if len(line.data) > MAX_LINE_BYTES:
        raise ApiError(400, f"the line is longer than {MAX_LINE_BYTES} bytes", code="line_too_long")
    try:
        keys = msgspec.json.decode(line.data, type=dict[str, msgspec.Raw])
        _check_id(msgspec.json.decode(keys.get("custom_id", b"null")))
        if "url" in keys or "body" in keys:
            envelope = msgspec.json.decode(line.data, type=_Envelope)
            return envelope.url, bytes(envelope.body)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"the line is not a request: {error}", code="invalid_line") from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ApiError(400, f"the line is not JSON that can be read: {error}", code="invalid_json") from error
    return _split_plain(keys)


def _check_id(given: object) -> None:
    """Refuse an id that the answer could not have: who asked would not find it."""
    if not isinstance(given, str | None):
        raise ApiError(400, f"custom_id={shown(given)} must be a string", param="custom_id", code="invalid_type")


def _split_plain(keys: dict[str, msgspec.Raw]) -> tuple[str, bytes]:
    found = [key for key in _PLAIN if key in keys]
    if len(found) != 1:
        message = 'a line needs "url" and "body", or exactly one of "prompt" and "messages"'
        raise ApiError(400, message, code="invalid_line")
    keys.pop("custom_id", None)
    if "max_tokens" not in keys and "max_completion_tokens" not in keys:
        keys["max_tokens"] = msgspec.Raw(b"%d" % (SamplingParams.max_tokens or 0))
    return _PLAIN[found[0]], msgspec.json.encode(keys)
