"""Compiled layers of transformers' models: the same tokens, few compilations, and never a wrong result."""

import logging

import pytest
import torch
from adapted import FAMILIES, Batch, adapted, plain, sequences
from engines import MODES, running
from families import ADAPTED, NATIVE
from reference import check_greedy

from twostroke import InvalidConfig, SamplingParams
from twostroke.model import compiled
from twostroke.model.adapter import TransformersModel

DEEP = 4


class CountingBackend:
    """Runs the traced graphs as they are, or as torch's compilers see them (`lowers`), and counts them."""

    def __init__(self):
        self.graphs = 0
        self.fails = self.lowers = False

    def __call__(self, graph, inputs):
        if self.fails:
            raise RuntimeError("no such compiler")
        self.graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs) if self.lowers else graph


@pytest.fixture
def backend(monkeypatch):
    counting = CountingBackend()
    monkeypatch.setattr(compiled, "BACKEND", counting)
    return counting


def deep(family: str) -> dict:
    config = dict(FAMILIES[family])
    config["n_layer" if "n_layer" in config else "num_hidden_layers"] = DEEP
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"] * (DEEP // 2)
    return config


def compiled_model(config: dict) -> TransformersModel:
    return TransformersModel.from_config(dict(config), device="cpu", dtype=torch.float32, seed=3, compile=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_layers_are_compiled_once_for_many_tokens_and_once_for_one(family, backend):
    config = deep(family)
    a, b = sequences()
    model = compiled_model(config)
    # Some layers get their first input from an embedding with other strides, or see one more kind of it.
    assert 2 <= backend.graphs <= 3
    at_load = backend.graphs
    batch, eager = Batch(model), Batch(adapted(config))
    for step in (
        {"chunks": [(1, 0, b[:9]), (0, 0, a[:6])]},
        {"lanes": [(1, 9, b[9])], "chunks": [(0, 6, a[6:15])]},
        {"lanes": [(0, 15, a[15]), (1, 10, b[10])]},
        {"lanes": [(0, 16, a[16])], "sample_index": torch.tensor([0])},
    ):
        torch.testing.assert_close(batch.step(**step), eager.step(**step), atol=1e-5, rtol=1e-5)
    assert backend.graphs == at_load


@pytest.mark.parametrize(
    ("family", "mode"), [("llama", mode) for mode in MODES] + [(family, "async") for family in (NATIVE | ADAPTED)][1:]
)
def test_tokens_are_those_of_transformers(family, mode, saved, backend):
    backend.lowers = mode == "async"  # the compilers see the same under every loop
    directory, reference = saved(family)
    prompts = [[7 * i + 3 * j + 1 for j in range(length)] for i, length in enumerate((1, 9, 30))]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with running(mode, directory, impl="transformers", compile=True, num_blocks=32, max_step_tokens=16) as engine:
        at_start = backend.graphs
        assert at_start
        outputs = engine.generate(prompts, params)
    assert backend.graphs == at_start, "the loop compiled again"
    assert sum(check_greedy(reference, p, o.token_ids) for p, o in zip(prompts, outputs, strict=True)) <= 1


def test_without_compile_nothing_is_compiled(saved, backend):
    with running("async", saved("llama")[0], impl="transformers", num_blocks=32) as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    assert backend.graphs == 0


def test_native_layers_cannot_be_compiled():
    with pytest.raises(InvalidConfig, match="compile=True"), running("sync", compile=True):
        pass


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.WARNING, "twostroke.model.adapter")
    return lambda: [record.message for record in caplog.records if record.name == "twostroke.model.adapter"]


def test_a_compiler_that_fails_leaves_the_model_as_it_was(backend, log):
    backend.fails = True
    model = compiled_model(FAMILIES["llama"])
    [message] = log()
    assert message.startswith("llama: not compiled: BackendCompilerFailed")
    assert "no such compiler" in message
    assert "\n" not in message
    check_eager(model)


def test_a_compiler_that_fails_later_does_not_stop_a_step(backend, log):
    model = compiled_model(FAMILIES["llama"])
    assert log() == []
    backend.fails = True
    torch.compiler.reset()
    check_eager(model)
    assert "no such compiler" in log()[0]
    assert len(log()) == 1


def test_compiled_layers_that_answer_otherwise_are_not_used(log, monkeypatch):
    def wrong(graph, inputs):
        return lambda *arguments: [out * 1.1 for out in graph(*arguments)]

    monkeypatch.setattr(compiled, "BACKEND", wrong)
    model = compiled_model(FAMILIES["llama"])
    assert "change the logits" in log()[0]
    check_eager(model)


def test_a_layer_that_cannot_be_traced_is_not_compiled(backend, log, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaMLP

    own = LlamaMLP.forward

    def looking(self, x):
        return own(self, x) if float(x.sum()) < 1e30 else x

    monkeypatch.setattr(LlamaMLP, "forward", looking)
    model = compiled_model(FAMILIES["llama"])
    assert log()[0].startswith("llama: not compiled: ")
    check_eager(model)


def test_an_error_of_attention_is_not_taken_for_one_of_the_compiler(backend):
    batch = Batch(compiled_model(FAMILIES["llama"]))
    with pytest.raises(IndexError):
        batch.step(chunks=[(9, 0, [1, 2, 3])])


def check_eager(model: TransformersModel) -> None:
    a, _ = sequences()
    with torch.no_grad():
        expected = plain(FAMILIES["llama"])(input_ids=torch.tensor([a]), use_cache=False).logits[0]
    torch.testing.assert_close(Batch(model).step(chunks=[(0, 0, a)]), expected, atol=1e-4, rtol=1e-4)


def test_more_kinds_of_layers_than_torch_keeps_graphs_for_are_not_compiled(backend, log, monkeypatch):
    """Each layer scales its output otherwise, so that no two share a graph."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    own = LlamaDecoderLayer.forward

    def scaled(self, *arguments, **options):
        return own(self, *arguments, **options) * (1 + self.self_attn.layer_idx / 64)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", scaled)
    config = FAMILIES["llama"] | {"num_hidden_layers": 12}
    model = compiled_model(config)
    assert len(log()) == 1
    assert log()[0].startswith("llama: not compiled: FailOnRecompileLimitHit")
    a, _ = sequences()
    torch.testing.assert_close(Batch(model).step(chunks=[(0, 0, a)]), Batch(adapted(config)).step(chunks=[(0, 0, a)]))
