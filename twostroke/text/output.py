"""What a caller gets: the whole output of a request, or a piece of it as it comes."""

from __future__ import annotations

from dataclasses import dataclass

from ..request import FinishReason, Timings


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of one sample of a stream. Deltas that a consumer has not taken yet are merged into one.

    Attributes:
        text: never ends inside a UTF-8 character; the join over all deltas of a sample is its text. Empty without a
            tokenizer.
        token_ids: the join over all deltas of a sample is its token ids. Of a request with stop strings those whose
            text was shown as a whole.
        finish_reason: set in the last delta of each sample.
        index: number of the sample.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    index: int = 0


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """The output of one sample of a request.

    Attributes:
        index: its place in the request's outputs.
        token_ids: the generated ids; a stop token is the last of them. Of a stop string see `SamplingParams.stop`.
        text: their text, without the stop token and special tokens; None if the model has no tokenizer.
        finish_reason: `stop`, `length`, `cancelled` or `error`.
        error: what went wrong, where the reason is `error`.
        seed: the key of its random numbers: a request with this seed gives the same tokens.
        preemptions: how often it was put back and recomputed.
        timings: moments of its life.
        weight_versions: (version, tokens) of each weight version that gave it tokens, in their order; version 0 are the
            weights that the engine began with.
    """

    index: int
    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason
    error: str | None
    seed: int
    preemptions: int
    timings: Timings
    weight_versions: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The output of a request. What is asked of it about a sample is that of the first.

    Attributes:
        request_id: as given at submit, or made by the engine.
        index: place of the prompt in the call to `generate`; 0 elsewhere.
        prompt_token_ids: the prompt as the model saw it.
        outputs: those of its `n` samples.
        cached_tokens: prompt tokens whose keys and values were in the prefix cache when the request began to run.
    """

    request_id: str
    index: int
    prompt_token_ids: list[int]
    outputs: list[SampleOutput]
    cached_tokens: int

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def text(self) -> str | None:
        return self.outputs[0].text

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason

    @property
    def error(self) -> str | None:
        return self.outputs[0].error

    @property
    def seed(self) -> int:
        return self.outputs[0].seed

    @property
    def preemptions(self) -> int:
        return self.outputs[0].preemptions

    @property
    def timings(self) -> Timings:
        return self.outputs[0].timings

    @property
    def weight_versions(self) -> list[tuple[int, int]]:
        return self.outputs[0].weight_versions
