"""What a caller gets: the whole output of a request, or a piece of it as it comes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..request import FinishReason, Timings


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a token, given those before it.

    Attributes:
        token_id: the token.
        logprob: in the softmax of the model's logits, before temperature, filters, penalties and masks.
        rank: 1 + the tokens that are more likely.
        top: the most likely tokens, as many as were asked for, the likeliest first, with their log-probabilities. Such
            as are impossible are left out.
        sampling_logprob: in the distribution that the token was drawn from, which is that after all of these; 0 if it
            was chosen greedily. None for a token of the prompt.
    """

    token_id: int
    logprob: float
    rank: int
    top: dict[int, float]
    sampling_logprob: float | None = None


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
        logprobs: of `token_ids`; None unless `SamplingParams.logprobs` is given.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    index: int = 0
    logprobs: list[TokenLogprob] | None = None


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
        logprobs: of `token_ids`; None unless `SamplingParams.logprobs` is given.
        cumulative_logprob: the sum of their raw log-probabilities; None unless `logprobs` or `best_of` is given.
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
    logprobs: list[TokenLogprob] | None = None
    cumulative_logprob: float | None = None

    @property
    def mean_logprob(self) -> float:
        """The mean of the tokens' raw log-probabilities; what has none, or ended with an error, is worst."""
        total = self.cumulative_logprob
        if not self.token_ids or total is None or math.isnan(total) or self.finish_reason == FinishReason.ERROR:
            return -math.inf
        return total / len(self.token_ids)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The output of a request. What is asked of it about a sample is that of the first.

    Attributes:
        request_id: as given at submit, or made by the engine.
        index: place of the prompt in the call to `generate`; 0 elsewhere.
        prompt_token_ids: the prompt as the model saw it.
        outputs: those of its `n` samples.
        prompt_logprobs: of the prompt's tokens; None for the first, which nothing is before. None unless
            `SamplingParams.prompt_logprobs` is given. Shorter than the prompt if the request ended in it.
        cached_tokens: prompt tokens whose keys and values were in the prefix cache when the request began to run.
    """

    request_id: str
    index: int
    prompt_token_ids: list[int]
    outputs: list[SampleOutput]
    cached_tokens: int
    prompt_logprobs: list[TokenLogprob | None] | None = None

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
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.outputs[0].logprobs

    @property
    def cumulative_logprob(self) -> float | None:
        return self.outputs[0].cumulative_logprob

    @property
    def timings(self) -> Timings:
        return self.outputs[0].timings

    @property
    def weight_versions(self) -> list[tuple[int, int]]:
        return self.outputs[0].weight_versions


def best(outputs: Sequence[SampleOutput], count: int) -> list[SampleOutput]:
    """The `count` outputs with the largest mean log-probability, the best first, with these places as indices.

    Those with the same tokens are equals, whatever rounding says, and keep their order.
    """
    means: dict[tuple[tuple[int, ...], bool], float] = {}
    scores = []
    for output in outputs:
        kind = tuple(output.token_ids), output.finish_reason == FinishReason.ERROR
        scores.append(means.setdefault(kind, output.mean_logprob))
    ranked = [outputs[place] for place in sorted(range(len(outputs)), key=lambda place: -scores[place])[:count]]
    return [replace(output, index=place) for place, output in enumerate(ranked)]
