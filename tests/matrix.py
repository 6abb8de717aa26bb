"""The parameter matrix: every parameter under every mode, roomy and preempted, with whole and with chunked prompts.

A line is a choice of parameters; what its tokens must be is said by transformers' own logits processors, applied to
logits of the same weights. A cell is a way to run; all cells must give a line the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from engines import MODES, running
from sampling_oracle import EOS, VOCAB, Reference, choices, make_prompt

from twostroke import Engine, SamplingParams
from twostroke.held_input import RowTokens
from twostroke.request import mix_seed
from twostroke.text.output import RequestOutput, SampleOutput

NEW = 24
PROMPTS = [make_prompt(length) for length in (23, 18, 31)]
NEIGHBOUR = make_prompt(20, seed=1)


def prefer(last: int, scores: torch.Tensor) -> None:
    """Edit scores, float32 [V], by the token before: not the same again, rather one of a few others."""
    scores[last] = -torch.inf
    scores[(7 * last + torch.arange(5)) % VOCAB] += 4.0


def prefer_in_rows(logits: torch.Tensor, rows: Sequence[RowTokens]) -> torch.Tensor:
    """`prefer` as a logits processor: its rows are held."""
    for scores, row in zip(logits, rows, strict=True):
        prefer(int(row.token_ids[-1]), scores)
    return logits


LINES: dict[str, dict[str, Any]] = {
    "presence_penalty": {"presence_penalty": 3.0},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "frequency_reward": {"frequency_penalty": -1.0},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "repetition_reward": {"repetition_penalty": 0.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2, "frequency_penalty": -2.0},
    "no_repeat_token": {"no_repeat_ngram_size": 1},
    "logit_bias": {"logit_bias": {3: 4.0, 100: 6.0, 200: -5.0, 256: 5.5}},
    "allowed_token_ids": {"allowed_token_ids": [*range(5, 250, 7), 255]},
    "bad_words": {"bad_words": [[token] for token in range(0, VOCAB, 3)]},
    "bad_sequences": {"bad_words": [[first, second] for first in range(16) for second in range(120, 136)]},
    "typical_p": {"typical_p": 0.4, "temperature": 1.0, "seed": 5},
    "min_tokens": {"min_tokens": 20, "stop_token_ids": list(range(40, 70)), "ignore_eos": False},
    "top_k": {"top_k": 16, "temperature": 1.0, "seed": 6},
    "top_p": {"top_p": 0.5, "temperature": 1.0, "seed": 7},
    "min_p": {"min_p": 0.3, "temperature": 1.0, "seed": 8},
    "temperature": {"temperature": 0.7, "seed": 9},
    "stop_token_ids": {"stop_token_ids": [57, 58, 59]},
    "logits_processors": {"logits_processors": [prefer_in_rows]},
    "n": {"n": 2, "temperature": 1.0, "seed": 10},
}
"""What a line sets beyond greedy sampling of `NEW` tokens: its parameter, then what lets the parameter take effect."""


class Cell(NamedTuple):
    """A way to run."""

    mode: str
    preempted: bool
    chunked: bool


CELLS = [Cell(*cell) for cell in product(MODES, (False, True), (False, True))]


def make_params(*lines: dict[str, Any]) -> SamplingParams:
    """Several lines at once; what a later one sets holds."""
    merged: dict[str, Any] = {"temperature": 0.0, "max_tokens": NEW, "ignore_eos": True}
    for line in lines:
        merged |= line
    return SamplingParams(**merged)


@contextmanager
def running_cell(cell: Cell, model: Any, **options: Any) -> Iterator[Engine]:
    """An engine in which a cell's requests run."""
    options = {"max_chunk_tokens": 5 if cell.chunked else None, "block_size": 4, "max_rows": 6, **options}
    with running(cell.mode, model, num_blocks=32 if cell.preempted else 200, **options) as engine:
        yield engine


def run_line(engine: Engine, cell: Cell, params: SamplingParams) -> list[RequestOutput]:
    """The outputs of `PROMPTS` with `params`, run beside a request without any parameter, whose output comes last."""
    if cell.chunked:
        engine.reset_prefix_cache()
    return engine.generate([*PROMPTS, NEIGHBOUR], [params] * len(PROMPTS) + [make_params()])


