"""/v1/completions."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from pydantic import Field

from ..sampling_params import SamplingParams
from ..text.output import Delta, RequestOutput, SampleOutput
from ..text.tokenizer import Tokenizer
from .answers import finish, head, usage
from .call import Call, samples
from .errors import ApiError
from .events import DONE, event
from .fields import StreamingFields
from .logprobs import LogprobWriter
from .schema import sampling_params, unsupported

DEFAULT_MAX_TOKENS = 16
"""As in OpenAI's API."""


_NOTHING = Delta("", [])

TokenId = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""Any number that an array can hold; whether the model knows it is checked there."""

_Unsupported = unsupported(suffix=("",))


class CompletionRequest(_Unsupported, StreamingFields):  # type: ignore[misc, valid-type]
    """`prompt`: one or more, as text or as token ids."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    echo: bool | None = None

    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ApiError(
                400, "prompt=[] is empty: at least one token is needed", param="prompt", code="invalid_value"
            )
        first = self.prompt[0]
        return [self.prompt] if isinstance(first, int) else self.prompt  # type: ignore[return-value]

    def names(self) -> dict[str, str]:
        """What the body calls parameters, where that is not the engine's name."""
        return {}

    def params(self) -> SamplingParams:
        if self.echo and self.logprobs is not None:
            raise ApiError(400, f"logprobs={self.logprobs} is not supported with echo", param="logprobs")
        limit = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return sampling_params(self, max_tokens=limit)

    def answer(self, model: str, tokenizer: Tokenizer | None, params: SamplingParams) -> CompletionAnswer:
        """What words the answer of `model`.

        Raises:
            ApiError: `echo` needs a tokenizer.
        """
        return CompletionAnswer(self, model, self._echoes(tokenizer) if self.echo else None, LogprobWriter(tokenizer))

    def _echoes(self, tokenizer: Tokenizer | None) -> list[str]:
        if tokenizer is None:
            raise ApiError(400, "echo needs a tokenizer, and this model has none", param="echo", code="no_tokenizer")
        texts = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in self.prompts()]
        return [text for text in texts for _ in range(self.n or 1)]


class CompletionAnswer:
    """A completion, of which each choice is one sample.

    Args:
        echoes: with `echo`, the text that each choice begins with, its prompt's.
    """

    def __init__(
        self, body: CompletionRequest, model: str, echoes: Sequence[str] | None, logprobs: LogprobWriter
    ) -> None:
        self._body = body
        self._model = model
        self._echoes = echoes
        self._logprobs = logprobs
        self._offsets: Counter[int] = Counter()
        """Characters of the tokens of each choice whose log-probabilities were shown."""

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = [
            self._choice(place, self._echo(place) + (sample.text or ""), sample)
            for place, sample in enumerate(samples(outputs))
        ]
        return head("cmpl", "text_completion", self._model) | {"choices": choices, "usage": usage(outputs)}

    async def events(self, call: Call) -> AsyncIterator[bytes]:
        shared = head("cmpl", "text_completion", self._model)
        if self._body.include_usage:
            shared["usage"] = None
        if self._echoes is not None:
            for place in range(call.choices):
                yield event(shared | {"choices": [self._choice(place, self._echo(place), _NOTHING)]})
        async for place, delta in call.deltas():
            yield event(shared | {"choices": [self._choice(place, delta.text, delta)]})
        if self._body.include_usage:
            yield event(shared | {"choices": [], "usage": usage(await call.outputs())})
        yield DONE

    def _echo(self, place: int) -> str:
        return "" if self._echoes is None else self._echoes[place]

    def _choice(self, index: int, text: str, said: Delta | SampleOutput) -> dict[str, Any]:
        logprobs = self._logprobs.for_completion(said.logprobs, self._offsets[index])
        if logprobs is not None:
            self._offsets[index] += sum(map(len, logprobs["tokens"]))
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish(said.finish_reason)}
        return choice | ({"token_ids": said.token_ids} if self._body.return_token_ids else {})
