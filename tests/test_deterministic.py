"""`deterministic=True`: the logits of a token are the same to the bit, whatever else is in the batch."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from unittest import mock

import pytest
import torch
import transformers
from engines import MODES, running
from families import HEADS, NATIVE, NO_STOP
from reference import check_greedy

from twostroke import InvalidConfig, SamplingParams
from twostroke.build import sample
from twostroke.model.linear import InvariantLinear

LENGTHS = [1, 3, 9, 17, 30]
PROMPTS = [[(11 * i + 7 * j) % 320 for j in range(length)] for i, length in enumerate(LENGTHS)]
TOKENS = 10
ROOMY = dict(num_blocks=64, block_size=4)
VARIANTS = {
    "whole prompts": ROOMY,
    "odd chunks": dict(max_step_tokens=13, max_chunk_tokens=5, **ROOMY),
    "few rows": dict(max_rows=2, **ROOMY),
    "preempted": dict(num_blocks=17, block_size=4, prefix_cache=False),
}

WIDE = transformers.LlamaConfig(
    vocab_size=320, hidden_size=48, intermediate_size=1536, num_hidden_layers=2, max_position_embeddings=256,
    **HEADS, **NO_STOP,
)  # fmt: skip
"""An inner size at which oneDNN chooses another order of sums for one token than for sixteen."""

Logits = dict[tuple[int, int], bytes]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    directory = tmp_path_factory.mktemp("wide")
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(WIDE).eval()
    model.save_pretrained(directory)
    return directory, model


def params(index: int) -> SamplingParams:
    return SamplingParams(temperature=0.7, seed=100 + index, max_tokens=TOKENS, ignore_eos=True)


@contextlib.contextmanager
def recording():
    """Yield what the sampler sees: (seed, output index) -> the bits of the logits."""
    seen: Logits = {}

    def spy(logits, rows, state, tokens, errors, typical, chances):
        for line, row in zip(logits, rows.tolist(), strict=True):
            key = int(state.seed_low[row]), int(state.outputs[row])
            if key[0] >= 100 and key[1] < TOKENS:
                seen[key] = line.float().cpu().numpy().tobytes()
        sample(logits, rows, state, tokens, errors, typical, chances)

    with mock.patch("twostroke.build.sample", spy):
        yield seen


def logits_alone(model, **options) -> Logits:
    """Each prompt in an engine that does nothing else meanwhile."""
    with recording() as seen, running("sync", model, **ROOMY, **options) as engine:
        for index, prompt in enumerate(PROMPTS):
            engine.generate([prompt], params(index))
    assert len(seen) == len(PROMPTS) * TOKENS
    return seen


def logits_together(mode, model, **options) -> tuple[Logits, int]:
    with recording() as seen, running(mode, model, **options) as engine:
        engine.generate(PROMPTS, [params(index) for index in range(len(PROMPTS))])
        return seen, engine.stats().preemptions


@pytest.fixture(scope="module")
def alone(wide):
    return logits_alone(wide[0], deterministic=True)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mode", MODES)
def test_logits_do_not_depend_on_the_batch(mode, variant, wide, alone):
    seen, preemptions = logits_together(mode, wide[0], deterministic=True, **VARIANTS[variant])
    assert seen == alone
    assert (preemptions > 0) == (variant == "preempted")


@pytest.mark.parametrize("family", NATIVE)
def test_no_family_depends_on_the_batch(family, saved):
    directory, _ = saved(family)
    expected = logits_alone(directory, deterministic=True)
    assert logits_together("async", directory, deterministic=True, **VARIANTS["odd chunks"])[0] == expected


@pytest.mark.parametrize("variant", ["odd chunks", "preempted"])
def test_log_probabilities_do_not_depend_on_the_batch(variant, wide):
    asked = [replace(params(index), logprobs=3, prompt_logprobs=2, top_p=0.9) for index in range(len(PROMPTS))]
    with running("sync", wide[0], deterministic=True, **ROOMY) as engine:
        alone = [engine.generate([prompt], own)[0] for prompt, own in zip(PROMPTS, asked, strict=True)]
    with running("async", wide[0], deterministic=True, **VARIANTS[variant]) as engine:
        together = engine.generate(PROMPTS, asked)
    assert [output.logprobs for output in together] == [output.logprobs for output in alone]
    assert [output.prompt_logprobs for output in together] == [output.prompt_logprobs for output in alone]


def test_bfloat16_does_not_depend_on_the_batch(wide):
    options = dict(deterministic=True, dtype="bfloat16")
    expected = logits_alone(wide[0], **options)
    for variant in ("odd chunks", "preempted"):
        assert logits_together("async", wide[0], **VARIANTS[variant], **options)[0] == expected


def test_without_it_logits_do_depend_on_the_batch(wide):
    """Else the tests above would show nothing."""
    assert logits_together("sync", wide[0], **VARIANTS["odd chunks"])[0] != logits_alone(wide[0])


def test_tokens_are_those_of_transformers(wide):
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with running("async", wide[0], deterministic=True, **VARIANTS["odd chunks"]) as engine:
        outputs = engine.generate(PROMPTS, greedy)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        check_greedy(wide[1], prompt, output.token_ids)


def test_a_model_that_transformers_runs_is_refused_by_name(saved):
    directory, _ = saved("gpt2")
    with (
        pytest.raises(InvalidConfig, match=r"deterministic=True: model=.*gpt2"),
        running("sync", directory, deterministic=True),
    ):
        pass


def test_a_tied_head_stays_so_when_weights_are_replaced(tmp_path):
    config = transformers.LlamaConfig(**{**WIDE.to_diff_dict(), "tie_word_embeddings": True})
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    with running("sync", tmp_path, deterministic=True, **ROOMY) as engine:
        engine.update_weights(tmp_path)
        assert isinstance(engine.model.head, InvariantLinear)