class Additive(transformers.LogitsProcessor):
    """Presence and frequency penalty, which transformers has not: by the count of each token in the output."""

    def __init__(self, prompt_len: int, presence: float, frequency: float) -> None:
        self.prompt_len, self.presence, self.frequency = prompt_len, presence, frequency

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        counts = torch.bincount(input_ids[0, self.prompt_len :], minlength=scores.shape[1])
        return scores - self.frequency * counts - self.presence * (counts > 0)


class Preferring(transformers.LogitsProcessor):
    """`prefer` on its own, as transformers would call it."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        prefer(int(input_ids[0, -1]), scores[0])
        return scores


def processors(params: SamplingParams, prompt_len: int) -> transformers.LogitsProcessorList:
    """What is done to logits before temperature and filters: a user's own edits first, then in transformers' order."""
    found = transformers.LogitsProcessorList()
    if len(params.logits_processors):
        found.append(Preferring())
    if params.logit_bias:
        bias = {(token,): float(value) for token, value in params.logit_bias.items()}
        found.append(transformers.SequenceBiasLogitsProcessor(bias))
    if params.repetition_penalty != 1:
        found.append(transformers.RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    found.append(Additive(prompt_len, params.presence_penalty, params.frequency_penalty))
    if params.no_repeat_ngram_size:
        found.append(transformers.NoRepeatNGramLogitsProcessor(params.no_repeat_ngram_size))
    if params.bad_words:
        found.append(transformers.NoBadWordsLogitsProcessor([list(word) for word in params.bad_words]))
    if params.allowed_token_ids is not None:
        allowed = list(params.allowed_token_ids)
        found.append(transformers.PrefixConstrainedLogitsProcessor(lambda batch, ids: allowed, 1))
    return found


def check(reference: Reference, prompt: Sequence[int], output: RequestOutput, params: SamplingParams) -> None:
    """Assert that every token of every sample is the one that transformers' processors, and then the sampler, give."""
    assert len(output.outputs) == params.n
    for index, sample in enumerate(output.outputs):
        own = replace(params, seed=mix_seed(params.seed, index)) if params.seed is not None else params
        check_sample(reference, prompt, sample, own)


def check_sample(reference: Reference, prompt: Sequence[int], sample: SampleOutput, params: SamplingParams) -> None:
    """Its tokens, where they end, and the log-probabilities that came with them."""
    tokens = sample.token_ids
    ties = 0
    for index, (token, allowed) in enumerate(zip(tokens, right_tokens(reference, prompt, tokens, params), strict=True)):
        assert token in allowed, f"token {index} of {params} is {token}, not {allowed}"
        ties += len(allowed) > 1
    assert ties <= 1 + len(tokens) // 8
    stopped = [index for index, token in enumerate(tokens, 1) if token in stops_of(params)]
    assert (sample.finish_reason, len(tokens)) == (("stop", stopped[0]) if stopped else ("length", NEW)), params
    if params.logprobs is not None:
        expected = reference.logits(prompt, tokens).double().log_softmax(-1)[range(len(tokens)), tokens].tolist()
        assert [entry.logprob for entry in sample.logprobs] == pytest.approx(expected, abs=1e-4)


def stops_of(params: SamplingParams) -> list[int]:
    return [*params.stop_token_ids, *(() if params.ignore_eos else EOS)]


def right_tokens(
    reference: Reference, prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams
) -> list[set[int]]:
    """What each of `tokens` may be, given those before it; kept, for other cells ask the same."""
    key = (*prompt, None, *tokens, repr(replace(params, logprobs=None)))
    if key not in reference.right_tokens:
        edit = processors(params, len(prompt))
        logits = reference.logits(prompt, tokens)
        found = []
        for index in range(len(tokens)):
            ids = torch.tensor([[*prompt, *tokens[:index]]])
            scores = edit(ids, logits[index : index + 1].clone())[0].numpy()
            found.append(choices(scores, params, index, stops_of(params) if index < params.min_tokens else ()))
        reference.right_tokens[key] = found
    return reference.right_tokens[key]
