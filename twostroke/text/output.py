"""What a caller gets: the whole output of a request, or a piece of it as it comes."""

from __future__ import annotations

from dataclasses import dataclass

from ..request import FinishReason, Timings


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of a stream. Deltas that a consumer has not taken yet are merged into one.

    Attributes:
        text: never ends inside a UTF-8 character; the join over all deltas is the output's text. Empty without a
            tokenizer.
        token_ids: the join over all deltas is the output's token ids. Of a request with stop strings those whose text
            was shown as a whole.
        finish_reason: set in the last delta.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The output of a request.

    Attributes:
        request_id: as given at submit, or made by the engine.
        index: place of the prompt in the call to `generate`; 0 elsewhere.
        prompt_token_ids: the prompt as the model saw it.
        token_ids: the generated ids; a stop token is the last of them. Of a stop string see `SamplingParams.stop`.
        text: their text, without the stop token and special tokens; None if the model has no tokenizer.
        finish_reason: `stop`, `length`, `cancelled` or `error`.
        error: what went wrong, where the reason is `error`.
        seed: the key of the random numbers: with it the same request gives the same tokens.
        cached_tokens: prompt tokens whose keys and values were in the prefix cache when the request began to run.
        preemptions: how often the request was put back and recomputed.
        timings: moments of its life.
    """

    request_id: str
    index: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason
    error: str | None
    seed: int
    cached_tokens: int
    preemptions: int
    timings: Timings
