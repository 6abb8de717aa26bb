"""Decode steps of few tokens: the decoder's part against its plain path. Products: `test_thin_linear.py`."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from test_decoder import CPU, MODELS, make_attention, make_step, random_tokens, save_random_model
from thin_library import stand_in
from torch.nn import functional

import twostroke.model.linear as linear
from twostroke import Engine, InvalidConfig
from twostroke.kernels.announced import Written
from twostroke.kernels.compiler import CompilerMissing
from twostroke.kernels.thin_linear import MAX_TOKENS, Scaled, ThinLinears, ThinWeight
from twostroke.model.load import load_model
from twostroke.model.thin import ThinDecoder

EPS = 1e-5


class PlainLinears:
    """What `ThinLinears` computes, in PyTorch; a residual's squares come in two parts."""

    def __init__(self, eps, *, chains=True):
        self.eps, self.chains = eps, chains

    def begin(self):
        pass

    def scaling(self, weight, bias=None):
        return SimpleNamespace(weight=weight, bias=bias)

    gating = adding = scaling

    def scaled(self, x, weight):
        return functional.linear(self._normed(x), weight.weight, weight.bias)

    def gated(self, x, weight):
        gate, up = self.scaled(x, weight).chunk(2, 1)
        return Written(functional.silu(gate) * up)

    def residual(self, x, weight, residual, norm):
        total = residual + functional.linear(x.values, weight.weight)
        squares = torch.stack([half.square().sum(1) for half in total.chunk(2, 1)])
        return Scaled(total, total * norm, squares)

    def _normed(self, x):
        if x.squares is None:
            return x.values
        return x.values * torch.rsqrt(x.squares.sum(0) / x.values.shape[1] + self.eps)[:, None]


@pytest.fixture(params=["llama", "llama-tied", "mistral-window", "qwen2", "qwen3"])
def model(request, tmp_path, monkeypatch):
    monkeypatch.setattr(linear, "pack_weight", lambda weight: None)
    save_random_model(MODELS[request.param], tmp_path)
    return load_model(tmp_path, impl="native", device=CPU).model


def test_thin_steps_give_the_logits_of_the_plain_path(model):
    prompt, following = random_tokens(9, seed=1), random_tokens(3, seed=2)
    thin = ThinDecoder(model, PlainLinears(model.config.norm_eps), range(1, MAX_TOKENS + 1))
    with torch.inference_mode():
        logits = []
        for forward in (model.forward, partial(thin.forward, model)):
            attention = make_attention(model)
            model.forward(make_step(model, [], [(0, 0, prompt), (2, 0, prompt[:4])]), attention)
            steps = [make_step(model, [(0, 9 + i, token), (2, 4 + i, token)], []) for i, token in enumerate(following)]
            assert all(thin.takes(step) for step in steps)
            logits.append(torch.cat([forward(step, attention) for step in steps]))
    assert logits[0].std() > 0.3
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=1e-4)


def test_only_steps_of_few_lanes_are_thin(model):
    few, more = (ThinDecoder(model, PlainLinears(EPS), lanes) for lanes in (range(1, 4), range(4, 6)))
    lanes = [(0, 0, 1)]
    assert [few.takes(make_step(model, lanes * count, [])) for count in range(1, 7)] == [True] * 3 + [False] * 3
    assert [more.takes(make_step(model, lanes * count, [])) for count in range(1, 7)] == [False] * 3 + [True] * 2 + [
        False
    ]
    assert not few.takes(make_step(model, lanes, [(1, 0, [2])]))
    assert not few.takes(make_step(model, lanes, [], sample_index=[0]))


def test_no_thin_steps_on_a_cpu(model):
    assert ThinDecoder.made_for(model) == []


def test_a_missing_compiler_leaves_the_plain_path_and_says_so(model, monkeypatch, caplog):
    def missing(*_):
        raise CompilerMissing("no CUDA compiler (nvcc) was found")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("twostroke.model.thin.ThinLinears", missing)
    monkeypatch.setattr(ThinWeight, "fits", staticmethod(lambda weight, gated=False: True))
    model.device = torch.device("cuda")
    assert ThinDecoder.made_for(model) == []
    assert "nvcc" in caplog.text


