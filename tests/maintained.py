"""What the tests of pauses, sleep and new weights share: models, requests that run meanwhile, and slow steps."""

import threading
from pathlib import Path

import pytest
import torch
import transformers
from engines import MODES, running
from watching import PATIENCE, wait_until

from twostroke import SamplingParams

PROMPTS = [[5, 6, 7], list(range(20, 50)), [9]]
LENGTH = 40

every_mode = pytest.mark.parametrize("mode", MODES)


def greedy(max_tokens=LENGTH, **others):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **others)


def save_model(directory: Path, seed: int, tied: bool) -> Path:
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        initializer_range=0.4,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def tokens_of(model):
    with running("sync", model, num_blocks=64) as engine:
        return [output.token_ids for output in engine.generate(PROMPTS, greedy())]


def begin(engine, tokens=5):
    """Submit the prompts, and wait until each has some tokens."""
    handles = [engine.stream(prompt, greedy()) for prompt in PROMPTS]
    wait_until(lambda: all(0 in h._pieces and len(h._pieces[0].ids) >= tokens for h in handles))
    return handles


def results(handles):
    return [handle.result(PATIENCE).token_ids for handle in handles]


class Slow:
    """Makes every step of an engine last so many seconds, so that what is done amid requests is."""

    def __init__(self, engine, seconds=0.003):
        self._model, self._forward, self._seconds = engine.model, engine.model.forward, seconds

    def __enter__(self):
        self._model.forward = self._slowly
        return self

    def __exit__(self, *exc):
        del self._model.forward

    def _slowly(self, step, attention):
        threading.Event().wait(self._seconds)
        return self._forward(step, attention)