@pytest.mark.parametrize("chains", [True, False])
def test_an_engine_beside_another_says_that_it_is_slower(model, monkeypatch, caplog, chains):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("twostroke.model.thin.ThinLinears", lambda device, eps: PlainLinears(eps, chains=chains))
    monkeypatch.setattr(ThinWeight, "fits", staticmethod(lambda weight, gated=False: True))
    monkeypatch.setattr(ThinDecoder, "_of_more", lambda decoder: [])
    monkeypatch.setattr(model, "device", torch.device("cuda"))
    assert len(ThinDecoder.made_for(model)) == 1
    assert ("another engine" in caplog.text) is not chains


def made_on(capability, model, monkeypatch, most_bytes=1 << 20):
    """Return the thin steps on a GPU whose medium products pay up to so many bytes of weight."""
    medium_linear = pytest.importorskip("twostroke.kernels.medium_linear")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("twostroke.model.thin.ThinLinears", lambda device, eps: PlainLinears(eps))
    monkeypatch.setattr(ThinWeight, "fits", staticmethod(lambda weight, gated=False: True))
    monkeypatch.setattr(medium_linear.MediumWeight, "fits", staticmethod(lambda weight: True))
    monkeypatch.setattr(medium_linear, "MAX_BYTES", most_bytes)
    monkeypatch.setattr(model, "device", torch.device("cuda"))
    return ThinDecoder.made_for(model)


@pytest.mark.parametrize(("most_bytes", "count"), [(1 << 20, 2), (1, 1)])
def test_more_lanes_are_thin_where_weights_are_small(model, monkeypatch, most_bytes, count):
    made = made_on((9, 0), model, monkeypatch, most_bytes)
    assert len(made) == count
    steps = {lanes: make_step(model, [(0, 0, 1)] * lanes, []) for lanes in (1, 32, 33, 64, 256, 257)}
    taken = {lanes: [thin.takes(step) for thin in made] for lanes, step in steps.items()}
    few = {1: [True], 32: [True], 33: [True], 64: [True], 256: [False], 257: [False]}
    assert taken == {lanes: [32 < lanes < 257] * (count - 1) + takes for lanes, takes in few.items()}


@pytest.mark.parametrize(("capability", "lanes"), [((8, 9), []), ((10, 0), [33])])
def test_what_other_gpus_have_of_both(model, monkeypatch, capability, lanes):
    """CUDA C++ is for compute capability 9.0 alone; Triton's products need a GPU no older than that."""
    steps = {count: make_step(model, [(0, 0, 1)] * count, []) for count in (32, 33)}
    made = made_on(capability, model, monkeypatch)
    assert [count for count, step in steps.items() if any(thin.takes(step) for thin in made)] == lanes


def test_a_layer_is_attention_and_one_launch(model, monkeypatch):
    """What a step's attention sees is launched by then, and at its end nothing is left."""
    library, launched = stand_in(monkeypatch), []

    def attend(index, q, k, v, rotary, step):
        launched.append(library.lengths)
        return torch.zeros_like(q)

    thin = ThinDecoder(model, ThinLinears(CPU, EPS), range(1, MAX_TOKENS + 1))
    with torch.inference_mode():
        thin.forward(model, make_step(model, [(0, 0, 1), (1, 0, 2)], []), SimpleNamespace(forward_rotary=attend))
    assert launched == [[1] + [4] * layer for layer in range(len(model.blocks))]
    assert library.lengths == [1] + [4] * len(model.blocks)


def test_a_freed_model_makes_room_for_the_chains_of_the_next(model, monkeypatch):
    """At once, not when a cycle of references is collected."""
    stand_in(monkeypatch)
    model._thin = [ThinDecoder(model, ThinLinears(CPU, EPS), range(1, MAX_TOKENS + 1))]
    assert not ThinLinears(CPU, EPS).chains
    model.free()
    assert ThinLinears(CPU, EPS).chains


def test_an_engine_that_cannot_start_makes_room_for_the_chains_of_the_next(monkeypatch, no_collection):
    """Whoever keeps its error, and though nobody frees its model; at once again."""
    stand_in(monkeypatch)

    def thin(decoder):
        made = ThinDecoder(decoder, ThinLinears(CPU, EPS), range(1, MAX_TOKENS + 1))
        assert not ThinLinears(CPU, EPS).chains
        return [made]

    monkeypatch.setattr(linear, "pack_weight", lambda weight: None)
    monkeypatch.setattr(ThinDecoder, "made_for", thin)
    with pytest.raises(InvalidConfig, match="num_blocks") as failed:
        Engine("tiny", device="cpu", num_blocks=1 << 40)
    assert ThinLinears(CPU, EPS).chains
    assert failed.value.__traceback__ is not None
